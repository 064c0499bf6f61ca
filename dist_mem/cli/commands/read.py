"""Read a text once and write its memory, from which other commands continue."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import MODEL, add_checkpoint, add_memory, output_file

PLACE = ("use a trained model", 8)
EXAMPLE = "book.txt --run runs/demo -o book.mem"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("text", type=Path, help="UTF-8 file, of any length")
    added.add_argument("overrides", nargs="*", default=[], help="key=value overrides, as for `dist-mem evaluate`")
    added.add_argument("--run", type=Path, required=True, metavar="RUN", help=MODEL)
    added.add_argument("--out", "-o", type=output_file, required=True, metavar="FILE", help="memory file to write")
    add_memory(added, "the text continues")
    add_checkpoint(added)


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.generation.keep_memory import run_read

    given = {"memory": options.memory, "checkpoint": options.checkpoint, "overrides": options.overrides}
    return run_read(options.text, options.run, options.out, **given)
