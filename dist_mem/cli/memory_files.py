"""The commands read and memory, which write and show memory files: their arguments and functions."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path

from dist_mem.cli.arguments import MODEL, add_checkpoint, add_memory, output_file


def add_read_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem read`."""
    added.add_argument("text", type=Path, help="UTF-8 file, of any length")
    added.add_argument("overrides", nargs="*", default=[], help="key=value overrides, as for `dist-mem evaluate`")
    added.add_argument("--run", type=Path, required=True, metavar="RUN", help=MODEL)
    added.add_argument("--out", "-o", type=output_file, required=True, metavar="FILE", help="memory file to write")
    add_memory(added, "the text continues")
    add_checkpoint(added)


def add_memory_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem memory`."""
    added.add_argument("action", choices=["show"])
    added.add_argument("file", type=Path, metavar="FILE", help="a memory file, as `dist-mem read` writes it")


def read(options: argparse.Namespace) -> int:
    """Read a text once and write its memory, from which other commands continue."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.generation.keep_memory import run_read

    given = {"memory": options.memory, "checkpoint": options.checkpoint, "overrides": options.overrides}
    return run_read(options.text, options.run, options.out, **given)


def memory(options: argparse.Namespace) -> int:
    """Show what a memory file contains."""
    from dist_mem.generation.keep_memory import run_show

    return run_show(options.file)
