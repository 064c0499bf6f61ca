"""Check a memory against every rule of the contract."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import place

PLACE = ("check", 4)
EXAMPLE = "examples/averages.py:Averages"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("kind", type=place, help="PATH.py:CLASS, or the name of a memory")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.contract.check_memory import run as run_command

    return run_command(options.kind)
