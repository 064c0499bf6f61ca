"""List, verify or show the checkpoints of a run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

PLACE = ("train", 6)
EXAMPLE = "verify runs/demo"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("action", choices=["list", "verify", "show"])
    added.add_argument("path", type=Path, help="a run directory, or one checkpoint in it")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.checkpoint.listing import run as run_command

    return run_command(options.action, options.path)
