"""The commands that look into a trained memory, `dist-mem inspect` and `figure`, with their arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import count, position, span, split
from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import wants_colour
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

_OF_DOCUMENTS = ("without", "passages", "empty_at", "show")  # options that need a document


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `inspect` but the run."""
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
        help="take out every segment in turn, of at most N before each segment (default: 32)",
    )
    added.add_argument("--empty-at", type=position, metavar="TOKEN", help="also empty the memory there")
    added.add_argument("--show", type=span, metavar="BEGIN:END", help="print these tokens (default: the largest gains)")
    added.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="default: on a terminal")
    added.add_argument(
        "--limit",
        type=count,
        default=100,
        metavar="N",
        help="without --book and --text: the regression error over the first N documents (default: 100)",
    )


def has_document(options: Namespace) -> bool:
    """Return whether a document is to be inspected.

    Raises:
        UnusableError: none is, but an argument is only for one.
    """
    if options.book is not None or options.text is not None:
        return True
    given = [f"--{name.replace('_', '-')}" for name in _OF_DOCUMENTS if getattr(options, name) is not None]
    given += [text for text in options.overrides if "=" not in text]
    if given:
        raise UnusableError(f"inspect: {given[0]} is for one document: give --book ID or --text FILE too")
    return False


def add_figure_arguments(added: ArgumentParser, model: str) -> None:
    """Add the arguments of `figure` but the checkpoint; `model` describes a run."""
    added.add_argument("name", nargs="?", help="as in the papers, for example infinite.fig7; see --list")
    added.add_argument("runs", nargs="*", help=f"{model}; then key=value overrides, as for `evaluate`")
    added.add_argument("--list", action="store_true", help="list all figures")
    added.add_argument("--split", type=split, metavar="NAME", help="split to read (default: eval.split)")
    added.add_argument("--document", metavar="ID", help="read this document of the split")
    added.add_argument("--tokens", type=count, metavar="N", help="tokens to read (default: as many as the paper)")
    added.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="folder to write (default: RUN/figures)")
    added.add_argument("--format", choices=["png", "svg"], default="png", help="of the picture (default: png)")


def inspect(options: Namespace) -> int:
    """Show what memory changed in a text, or how much an infinity-former's memory has kept."""
    of_document = has_document(options)
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        if of_document:
            from dist_mem.inspection import command
            from dist_mem.inspection.request import request_of

            return command.run(request_of(options, with_colour=wants_colour(options.color)), early=early)
        from dist_mem.evaluation.regression_error import run

        settings = {"split": options.split, "checkpoint": options.checkpoint, "overrides": options.overrides}
        return run(options.run, limit=options.limit, early=early, **settings)


def figure(options: Namespace) -> int:
    """Draw a figure of the papers from trained runs."""
    if not options.list and options.name is None:
        raise UnusableError("figure: give a name and a run, as in: dist-mem figure infinite.fig7 RUN; or --list")
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.inspection import figure_command as command
        from dist_mem.inspection.figures.parts.source import Settings

        if options.list:
            print(command.described())
            return 0
        overrides = tuple(text for text in options.runs if "=" in text)
        runs = [Path(text) for text in options.runs if text not in overrides]
        settings = Settings(options.split, options.document, options.tokens, overrides)
        return command.run(
            options.name,
            runs,
            settings,
            checkpoint=options.checkpoint,
            folder=options.out,
            form=options.format,
            early=early,
        )
