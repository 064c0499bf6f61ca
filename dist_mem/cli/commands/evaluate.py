"""Score a checkpoint on whole documents."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import (
    add_memory,
    add_model,
)
from dist_mem.errors import (
    UnusableError,
)
from dist_mem.runtime.extras import require
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("use a trained model", 1)
EXAMPLE = "runs/demo --split test eval.batch_size=8"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(added)
    added.add_argument("--without-memory", action="store_true", help="empty the memory at every segment")
    add_memory(added, "every document continues")
    added.add_argument("--sources", action="store_true", help="also the split of every source of data.mixture")
    of_position = "also the loss by position in the document: a table, a CSV and a picture"
    added.add_argument("--by", choices=("position",), help=of_position)
    added.add_argument("--sweep", metavar="KEY=LENGTHS", help="several lengths: mem_len=64,128,... or seg_len=...")
    also = "another run for --sweep; repeatable"
    added.add_argument("--also", type=Path, action="append", default=[], metavar="RUN", help=also)


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    is_sweep = options.sweep is not None
    if options.also and not is_sweep:
        raise UnusableError(f"--also {options.also[0]}: only with --sweep; evaluate one run at a time otherwise")
    if options.sources and is_sweep:
        raise UnusableError("--sources: not with --sweep; give data.path=FOLDER for the sweep of one")
    if options.by and is_sweep:
        raise UnusableError("--by position: not with --sweep; evaluate one setting at a time")
    if options.by:
        require("matplotlib", "--by position")
    if options.without_memory and is_sweep:
        raise UnusableError("--without-memory: not with --sweep; evaluate one setting at a time")
    if options.memory is not None and (is_sweep or options.without_memory):
        other = "--sweep, because a memory is that of one setting" if is_sweep else "--without-memory, which empties it"
        raise UnusableError(f"--memory {options.memory}: not with {other}")
    with StopSignal(OF_SCHEDULERS) as early:  # before the imports, which take seconds
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        settings = {"split": options.split, "checkpoint": options.checkpoint, "overrides": options.overrides}
        if is_sweep:
            from dist_mem.evaluation import sweep

            return sweep.run([options.run, *options.also], options.sweep, early=early, **settings)
        from dist_mem.evaluation.evaluate import run as run_command

        given = {
            "without_memory": options.without_memory,
            "memory": options.memory,
            "by_position": options.by is not None,
            "sources": options.sources,
        }
        return run_command(options.run, early=early, **given, **settings)
