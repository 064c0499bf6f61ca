"""Options and exit codes shared by all builders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bucket_download import DownloadError

from dist_mem.data.builders.workers import WorkerKilledError
from dist_mem.errors import run_error


def builder_parser(docstring: str | None, *, vocab_size: int | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every builder; its help is the builder's module docstring.

    Args:
        vocab_size: default of --vocab-size; None: the builder has no such option.
    """
    summary, _, details = (docstring or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if vocab_size is not None:
        size_help = "of SentencePiece (default: %(default)s)"
        add("--vocab-size", type=positive, default=vocab_size, metavar="N", help=size_help)
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out")
    return parser


def exit_code(build: Callable[[], None], *, builder: str, reads: Iterable[Path | None] = ()) -> int:
    """Run a build, report errors, and return the exit code: 2 for the user's input, 1 for the machine.

    Args:
        builder: its name, for messages.
        reads: input files and folders, which must exist; None: an option that was not given.
    """
    try:
        for path in reads:
            if path is not None and not path.exists():
                raise ValueError(f"there is no {path}")
        build()
    except ValueError as error:
        print(f"{builder}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{builder}: {error}; fix this, and the same command continues from what is finished", file=sys.stderr)
        return run_error(error).exit_code
    except (DownloadError, WorkerKilledError) as error:
        print(f"{builder}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{builder}: stopped; the same command continues from here", file=sys.stderr)
        return 130
    return 0


def positive(text: str) -> int:
    """Parse an option's value that must be 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
