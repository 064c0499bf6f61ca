"""Generate replies in the dialogues of a split, and score them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import add_memory, add_model, add_sampling, count
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("use a trained model", 10)
EXAMPLE = "runs/cmu_dog --split test --limit 100"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(added)
    add_memory(added, "every conversation continues")
    added.add_argument("--limit", type=count, metavar="N", help="read the first N conversations (default: all)")
    added.add_argument("--turns", type=count, metavar="N", help="replies per conversation, spread (default: all)")
    add_sampling(added, tokens=50, top_p=0.9)
    added.add_argument("--wordnet", type=Path, metavar="FOLDER", help="for METEOR (default: /usr/share/wordnet)")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.papers.dialogue.score_replies import run as run_command
        from dist_mem.papers.dialogue.score_replies import settings_of

        settings = {"checkpoint": options.checkpoint, "overrides": options.overrides}
        return run_command(options.run, settings_of(options), early=early, **settings)
