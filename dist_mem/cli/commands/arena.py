"""Compare memories at an equal budget: train, evaluate, write a table with intervals."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import place
from dist_mem.cli.studies import add_study_arguments, run_study

PLACE = ("use a trained model", 14)
EXAMPLE = "configs/arena/second_edition.yaml --plan"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("study", type=place, metavar="ARENA.yaml", help="rows, budget, seeds and columns")
    what = add_study_arguments(added, "runs/arena/NAME")
    what.add_argument("--plan", action="store_true", help="print what every row takes within the budget, and exit")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    return run_study(options)
