"""The function of `dist-mem arena`, and its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.sweeping import add_running, run_or_submit


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem arena`."""
    added.add_argument("arena", type=Path, metavar="ARENA.yaml", help="memories, budget, seeds and columns")
    what = add_running(added, "runs/arena/NAME")
    what.add_argument("--plan", action="store_true", help="print what every memory takes within the budget, and exit")


def arena(options: Namespace) -> int:
    """Compare memories at an equal budget: train, evaluate, and write a table with intervals."""
    from dist_mem.studies.arena_command import run, submit

    return run_or_submit(options, options.arena, run, submit, only_plan=options.plan)
