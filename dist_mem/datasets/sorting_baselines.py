"""Baselines of the sorting task: the accuracy of counting only part of the sequence, or nothing.

    python -m dist_mem.datasets.sorting_baselines data/sorting/4000/test --seg-len 1024

The accuracy is the one that `dist-mem evaluate` reports: hits over the 20 answers, each given the right previous ones,
so that no symbol is guessed twice. Equal counts are ordered by chance, so counting all symbols does not reach 100 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dist_mem.data.shard import Index, read_index, read_tokens
from dist_mem.datasets.options import parser_of, positive
from dist_mem.datasets.recipes.sorting import NUM_SYMBOLS
from dist_mem.errors import UnusableError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    options = parse_arguments(arguments)
    try:
        found = measure(options.split, seg_len=options.seg_len)
    except (OSError, UnusableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, accuracy in found.items():
        print(f"{name:<14} {accuracy:7.2%}")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("split", type=Path, help="folder of a split, as data/sorting/4000/test")
    parser.add_argument(
        "--seg-len", type=positive, default=1024, metavar="T", help="train.seg_len (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def measure(split_dir: Path, *, seg_len: int) -> dict[str, float]:
    """Return the accuracy of counting the last segment, one or two more, or all; "chance" counts nothing.

    Raises:
        ShardError: the data are damaged.
        UnusableError: they are of another task.
    """
    index = read_index(split_dir)
    if index.name != "sorting":
        raise UnusableError(f"{split_dir} is a split of {index.name}: give one of `dist-mem data build sorting`")
    draw = np.random.default_rng(0)
    found = {"chance": float((1 / np.arange(1, NUM_SYMBOLS + 1)).mean())}
    for name, more in (("last segment", 0), ("1 more", 1), ("2 more", 2), ("all", None)):
        found[name] = _share_of_hits(index, seg_len, more, draw)
    return found


def _share_of_hits(index: Index, seg_len: int, more: int | None, draw: np.random.Generator) -> float:
    hits = 0
    for number in range(len(index.documents)):
        tokens = read_tokens(index, number)
        last = first_input(len(tokens), seg_len=seg_len)
        hits += hits_of_counts(tokens, first=0 if more is None else max(0, last - more * seg_len), draw=draw)
    return hits / NUM_SYMBOLS / len(index.documents)


def first_input(num_tokens: int, *, seg_len: int) -> int:
    """Return the index of the first token that the last segment reads; BOS is read before token 0."""
    return max(0, (num_tokens - 1) // seg_len * seg_len - 1)


def hits_of_counts(tokens: np.ndarray, *, first: int, draw: np.random.Generator) -> int:
    """Return how many answers are right by the counts of the sequence from token `first`; ties are broken at random."""
    sequence, answers = tokens[first : -NUM_SYMBOLS - 1], tokens[-NUM_SYMBOLS:]
    scores = np.bincount(sequence, minlength=NUM_SYMBOLS) + draw.random(NUM_SYMBOLS)
    left = scores[answers]  # by rank; an answer is right if none after it scores more
    return int((left >= np.maximum.accumulate(left[::-1])[::-1]).sum())


if __name__ == "__main__":
    sys.exit(main())
