"""Build multi-query associative recall (Arora et al. 2023): values of keys, asked for later.

    dist-mem data build mqar --out data/mqar --lengths 64 128 256 --pairs 8
    dist-mem data build mqar --out data/mqar_long --lengths 4096 --pairs 64 --power-a 1

It is the task of sec. 4. A document begins with pairs of a key and its value. Later every key comes
once more, followed by its value: only these values are scored, and their recall distance is that to
the value at the beginning. Between them are random tokens, or token 0 (--filler). The distance at
which a key comes again follows a power law with exponent a - 1: with a = 0.01, as published, most
keys come again soon; with a = 1 all distances are equally likely. A token is a number, without
text. Each length has its own data directory, <out>/<length>. The same options always produce the
same bytes.

A document is the input of the published generator. There, the value is only the target of the key's
place, and a random token follows the key; here the value follows, because a document's tokens are
its targets.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import TokenizedDocument
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets.options import positive
from dist_mem.datasets.split_names import SPLITS
from dist_mem.datasets.task_text import Task, add_task_options, build_tasks, document_of_words, draw_of_split

FILLERS = ("random", "zero")


class RecallSizes(NamedTuple):
    """The settings of the task, named as published where they have such a name."""

    length: int  # input_seq_len
    vocab_size: int  # keys are 1 to vocab_size / 2 - 1, values the rest
    num_pairs: int  # num_kv_pairs
    power_a: float
    filler: str  # random: random_non_queries


class Example(NamedTuple):
    tokens: np.ndarray  # (length,) int64
    answers: np.ndarray  # (num_pairs,) places of the values that are asked for
    referents: np.ndarray  # (num_pairs,) places of the same values in the pairs at the beginning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_task_options(parser, out="data/mqar", lengths=64, train=100_000, held_out=3_000, published=", as published")
    add = parser.add_argument
    add("--vocab", type=positive, default=8192, metavar="N", help="keys and values (default: %(default)s)")
    add("--pairs", type=positive, default=8, metavar="N", help="keys of a document (default: %(default)s)")
    add(
        "--power-a", type=float, default=0.01, metavar="A", help="of the power law (default: %(default)s, as published)"
    )
    add("--filler", choices=FILLERS, default="random", help="between the queries (default: %(default)s, as published)")


def build(options: argparse.Namespace) -> None:
    """Build a data directory for each length."""
    found = [
        RecallSizes(length, options.vocab, options.pairs, options.power_a, options.filler) for length in options.lengths
    ]
    for sizes in found:
        check_sizes(sizes)
    build_tasks(((mqar_task(each, seed=options.seed), options.out / str(each.length)) for each in found), options)


def check_sizes(sizes: RecallSizes) -> None:
    """Raise ValueError for sizes that the task cannot have; two of the conditions are the published ones."""
    if sizes.length % 2 or sizes.num_pairs * 4 > sizes.length:
        raise ValueError(
            f"--lengths {sizes.length} with --pairs {sizes.num_pairs}: a length is even, and at least four times the "
            "number of pairs"
        )
    # Published: a vocabulary larger than the length, which long documents do not need
    if sizes.vocab_size % 2 or sizes.num_pairs > sizes.vocab_size // 2 - 1:
        raise ValueError(
            f"--vocab {sizes.vocab_size} with --pairs {sizes.num_pairs}: a vocabulary is even, and half of it less one "
            "has a key for every pair"
        )
    if not 0 < sizes.power_a <= 1:
        raise ValueError(f"--power-a {sizes.power_a}: give a number above 0, up to 1")


def mqar_task(sizes: RecallSizes, *, seed: int) -> Task:
    """Return the task for documents of one size."""
    tokenizer = WordTokenizer([str(token) for token in range(sizes.vocab_size)])

    def documents(split: str) -> Iterator[TokenizedDocument]:
        # Each split and length has its own random stream; a split of more documents begins with the same ones.
        draw = np.random.RandomState([seed, sizes.length, SPLITS.index(split)])
        for number in itertools.count(1):
            example = draw_of_split(split, lambda: draw_example(draw, sizes), lambda drawn: key_of(drawn, sizes))
            yield document(example, number, tokenizer)

    recipe = (
        f"mqar length {sizes.length} vocab {sizes.vocab_size} pairs {sizes.num_pairs} power {sizes.power_a} "
        f"filler {sizes.filler} count {{count}} seed {seed}"
    )
    return Task("mqar", recipe, tokenizer, documents)


def draw_example(draw: np.random.RandomState, sizes: RecallSizes) -> Example:
    """Draw one example: keys, values and places with the random numbers of the published generator of one example."""
    context, half = 2 * sizes.num_pairs, sizes.vocab_size // 2
    keys = draw.choice(np.arange(1, half), replace=False, size=sizes.num_pairs)
    values = draw.choice(np.arange(half, sizes.vocab_size), replace=False, size=sizes.num_pairs)
    space = (sizes.length - context) // 2
    shares = sizes.power_a * np.arange(1, space + 1) ** (sizes.power_a - 1)
    gaps = draw.choice(np.arange(space), replace=False, p=shares / shares.sum(), size=sizes.num_pairs)
    tokens = np.zeros(sizes.length, dtype=np.int64)
    tokens[0:context:2], tokens[1:context:2] = keys, values
    queries = context + 2 * gaps
    tokens[queries], tokens[queries + 1] = keys, values
    if sizes.filler == "random":
        empty = tokens == 0
        tokens[empty] = draw.randint(sizes.vocab_size, size=int(empty.sum()))
    return Example(tokens, answers=queries + 1, referents=np.arange(1, context, 2))


def key_of(example: Example, sizes: RecallSizes) -> str:
    """Return what is to be remembered: the pairs, in order."""
    return " ".join(map(str, example.tokens[: 2 * sizes.num_pairs]))


def document(example: Example, number: int, tokenizer: WordTokenizer) -> TokenizedDocument:
    """Return an example as a document of which only the answers are scored."""
    recall = np.zeros(len(example.tokens), dtype=np.int32)
    recall[example.answers] = example.answers - example.referents
    return document_of_words(example.tokens, number, f"example {number}", tokenizer, mask=recall > 0, recall=recall)
