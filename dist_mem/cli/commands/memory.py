"""Show what a memory file contains."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

PLACE = ("use a trained model", 9)
EXAMPLE = "show book.mem"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("action", choices=["show"])
    added.add_argument("file", type=Path, metavar="FILE", help="a memory file, as `dist-mem read` writes it")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.generation.keep_memory import run_show

    return run_show(options.file)
