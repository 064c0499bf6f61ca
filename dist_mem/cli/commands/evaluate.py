"""Score a checkpoint on whole documents."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import add_memory, add_model
from dist_mem.errors import UnusableError
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


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    if options.by:
        require("matplotlib", "--by position")
    if options.memory is not None and options.without_memory:
        raise UnusableError(f"--memory {options.memory}: not with --without-memory, which empties it")
    with StopSignal(OF_SCHEDULERS) as early:  # before the imports, which take seconds
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.evaluation.evaluate import run as run_command

        return run_command(
            options.run,
            split=options.split,
            checkpoint=options.checkpoint,
            overrides=options.overrides,
            without_memory=options.without_memory,
            memory=options.memory,
            by_position=options.by is not None,
            sources=options.sources,
            early=early,
        )
