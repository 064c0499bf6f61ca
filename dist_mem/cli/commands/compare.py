"""Compare the evaluations of several runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import output_file, split

PLACE = ("use a trained model", 2)
EXAMPLE = "runs/demo_none runs/demo"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("runs", nargs="+", type=Path, help="run directories, or reports of evaluations")
    added.add_argument("--split", type=split, metavar="NAME", help="split to compare (default: test, else validation)")
    added.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw recall perplexity by distance into this file"
    )


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.evaluation.compare import run as run_command

    return run_command(options.runs, split=options.split, picture=options.plot)
