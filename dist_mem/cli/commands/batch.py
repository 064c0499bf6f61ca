"""Show what text every lane read at a step."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial

from dist_mem.cli.arguments import add_step, count

PLACE = ("train", 8)
EXAMPLE = "runs/demo --step 57"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_step(added)
    added.add_argument("--rank", type=partial(count, least=0), metavar="R", help="only its lanes (default: all ranks)")
    added.add_argument("--full", action="store_true", help="print whole segments (default: beginning and end)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.recompute.batch import run as run_command

    return run_command(options.run, options.step, rank=options.rank, full=options.full, overrides=options.overrides)
