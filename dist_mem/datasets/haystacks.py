"""Texts in which a task hides what is to be remembered: the published repeat, a user's books, or the sample library.

A haystack yields the sentences of a document without end. Books of one split are never in another: they are in folders
named train, validation and test, or a checksum of their names deals them out (hash_split.py), or, in the sample
library, they are written from a seed with the split's name.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Protocol

from dist_mem.datasets.corpus import by_name, find_files
from dist_mem.datasets.hash_split import split_of
from dist_mem.datasets.rows import TEXT_SUFFIX
from dist_mem.datasets.sample_library import write_book
from dist_mem.datasets.source import read_text, with_lf
from dist_mem.datasets.task_splits import FRACTIONS
from dist_mem.errors import UnusableError

# Mohtashami and Jaggi 2023 (Landmark attention), and RULER (Hsieh et al. 2024)
REPEATED = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
LIBRARY_BOOK = 500  # tokens, about: one chapter
# Published: NLTK's Punkt. Here after . ! or ?, with quotation marks, and at empty lines: no model to download
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)]*\s+|\n\s*\n\s*")


class Haystack(Protocol):
    """What documents are filled with."""

    name: str  # for the recipe: two haystacks of one name have the same sentences

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        """Yield the sentences of a document without end, each on one line."""
        ...


class Repeat:
    """The same lines again and again."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.name = f"repeat {len(lines)}"

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        return cycle(self.lines)


class Books:
    """The .txt files of a folder; a document reads on from a sentence of one, and then in others."""

    def __init__(self, folder: Path, splits: tuple[str, ...]) -> None:
        """Raises UnusableError if a split has no file."""
        corpus = find_files([folder], (TEXT_SUFFIX,))
        files = corpus.files
        folders = by_name(corpus, fix="name none of them so") or {}
        if not folders:
            for name, path in files.items():
                folders.setdefault(split_of(name, FRACTIONS), {})[name] = path
        missing = [split for split in splits if not folders.get(split)]
        if missing:
            raise UnusableError(
                f"--books {folder} has no .txt file for {missing[0]}: give it more books, or folders named "
                f"{', '.join(splits)}"
            )
        self.paths = {split: list(folders[split].values()) for split in splits}
        content = repr(sorted((name, path.stat().st_size) for name, path in files.items()))
        self.name = f"books {hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        """Raises UnusableError if a book has no sentence."""
        start: float | None = draw.random()
        while True:
            path = draw.choice(self.paths[split])
            found = _sentences_of(path)
            if not found:
                raise UnusableError(f"{path} has no text: remove it")
            yield from found[int((start or 0.0) * len(found)) :]
            start = None


class Library:
    """The sample library, with new books in every document."""

    name = "sample library"

    def sentences(self, split: str, draw: random.Random) -> Iterator[str]:
        seed = draw.getrandbits(64)
        for number in count():
            book = write_book(random.Random(f"haystack {split} {seed} {number}"), num_tokens=LIBRARY_BOOK)
            yield from (sentence for sentence in cut_sentences(book.text) if sentence.endswith("."))  # no headings


def cut_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with single spaces for its white space."""
    starts = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    found = (" ".join(text[start:stop].split()) for start, stop in pairwise(starts))
    return [sentence for sentence in found if sentence]


@lru_cache(maxsize=32)
def _sentences_of(path: Path) -> list[str]:
    return cut_sentences(with_lf(read_text(path)))
