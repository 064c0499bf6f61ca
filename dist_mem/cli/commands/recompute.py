"""Compute a step again from a checkpoint, and compare it with the recorded one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import add_step
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("train", 9)
EXAMPLE = "runs/demo --step 57"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_step(added)


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.recompute.compare_step import run as run_command

        return run_command(options.run, options.step, options.overrides, early)
