"""Build the sorting task (Martins et al. 2022, sec. 4.1): rank the symbols of a long sequence.

    dist-mem data build sorting --out data/sorting --lengths 4000 8000 16000
    dist-mem data build sorting --out data/sorting --lengths 500 1000 --seed 1

A document is a sequence of 20 symbols whose probabilities drift from one distribution to another, a
separator, and the 20 symbols sorted by frequency, the most frequent first. Only these answers are
scored. Each length has its own data directory, <out>/<length>. The same options always produce the
same bytes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import numpy as np

from dist_mem.data.shard import TokenizedDocument
from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets.split_names import SPLITS
from dist_mem.datasets.task_text import Task, add_task_options, build_tasks, document_of_words

NUM_SYMBOLS = 20  # symbols are words "0" to "19"
SEPARATOR = NUM_SYMBOLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this builder."""
    add_task_options(parser, out="data/sorting", lengths=4000, published=", as published")


def build(options: argparse.Namespace) -> None:
    """Build a data directory for each length."""
    tasks = ((sorting_task(length, seed=options.seed), options.out / str(length)) for length in options.lengths)
    build_tasks(tasks, options)


def sorting_task(length: int, *, seed: int) -> Task:
    """Return the task for sequences of one length."""
    tokenizer = sorting_tokenizer()

    def documents(split: str) -> Iterator[TokenizedDocument]:
        # Each split and length has its own random stream; a split of more sequences begins with the same ones.
        draw = np.random.RandomState([seed, length, SPLITS.index(split)])
        for number in itertools.count(1):
            yield document(draw, length, number, tokenizer)

    recipe = f"sorting length {length} count {{count}} seed {seed}"
    return Task("sorting", recipe, tokenizer, documents, what="sequences")


def document(draw: np.random.RandomState, length: int, number: int, tokenizer: WordTokenizer) -> TokenizedDocument:
    """Draw the next sequence; only its answers are scored."""
    sequence = draw_sequence(draw, length)
    tokens = np.concatenate([sequence, [SEPARATOR], answers(sequence)])
    is_answer = np.arange(len(tokens)) > length
    return document_of_words(tokens, number, f"sequence {number}", tokenizer, mask=is_answer)


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
