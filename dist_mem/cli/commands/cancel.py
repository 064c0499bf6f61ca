"""Save, stop and cancel the jobs of a run, without a restart."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

PLACE = ("train", 5)
EXAMPLE = "runs/pg19_small"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("--now", action="store_true", help="do not save a checkpoint first")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.launch.cancel import run as run_command

    return run_command(options.run, now=options.now)
