"""Show what memory changed in a text, or how much an infinity-former's memory has kept."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import add_model, count, position, span
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import wants_colour
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("use a trained model", 4)
EXAMPLE = "runs/demo --book 9003 --split test"
LIMIT = 100  # documents of the regression error
_OF_DOCUMENTS = ("without", "passages", "empty_at", "show")  # options that need a document


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(added, overrides="another run to compare with, and key=value overrides of eval.* and data.path")
    text = added.add_mutually_exclusive_group()
    text.add_argument("--book", metavar="ID", help="show what memory changed in this document of the split")
    text.add_argument("--text", type=Path, metavar="FILE", help="show what memory changed in this UTF-8 file")
    removed = added.add_mutually_exclusive_group()
    removed.add_argument("--without", type=span, metavar="BEGIN:END", help="take these tokens out of the memory")
    removed.add_argument(
        "--passages",
        type=count,
        nargs="?",
        const=32,
        metavar="N",
        help="remove past segments from the memory in turn, at most N per segment (default: 32)",
    )
    added.add_argument("--empty-at", type=position, metavar="TOKEN", help="also empty the memory there")
    added.add_argument("--show", type=span, metavar="BEGIN:END", help="print these tokens (default: the largest gains)")
    added.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="default: on a terminal")
    added.add_argument(
        "--limit",
        type=count,
        metavar="N",
        help=f"without --book and --text: the regression error over the first N documents (default: {LIMIT})",
    )


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    has_document = _has_document(options)
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        if has_document:
            from dist_mem.inspection import inspect_document
            from dist_mem.inspection.request import request_of

            return inspect_document.run(request_of(options, with_colour=wants_colour(options.color)), early=early)
        from dist_mem.papers.regression_error import run as run_command

        settings = {"split": options.split, "checkpoint": options.checkpoint, "overrides": options.overrides}
        return run_command(options.run, limit=options.limit or LIMIT, early=early, **settings)


def _has_document(options: Namespace) -> bool:
    """Return whether a document is to be inspected.

    Raises:
        UnusableError: an argument is only for the other case.
    """
    if options.book is not None or options.text is not None:
        if options.limit is not None:
            raise UnusableError(f"--limit {options.limit}: not with --book or --text, which read one document")
        if options.split is not None and options.book is None:
            raise UnusableError(f"--split {options.split}: only with --book; it is the split of that document")
        return True
    given = [f"--{name.replace('_', '-')}" for name in _OF_DOCUMENTS if getattr(options, name) is not None]
    given += [text for text in options.overrides if "=" not in text]
    if given:
        raise UnusableError(f"inspect: {given[0]} is for one document: give --book ID or --text FILE too")
    return False
