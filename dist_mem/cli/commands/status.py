"""Show the job, step, speed, time left and last checkpoint of runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

PLACE = ("train", 3)
EXAMPLE = "runs/pg19_small"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    what = "run directories, or folders whose runs are listed, one a line (default: runs)"
    added.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=what)
    added.add_argument("--json", action="store_true", help="print one JSON object per run, one per line")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.launch.status import run as run_command

    return run_command(options.runs or [Path("runs")], as_json=options.json)
