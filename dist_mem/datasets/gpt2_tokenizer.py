"""Save GPT-2's tokenizer, or train one of its kind on text, for the builders' --tokenizer-from.

    python -m dist_mem.datasets.gpt2_tokenizer gpt2 --out data/gpt2_tokenizer
    python -m dist_mem.datasets.gpt2_tokenizer pg19/train --train --vocab-size 2000 --out data/small_tokenizer
    dist-mem data build pg19 --source pg19 --out data/pg19_gpt2 --tokenizer-from data/gpt2_tokenizer

FOLDER is a model's folder in Hugging Face's layout, or with --train a folder of .txt files, all of which are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dist_mem.data.tokenizers.byte_pairs import read_byte_pairs, train_byte_pairs
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.datasets.options import positive
from dist_mem.datasets.rows import TEXT_SUFFIX
from dist_mem.datasets.source import read_text
from dist_mem.datasets.tree import listed_files
from dist_mem.errors import EXIT_DONE, run_error
from dist_mem.runtime.locks import held_folder


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
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER")
    add("--out", type=Path, required=True, help="directory to make, with tokenizer.json and tokenizer.bpe.json")
    add("--train", action="store_true", help="train byte pairs on the .txt files of FOLDER")
    add("--vocab-size", type=positive, default=8_000, metavar="N", help="with --train (default: %(default)s)")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> None:
    """Read or train the tokenizer, and save it."""
    if options.train:
        tokenizer = train_byte_pairs(texts(options.folder), vocab_size=options.vocab_size)
        recipe = f"byte pairs trained on {options.folder}"
    else:
        tokenizer, recipe = read_byte_pairs(options.folder), f"read from {options.folder}"
    with held_folder(options.out, f"--out {options.out}"):
        save_tokenizer(tokenizer, options.out, recipe=recipe)
    print(f"{options.out}: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}")


def texts(folder: Path) -> Iterator[str]:
    """Return the contents of the .txt files of a folder, sorted by name."""
    return (read_text(path) for path in listed_files(folder, TEXT_SUFFIX).values())


if __name__ == "__main__":
    sys.exit(main())
