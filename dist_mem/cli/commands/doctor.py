"""Check whether machines, network and ranks are fit to train."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import CONFIG
from dist_mem.cli.configuration import load_checked

PLACE = ("check", 3)
EXAMPLE = "configs/demo.yaml"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("config", nargs="*", default=[], help=f"{CONFIG} (default: check only machines and network)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()  # as a run does: the doctor checks what a run will have
    from dist_mem.doctor import run_checks

    return run_checks.run(load_checked(options.config, builds_model=True) if options.config else None)
