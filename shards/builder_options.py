"""The options that all builders share."""

from __future__ import annotations

import argparse


def builder_parser(docstring: str | None, *, vocab_size: int) -> argparse.ArgumentParser:
    """A parser with the options of every builder; its help is the builder's own docstring.

    Args:
        vocab_size: default of --vocab-size.
    """
    summary, _, details = (docstring or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vocab-size", type=positive, default=vocab_size, metavar="N", help="of SentencePiece (default: %(default)s)")
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out")
    return parser


def positive(text: str) -> int:
    """An option's value that must be 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
