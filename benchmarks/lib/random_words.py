"""A corpus of random words with the frequencies of a language, for measurements that read real shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dist_mem.data.tokenizers.words import WordTokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument

_TOKENS_PER_DOCUMENT = 50_000


def build_random_words(folder: Path, *, num_words: int, num_tokens: int) -> None:
    """Build a training split of words w0, w1, ..., the frequent ones first, as adaptive softmax needs them.

    Args:
        num_words: size of the vocabulary, without the token that begins a document.
    """
    share = np.cumsum(1.0 / (np.arange(num_words) + 2.7))  # Zipf's law, as Mandelbrot corrects it
    drawn = np.searchsorted(share / share[-1], np.random.default_rng(0).random(num_tokens))
    words = [f"w{number}" for number in range(num_words)]
    documents = []
    for first in range(0, num_tokens, _TOKENS_PER_DOCUMENT):
        text = " ".join(words[number] for number in drawn[first : first + _TOKENS_PER_DOCUMENT])
        documents.append(SourceDocument(f"d{first}", f"Random words {first}", text))
    build_dataset({"train": documents}, folder, name="random", tokenizer=WordTokenizer(words))
