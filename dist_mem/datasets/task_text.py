"""Documents of a task in text: a question about a place far back, whose answer ends the document and is scored alone.

Data flow: a builder's `Question` -> fitted (as much haystack as the length allows) -> document_of -> task_splits.py.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import TokenizedDocument
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.source import RecallSpan, SourceDocument, encoded, recall_distances


class Question(NamedTuple):
    """The whole text of a document."""

    text: str  # ends with a space and the answer
    answer: str
    referent: int  # first character of what the answer is to be remembered from
    title: str


Compose = Callable[[Sequence[str]], Question]  # from sentences of the haystack, as many as there are


def add_text_options(parser: ArgumentParser) -> None:
    """Add the options of a task in text."""
    add = parser.add_argument
    add("--books", type=Path, metavar="DIR", help="fill documents with these .txt files, as PG-19's, in their splits")
    add("--tokenizer-from", type=Path, metavar="DIR", help="tokenizer of this data directory (default: bytes)")


def tokenizer_of(folder: Path | None) -> Tokenizer:
    """Return the tokenizer of --tokenizer-from."""
    return BytesTokenizer() if folder is None else load_tokenizer(folder)


def fitted(compose: Compose, haystack: Iterator[str], tokenizer: Tokenizer, length: int) -> Question | None:
    """Return the question among as many sentences as fit into `length` tokens; None if it does not fit alone."""
    room = length - len(tokenizer.encode(compose([]).text))
    if room < 0:
        return None
    sentences: list[str] = []
    for sentence in haystack:
        room -= _num_tokens(tokenizer, sentence)
        if room < 0:
            break
        sentences.append(sentence)
    while True:  # a sentence may have more tokens in the text than alone
        question = compose(sentences)
        excess = len(tokenizer.encode(question.text)) - length
        if excess <= 0:
            return question
        while excess > 0 and sentences:
            excess -= _num_tokens(tokenizer, sentences.pop())


@lru_cache(maxsize=4096)
def _num_tokens(tokenizer: Tokenizer, sentence: str) -> int:
    return len(tokenizer.encode(f" {sentence}"))


def document_of(question: Question, number: int, tokenizer: Tokenizer) -> TokenizedDocument:
    """Return a question as a document: the tokens of its answer are scored, and refer to one place.

    Raises:
        ValueError: the tokenizer cannot represent the answer.
    """
    text, stop = question.text, len(question.text)
    span = RecallSpan(stop - len(question.answer), stop, question.referent)
    source = SourceDocument(f"{number:06d}", question.title, text, recall=[span])
    tokens, starts = tokenizer.encode_with_offsets(text)
    recall = recall_distances(source, text, starts)
    scored: np.ndarray = recall > 0  # not the space before the answer, if that is a token of its own
    if tokenizer.decode(tokens[scored]).strip() != question.answer:
        decoded = tokenizer.decode(tokens[scored])
        raise ValueError(f"the tokenizer makes {decoded!r} of the answer {question.answer!r}: take another one")
    return TokenizedDocument(
        id=source.id,
        title=source.title,
        year=None,
        words=len(text.split()),
        bytes=len(encoded(text)),
        tokens=tokens,
        mask=scored,
        recall=recall,
    )
