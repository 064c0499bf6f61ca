"""Generation as a command: one run writes on from a prompt, or several do from the same one.

    dist-mem generate runs/demo --prompt-file book.txt --tokens 500 --top-p 0.95
    dist-mem generate --compare runs/none runs/demo --prompt-file book.txt --out case_study.md

The second has the settings of LaMemo's published script (Ji et al. 2022): 256 tokens by nucleus sampling with p = 0.95.
One process, no process group. The texts go to the standard output, everything else to the standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.evaluation.memory_estimate import refuse_what_cannot_fit, writing_parts
from dist_mem.evaluation.protocol import short_term_len
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation import output as report
from dist_mem.generation.generate import stream
from dist_mem.generation.output import Continuation, heading
from dist_mem.generation.reading import Reading, read, select, start
from dist_mem.generation.sampling import Sampling
from dist_mem.generation.text import TextWriter, printable
from dist_mem.runtime.signals import StopSignal

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=")


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    runs: list[Path]
    overrides: list[str]
    prompt: str
    num_tokens: int
    num_samples: int
    sampling: Sampling
    checkpoint: int | None
    out: Path | None
    compare: bool


def request_of(options: argparse.Namespace) -> Request:
    """What the command line asks for; runs and `key=value` overrides may stand in any order.

    Raises:
        UnusableError: the prompt or a number cannot be used.
    """
    arguments = [*([options.run] if options.run else []), *options.overrides, *options.compare]
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    except ValueError as error:
        raise UnusableError(f"--{str(error).replace('_', '-', 1)}") from error
    return Request(
        runs=[Path(text) for text in arguments if text not in overrides],
        overrides=overrides,
        prompt=read_prompt(options.prompt, options.prompt_file),
        num_tokens=options.tokens,
        num_samples=options.samples,
        sampling=sampling,
        checkpoint=options.checkpoint,
        out=options.out,
        compare=bool(options.compare),
    )


def read_prompt(text: str | None, path: Path | None) -> str:
    """The prompt, with LF line ends and without a mark of order (U+FEFF), as texts are read to be trained on.

    Raises:
        UnusableError: the file is not there, or is no UTF-8.
    """
    if path is None:
        return (text or "").replace("\r\n", "\n").replace("\r", "\n")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableError(
            f"--prompt-file {path}: byte {error.start} is not UTF-8; convert the file, as with iconv -t utf-8"
        ) from error
    except OSError as error:
        raise UnusableError(f"--prompt-file {path}: {error.strerror}") from error


def run(request: Request) -> int:
    """The command. Returns the exit code of the process.

    Raises:
        UnusableError: checkpoint, overrides or prompt cannot be used as they are.
    """
    if request.compare and len(request.runs) < 2:
        raise UnusableError("--compare takes two runs or more")
    if not request.compare and len(request.runs) != 1:
        raise UnusableError(f"{len(request.runs)} runs are given: give one, or several after --compare")
    done: list[Continuation] = []
    try:
        if request.out is not None:
            request.out.parent.mkdir(parents=True, exist_ok=True)  # what cannot be written is better known now
            if request.out.is_dir():
                raise UnusableError(f"--out {request.out} is a directory: give a file")
        with suppress(KeyboardInterrupt):  # while a run is loaded or reads: those before it are kept
            for path in request.runs:
                done.append(_continue(path, request))
                if done[-1].stopped:
                    break
        if not done:
            print("stopped before anything was written", file=sys.stderr)
            return EXIT_FAILED
        print(f"\n{report.to_table(done)}", file=sys.stderr)
        if request.out is not None:
            report.write(request.out, done, request.prompt, request.sampling)
            print(f"written: {request.out}", file=sys.stderr)
    except UnusableError:
        raise
    except (OSError, ValueError) as error:
        raise UnusableError(str(error)) from error
    return EXIT_DONE


def _continue(path: Path, request: Request) -> Continuation:
    """Load a run, read the prompt, write."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_model(path, *request.overrides, step=request.checkpoint, device=device)
    if trained.config.train.threads:
        torch.set_num_threads(trained.config.train.threads)
    began = time.monotonic()
    tokens = trained.tokenizer.encode(request.prompt)
    parts = writing_parts(trained.config, trained.tokenizer.vocab_size, num_samples=request.num_samples)
    refuse_what_cannot_fit(parts, trained.device)
    reading = read(trained, start(trained), [tokens])
    facts: dict[str, Any] = {
        "run": str(path),
        "checkpoint": str(trained.checkpoint.directory),
        "step": trained.checkpoint.manifest["step"],
        "memory": _kind(trained.config.memory),
        "seg_len": trained.config.train.seg_len,
        "mem_len": short_term_len(trained.config.memory),
        "prompt_tokens": len(tokens),
    }
    print(f"{path}: prompt of {len(tokens):,} tokens read in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return _write(trained, select(reading, [0] * request.num_samples), request, facts)


def _kind(memory: Mapping[str, Any]) -> str:
    """As in the memory block: `infinite over lamemo`."""
    below = memory.get("over")
    return str(memory["kind"]) if not below or below["kind"] == "none" else f"{memory['kind']} over {_kind(below)}"


def _write(trained: TrainedModel, reading: Reading, request: Request, facts: Mapping[str, Any]) -> Continuation:
    """Write on in every lane; a single one as it comes. Ctrl-C ends it with the texts so far, and so does `| head`."""
    writers = [TextWriter(trained.tokenizer) for _ in range(request.num_samples)]
    several = request.num_samples > 1
    is_read = True
    if request.compare and not several:
        is_read = _say(f"\n== {facts['run']} ({facts['memory']}, T {facts['seg_len']}, M {facts['mem_len']})\n")
    num_tokens, began = 0, time.monotonic()
    with StopSignal([signal.SIGINT, signal.SIGTERM]) as stop:  # acted on between tokens, so that no text is lost
        for step in stream(trained, reading, num_tokens=request.num_tokens, sampling=request.sampling):
            parts = [writer.add(token) for writer, token in zip(writers, step.tokens.tolist(), strict=True)]
            num_tokens += 1
            if not several:
                is_read = is_read and _say(parts[0])
            if stop.received or not is_read:
                break
    seconds = time.monotonic() - began
    ends = [writer.end() for writer in writers]
    texts = [writer.text for writer in writers]
    written = Continuation(
        **facts,
        num_tokens=[num_tokens] * len(texts),
        seconds=seconds,
        texts=texts,
        stopped=stop.received is not None or not is_read,
    )
    if several:
        for number, text in enumerate(texts):
            _say(f"\n== {heading(written, number)}\n{text}\n")
    else:
        _say(f"{ends[0]}\n")
    print(f"{'stopped; ' if written.stopped else ''}{written.pace}", file=sys.stderr)
    return written


def _say(text: str) -> bool:
    """Print, at once; returns whether anybody still reads, as `| head` no longer does when it has its lines."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is said from now on goes nowhere
        return False
    return True
