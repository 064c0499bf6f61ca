"""Build the sorting task (Martins et al. 2022, "infinity-former", sec. 4.1): rank the symbols of a long sequence.

    python shards/build_sorting.py --out data/sorting --lengths 4000 8000 16000
    python shards/build_sorting.py --out data/sorting --lengths 500 1000 --seed 1

A document is a sequence of 20 symbols whose probabilities drift from one distribution to another, a separator, and the
20 symbols sorted by frequency, the most frequent first. Only these answers are scored. Each length has its own data
directory, <out>/<length>. The same options always produce the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from builder_options import exit_code, positive
from tqdm import tqdm

from dist_mem.data.metadata import ShardError
from dist_mem.data.shard import INDEX_NAME, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.registry import JSON_NAME, read_tokenizer_metadata, save_tokenizer
from dist_mem.data.tokenizers.words import WordTokenizer

NUM_SYMBOLS = 20  # symbols are words "0" to "19"
SEPARATOR = NUM_SYMBOLS
NAME = "sorting"
SPLITS = ("train", "validation", "test")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, report errors, and return the exit code."""
    options = parse_arguments(arguments)
    return exit_code(lambda: build(options), builder="build_sorting")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("data/sorting"),
        help="holds one data directory a length (default: %(default)s)",
    )
    add("--lengths", type=positive, nargs="+", default=[4000], metavar="N", help="tokens of a sequence (default: 4000)")
    add("--train", type=positive, default=8000, metavar="N", help="sequences (default: %(default)s, as published)")
    add("--validation", type=positive, default=800, metavar="N", help="likewise (default: %(default)s)")
    add("--test", type=positive, default=800, metavar="N", help="likewise (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all sequences (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace another build in --out")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> None:
    """Build a data directory for each length."""
    for length in options.lengths:
        out = options.out / str(length)
        for split in SPLITS if options.overwrite else ():
            (out / split / INDEX_NAME).unlink(missing_ok=True)  # without its index, a split does not exist
        tokenizer = sorting_tokenizer()
        if (out / JSON_NAME).exists() and not options.overwrite:
            _check_is_sorting(out, tokenizer)
        else:
            save_tokenizer(tokenizer, out)
        for split in SPLITS:
            build_split(out / split, length=length, count=getattr(options, split), seed=options.seed)


def build_split(split_dir: Path, *, length: int, count: int, seed: int) -> None:
    """Write a split, unless it exists already.

    Raises:
        ValueError: another one exists.
    """
    split, tokenizer = split_dir.name, sorting_tokenizer()
    recipe = f"sorting length {length} count {count} seed {seed}"
    if _is_built(split_dir, recipe):
        print(f"{length} {split}: already built, kept", flush=True)
        return
    # Each split and length has its own random stream; a split of more sequences begins with the same ones.
    draw = np.random.RandomState([seed, length, SPLITS.index(split)])
    documents = (document(draw, length, number, tokenizer) for number in range(1, count + 1))
    bar = tqdm(documents, total=count, desc=f"{length} {split}", unit="doc", leave=False, disable=None)
    write_split(bar, split_dir, name=NAME, split=split, tokenizer_fingerprint=tokenizer.fingerprint, recipe=recipe)
    print(f"{length} {split}: {count} sequences", flush=True)


def document(draw: np.random.RandomState, length: int, number: int, tokenizer: WordTokenizer) -> TokenizedDocument:
    """Draw the next sequence; only its answers are scored."""
    sequence = draw_sequence(draw, length)
    tokens = np.concatenate([sequence, [SEPARATOR], answers(sequence)]).astype(tokenizer.dtype)
    return TokenizedDocument(
        id=f"{number:06d}",
        title=f"sequence {number}",
        year=None,
        words=len(tokens),
        bytes=int(tokenizer.piece_bytes[tokens].sum()),
        tokens=tokens,
        mask=np.arange(len(tokens)) > length,
    )


def sorting_tokenizer() -> WordTokenizer:
    """Return a tokenizer of the words "0" to "19", and "20", the separator.

    It adds BOS before a sequence; the paper has no such token.
    """
    return WordTokenizer([str(symbol) for symbol in range(NUM_SYMBOLS + 1)])


def draw_sequence(draw: np.random.RandomState, length: int) -> np.ndarray:
    """Draw one sequence exactly as the published generator does, bit for bit: (length,) int64.

    Token j = 1, ..., T is drawn from (1 - j/T) p0 + (j/T) p1; p0 and p1 are 20 integers from 1 to 9 each, normalised.
    (The paper, sec. 4.1, calls the weight of p0 alpha and increases it; the published generator decreases it.)
    """
    first, last = draw.randint(1, 10, NUM_SYMBOLS), draw.randint(1, 10, NUM_SYMBOLS)
    progress = np.arange(1, length + 1)[:, None] / length
    probabilities = (1 - progress) * (first / first.sum()) + progress * (last / last.sum())
    # Equal to `RandomState.choice(20, p=...)` per token: one uniform number each, looked up in the cumulative sums.
    cumulative = probabilities.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    return (cumulative <= draw.random_sample(length)[:, None]).sum(axis=1)


def answers(sequence: np.ndarray) -> np.ndarray:
    """Return the symbols by decreasing count: (20,) int64.

    Symbols of equal count are in the order of their first appearance; unseen symbols come last, by number.
    """
    counts = np.bincount(sequence, minlength=NUM_SYMBOLS)
    appearance = np.full(NUM_SYMBOLS, len(sequence))
    symbols, places = np.unique(sequence, return_index=True)
    appearance[symbols] = places
    return np.lexsort((np.arange(NUM_SYMBOLS), appearance, -counts))


def _check_is_sorting(out: Path, tokenizer: WordTokenizer) -> None:
    if read_tokenizer_metadata(out)["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(f"{out} holds another dataset: give another --out, or --overwrite")


def _is_built(split_dir: Path, recipe: str) -> bool:
    if not (split_dir / INDEX_NAME).exists():
        return False
    try:
        index = read_index(split_dir)
    except ShardError as error:
        raise ValueError(f"{error}; here that is: give another --out, or --overwrite") from error
    if index.recipe != recipe:
        raise ValueError(
            f"{split_dir} was built otherwise ({index.recipe}; now: {recipe}): give another --out, or --overwrite"
        )
    tars = {path.name: path.stat().st_size for path in split_dir.glob("*.tar")}
    return all(tars.get(shard.name) == shard.bytes for shard in index.shards)


if __name__ == "__main__":
    sys.exit(main())
