"""The functions of the commands about one step of a run: `dist-mem batch` and `recompute`."""

from __future__ import annotations

import argparse

from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal


def batch(options: argparse.Namespace) -> int:
    """Show what text every lane read at a step."""
    from dist_mem.recompute.batch import run

    return run(options.run, options.step, rank=options.rank, full=options.full, overrides=options.overrides)


def recompute(options: argparse.Namespace) -> int:
    """Compute a step again from a checkpoint, and compare it with the recorded one."""
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.recompute.compare_step import run

        return run(options.run, options.step, options.overrides, early)
