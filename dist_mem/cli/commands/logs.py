"""Print the end of the logs of a run's newest job."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import count

PLACE = ("train", 4)
EXAMPLE = "runs/pg19_small --follow"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("--follow", "-f", action="store_true", help="print until the run's jobs have ended")
    added.add_argument("--lines", "-n", type=count, default=20, metavar="N", help="lines of each log (default: 20)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.launch.logs import run as run_command

    return run_command(options.run, num_lines=options.lines, follow=options.follow)
