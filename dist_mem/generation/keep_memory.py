"""The commands that make and describe memory files: read a text once, then ask for ever.

    dist-mem read holmes.txt --run runs/demo -o holmes.mem
    dist-mem memory show holmes.mem
    dist-mem generate runs/demo --memory holmes.mem --prompt "Holmes opened the door"

`generate`, `evaluate` and `dialogue` take such a file with `--memory`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_mem.errors import EXIT_DONE, run_error
from dist_mem.evaluation.memory_file import OPEN_SEGMENT, MemoryFile, read_memory_file
from dist_mem.generation.text import read_file
from dist_mem.generation.text_memory import Memory, open_to_generate, read_text
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.terminal import label_lines, short_digest


def run_read(
    text: Path,
    run: Path,
    out: Path,
    *,
    memory: Path | None = None,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Read a text with a model, write the memory of it, and return the exit code.

    Args:
        run: a run directory, one checkpoint in it, or an export.
        memory: a memory file of earlier texts, which this one continues; None: an empty memory.

    Raises:
        UnusableError: the text, the model, the overrides or a path is invalid.
    """
    content = read_file(text, "")
    try:
        with hold_file(out):  # before reading, not after; `memory` may be the same file
            trained = open_to_generate(run, overrides, checkpoint)
            before = None if memory is None else Memory.load(memory)
            began = time.monotonic()
            read = read_text(trained, content, name=text.name, memory=before, shown=True)
            read.save(out)
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    seconds = time.monotonic() - began
    print(f"{text}: {read.texts[-1].num_tokens:,} tokens read in {seconds:.1f} s")
    print(f"written: {out}")
    return EXIT_DONE


def run_show(path: Path) -> int:
    """Print what a memory file contains, and return the exit code.

    Raises:
        UnusableError: as `read_memory_file`.
    """
    print("\n".join(label_lines(_describe(read_memory_file(path)))))
    return EXIT_DONE


def _describe(found: MemoryFile) -> Iterator[tuple[str, str]]:
    """Yield labels and texts."""
    header = found.header
    model = header["model"]
    yield "file", f"{found.path}, {found.path.stat().st_size:,} bytes, format {header['format_version']}"
    for read in found.texts:
        yield "text", f"{read.name}, {read.num_tokens:,} tokens, SHA-256 {short_digest(read.sha256)}"
    opened = len(found.tensors[OPEN_SEGMENT])
    yield "position", f"{found.num_tokens:,} tokens read; inputs of the open segment: {opened}"
    yield (
        "model",
        f"{model['name']}, step {model['step']:,}, SHA-256 of the weights {short_digest(model['weights_sha256'])}",
    )
    yield "tokenizer", short_digest(header["tokenizer_fingerprint"])
    for key, value in header["settings"].items():
        yield "setting", f"{key} = {value}"
    for name, tensor in found.tensors.items():
        yield "tensor", f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    yield "SHA-256", f"{short_digest(header['sha256'])} (verified)"
