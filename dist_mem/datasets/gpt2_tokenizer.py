"""Train a tokenizer of GPT-2's kind on the .txt files of a folder, for the builders' --tokenizer-from.

    python -m dist_mem.datasets.gpt2_tokenizer pg19/train --vocab-size 2000 --out data/small_tokenizer
    dist-mem data build pg19 --source pg19 --out data/pg19_small --tokenizer-from data/small_tokenizer

A published model's needs no such step: --tokenizer-from takes its folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata, save_tokenizer
from dist_mem.datasets.corpus_rows import TEXT_SUFFIX
from dist_mem.datasets.options import parser_of, positive
from dist_mem.datasets.source import read_text
from dist_mem.datasets.tree import listed_files
from dist_mem.errors import EXIT_DONE, UnusableError, run_error
from dist_mem.runtime.locks import hold_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Create the directory, report errors, and return the exit code."""
    options = parse_arguments(arguments)
    try:
        make(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return run_error(error).exit_code
    return EXIT_DONE


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("--out", type=Path, required=True, help="directory to make, with tokenizer.json and tokenizer.bpe.json")
    add("--vocab-size", type=positive, default=8_000, metavar="N", help="tokens (default: %(default)s)")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> None:
    """Train the tokenizer, and save it."""
    tokenizer = train_byte_pairs(texts(options.folder), vocab_size=options.vocab_size)
    recipe = f"byte pairs trained on {options.folder}"
    with hold_folder(options.out, f"--out {options.out}"):
        path = options.out / JSON_NAME
        if path.exists() and read_tokenizer_metadata(options.out)["fingerprint"] != tokenizer.fingerprint:
            raise UnusableError(f"{path} is another tokenizer, which data there may need: give another --out")
        save_tokenizer(tokenizer, options.out, recipe=recipe)
    print(f"{options.out}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}")


def texts(folder: Path) -> Iterator[str]:
    """Return the contents of the .txt files of a folder, sorted by name."""
    return (read_text(path) for path in listed_files(folder, TEXT_SUFFIX).values())


if __name__ == "__main__":
    sys.exit(main())
