"""The generate command: continue a prompt with one run, or the same prompt with several runs.

    dist-mem generate runs/demo --prompt-file book.txt --tokens 500 --top-p 0.95
    dist-mem generate --compare runs/none runs/demo --prompt-file book.txt --out case_study.md

`--compare` defaults to LaMemo's published script (Ji et al. 2022): 256 tokens by nucleus sampling with p = 0.95.
The command runs in one process without a process group. It prints the texts to standard output and everything else
to standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_mem.block import model_spec
from dist_mem.config.memory_blocks import describe_memory
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError, run_error
from dist_mem.estimate.memory import refuse_what_cannot_fit, writing_parts
from dist_mem.evaluation.protocol import short_term_len
from dist_mem.evaluation.trained_model import TrainedModel, find_checkpoint
from dist_mem.generation import output as report
from dist_mem.generation.generate import Sampling, stream
from dist_mem.generation.output import Continuation, heading
from dist_mem.generation.reading import Reading, read, select
from dist_mem.generation.text import TextWriter, read_file
from dist_mem.generation.text_memory import Memory, begin, open_to_generate
from dist_mem.runtime.shipped_files import example_book, example_model
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import make_printable

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=")


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments of the command."""

    runs: list[Path]
    overrides: list[str]
    prompt: str
    num_tokens: int
    num_samples: int
    sampling: Sampling
    checkpoint: int | None
    out: Path | None
    compare: bool
    memory: Path | None = None  # memory file of a text that the prompt continues


def request_of(options: argparse.Namespace) -> GenerationRequest:
    """Return the request of a command line; runs and `key=value` overrides may come in any order.

    Raises:
        UnusableError: the prompt or a number is invalid, or there is neither a prompt nor a memory.
    """
    has_prompt = options.prompt is not None or options.prompt_file is not None or options.memory is not None
    if not has_prompt and not options.example:
        raise UnusableError("give --prompt TEXT, --prompt-file FILE or --memory FILE; --prompt '' begins a document")
    if options.memory is not None and options.compare:
        raise UnusableError(f"--memory {options.memory}: not with --compare, because a memory is that of one model")
    arguments = [*([options.run] if options.run else []), *options.overrides, *options.compare]
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    runs = [Path(text) for text in arguments if text not in overrides]
    if options.example:
        if runs:
            raise UnusableError(f"--example: not with a run, such as {runs[0]}; leave one of them out")
        runs, overrides = [example_model()], ["train.threads=1", *overrides]  # more threads slow so small a model
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    except ValueError as error:
        raise UnusableError(f"--{str(error).replace('_', '-', 1)}") from error
    return GenerationRequest(
        runs=runs,
        overrides=overrides,
        prompt=read_prompt(options.prompt, options.prompt_file) if has_prompt else _half_of_example(),
        num_tokens=options.tokens,
        num_samples=options.samples,
        sampling=sampling,
        checkpoint=options.checkpoint,
        out=options.out,
        compare=bool(options.compare),
        memory=options.memory,
    )


def _half_of_example() -> str:
    """Return the first half of the shipped book, up to the end of a paragraph."""
    text = read_file(example_book(), "--example")
    print(f"the prompt is the first half of {example_book()}", file=sys.stderr)
    return text[: text.index("\n\n", len(text) // 2) + 2]


def read_prompt(text: str | None, path: Path | None) -> str:
    """Return the prompt with LF line ends and without a byte order mark (U+FEFF), as the builders read training texts.

    Raises:
        UnusableError: the file does not exist or is not UTF-8.
    """
    if path is None:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise UnusableError(
                f"--prompt is not UTF-8 at character {error.start}: give it in a file of UTF-8 with --prompt-file"
            ) from error
        return (text or "").replace("\r\n", "\n").replace("\r", "\n")
    return read_file(path, "--prompt-file")


def run(request: GenerationRequest) -> int:
    """Run the command and return the exit code of the process.

    Raises:
        UnusableError: the checkpoint, the overrides or the prompt is invalid.
    """
    if request.compare and len(request.runs) < 2:
        raise UnusableError("--compare takes two runs or more")
    if not request.compare and len(request.runs) != 1:
        raise UnusableError(f"{len(request.runs)} runs are given: give one, or several after --compare")
    done: list[Continuation] = []
    try:
        if request.out is not None:
            request.out.parent.mkdir(parents=True, exist_ok=True)  # fail before generating, not after
        for path in request.runs[1:]:  # that no text of an earlier run is lost
            find_checkpoint(path, request.checkpoint)
        try:
            with suppress(KeyboardInterrupt):  # Ctrl-C while a run loads or reads keeps the results of earlier runs
                for path in request.runs:
                    done.append(_continue(path, request))
                    if done[-1].stopped:
                        break
        finally:
            if done:  # also where a later run could not be loaded
                _report(done, request)
        if not done:
            print("stopped before anything was written", file=sys.stderr)
            return EXIT_FAILED
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    return EXIT_DONE


def _report(done: Sequence[Continuation], request: GenerationRequest) -> None:
    """Show the numbers of the texts, and write `--out`."""
    print(f"\n{report.to_table(done)}", file=sys.stderr)
    if request.out is not None:
        report.write(request.out, done, request.prompt, request.sampling)
        print(f"written: {request.out}", file=sys.stderr)


def _continue(path: Path, request: GenerationRequest) -> Continuation:
    """Load a run, read the prompt and generate."""
    trained = open_to_generate(path, request.overrides, request.checkpoint)
    began = time.monotonic()
    tokens = trained.tokenizer.encode(request.prompt)
    spec, precision = model_spec(trained.config, trained.tokenizer.vocab_size), trained.config.eval.precision
    parts = writing_parts(spec, precision, num_samples=request.num_samples)
    refuse_what_cannot_fit(parts, trained.device)
    before = None if request.memory is None else Memory.load(request.memory)
    reading = read(trained, begin(trained, before), [tokens])
    metadata: dict[str, Any] = {
        "run": str(path),
        "checkpoint": str(trained.checkpoint.directory),
        "step": trained.checkpoint.manifest["step"],
        "memory": describe_memory(trained.config.memory),
        "seg_len": trained.config.train.seg_len,
        "mem_len": short_term_len(trained.config.memory),
        "prompt_tokens": len(tokens),
        "memory_file": None if request.memory is None else str(request.memory),
    }
    if before is not None:
        print(f"{request.memory}: {before.num_tokens:,} tokens read before", file=sys.stderr)
    print(f"{path}: prompt of {len(tokens):,} tokens read in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return _write(trained, select(reading, [0] * request.num_samples), request, metadata)


def _write(
    trained: TrainedModel, reading: Reading, request: GenerationRequest, metadata: Mapping[str, Any]
) -> Continuation:
    """Generate in every lane, and print a single lane token by token.

    Ctrl-C and a closed pipe, as of `| head`, end the generation; the texts generated so far are returned.
    """
    writers = [TextWriter(trained.tokenizer) for _ in range(request.num_samples)]
    several = request.num_samples > 1
    is_read = True
    if request.compare and not several:
        kind, seg_len, mem_len = metadata["memory"], metadata["seg_len"], metadata["mem_len"]
        is_read = _print_now(f"\n== {metadata['run']} ({kind}, T {seg_len}, M {mem_len})\n")
    num_tokens, began = [0] * len(writers), time.monotonic()
    with StopSignal([signal.SIGINT, signal.SIGTERM]) as stop:  # checked between tokens, so that no text is lost
        for step in stream(trained, reading, num_tokens=request.num_tokens, sampling=request.sampling):
            for lane in step.writing.nonzero().flatten().tolist():
                part = writers[lane].add(int(step.tokens[lane]))
                num_tokens[lane] += 1
                if not several:
                    is_read = is_read and _print_now(part)
            if stop.received or not is_read:
                break
    seconds = time.monotonic() - began
    ends = [writer.end() for writer in writers]
    texts = [writer.text for writer in writers]
    written = Continuation(
        **metadata,
        num_tokens=num_tokens,
        seconds=seconds,
        texts=texts,
        stopped=stop.received is not None or not is_read,
    )
    if several:
        for number, text in enumerate(texts):
            _print_now(f"\n== {heading(written, number)}\n{text}\n")
    else:
        _print_now(f"{ends[0]}\n")
    print(f"{'stopped; ' if written.stopped else ''}{written.pace}", file=sys.stderr)
    return written


def _print_now(text: str) -> bool:
    """Print and flush; return whether standard output is still open, which `| head` closes when it has its lines."""
    try:
        sys.stdout.write(make_printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard all further output
        return False
    return True
