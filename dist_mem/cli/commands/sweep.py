"""Train and compare every combination of some settings, several at one time."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import place
from dist_mem.cli.studies import add_study_arguments, run_study

PLACE = ("use a trained model", 13)
EXAMPLE = "configs/sweeps/rates.yaml --jobs 2"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("study", type=place, metavar="SWEEP.yaml", help="grid, rows, seeds and columns")
    add_study_arguments(added, "runs/sweep/NAME")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    return run_study(options)
