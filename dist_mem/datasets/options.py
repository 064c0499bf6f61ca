"""Options that builders have in common, and checks of their paths."""

from __future__ import annotations

import argparse
from pathlib import Path

from dist_mem.data.tokenizers.sentencepiece import SentencePieceTokenizer
from dist_mem.errors import UnusableError


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program whose help is its module's docstring."""
    summary, _, details = (doc or "").partition("\n")
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=summary, epilog=details, formatter_class=kind)


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every builder that calls `build_dataset`."""
    add = parser.add_argument
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out, when this one is whole")


def add_tokenizer_options(parser: argparse.ArgumentParser, *kinds: str, vocab_size: int) -> None:
    """Add the choice of a tokenizer, by default the first kind, and `vocab_size` as what `vocab_size_of` returns."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--tokenizer", choices=kinds, default=kinds[0], help="default: %(default)s")
    add_tokenizer_from(one, "instead")
    size_help = f"of SentencePiece (default: {vocab_size})"
    parser.add_argument("--vocab-size", type=positive, metavar="N", help=size_help)
    parser.set_defaults(default_vocab_size=vocab_size)


def vocab_size_of(options: argparse.Namespace) -> int:
    """Return the pieces of a SentencePiece model. Raises UnusableError if they are given for another tokenizer."""
    is_other = options.tokenizer_from is not None or options.tokenizer != SentencePieceTokenizer.kind
    if options.vocab_size is not None and is_other:
        other = f"--tokenizer {options.tokenizer}" if options.tokenizer_from is None else "that of --tokenizer-from"
        raise UnusableError(
            f"--vocab-size {options.vocab_size} is for SentencePiece, but the tokenizer is {other}, which has its own "
            "size: leave out one of them"
        )
    size: int = options.default_vocab_size if options.vocab_size is None else options.vocab_size
    return size


def add_tokenizer_from(parser: argparse._ActionsContainer, otherwise: str) -> None:
    """Add --tokenizer-from; `otherwise`: what its help says of a build without it."""
    what = f"take the tokenizer of this data directory, export, or folder of a published model {otherwise}"
    parser.add_argument("--tokenizer-from", type=Path, metavar="DIR", help=what)


def check_paths(*paths: Path | None) -> None:
    """Raise UnusableError if an input file or folder does not exist; None: an option that was not given."""
    for path in paths:
        if path is not None and not path.exists():
            raise UnusableError(f"there is no {path}")


def seed(text: str) -> int:
    """Parse a seed as numpy's generators and torch's take it: 0 to 2**32 - 1."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {2**32 - 1}")
    return int(text)


def positive(text: str) -> int:
    """Parse an option's value that must be 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
