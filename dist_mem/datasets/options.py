"""Options that builders have in common, and checks of their paths."""

from __future__ import annotations

import argparse
from pathlib import Path

from dist_mem.errors import UnusableError


def add_build_options(parser: argparse.ArgumentParser, *, vocab_size: int | None) -> None:
    """Add the options of every builder that calls `build_dataset`.

    Args:
        vocab_size: default of --vocab-size; None: the builder has no such option.
    """
    add = parser.add_argument
    if vocab_size is not None:
        size_help = "of SentencePiece (default: %(default)s)"
        add("--vocab-size", type=positive, default=vocab_size, metavar="N", help=size_help)
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out")


def add_tokenizer_from(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add --tokenizer-from; `otherwise`: what its help says of a build without it."""
    what = f"take the tokenizer of this data directory, export, or folder of a published model {otherwise}"
    parser.add_argument("--tokenizer-from", type=Path, metavar="DIR", help=what)


def check_paths(*paths: Path | None) -> None:
    """Raise UnusableError if an input file or folder does not exist; None: an option that was not given."""
    for path in paths:
        if path is not None and not path.exists():
            raise UnusableError(f"there is no {path}")


def positive(text: str) -> int:
    """Parse an option's value that must be 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
