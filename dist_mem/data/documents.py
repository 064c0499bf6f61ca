"""Open documents for reading: check them, memory-map them, and stop at or skip damaged ones."""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import (
    Index,
    ShardError,
    cancel_fetches,
    check_document,
    expect_document,
    read_mask,
    read_recall,
    read_tokens,
)

log = logging.getLogger(__name__)


class Document(NamedTuple):
    """An opened document, cut to the length that is read, or a part of it."""

    number: int
    tokens: np.ndarray  # (length,)
    scored: np.ndarray | None  # (length,) bool
    recall: np.ndarray | None  # (length,)
    is_damaged: bool = False  # a replacement, see `Documents.blank_document`

    def part(self, start: int, stop: int) -> Document:
        """Return tokens [start, stop), fewer at the end."""
        number, tokens, scored, recall, is_damaged = self
        span = slice(start, stop)
        return Document(
            number,
            tokens[span],
            None if scored is None else scored[span],
            None if recall is None else recall[span],
            is_damaged,
        )


def join(parts: Sequence[Document]) -> Document:
    """Return parts of documents end to end, with the number of the first."""

    def concatenate(arrays: Sequence[np.ndarray | None], *, missing: int) -> np.ndarray | None:
        if all(array is None for array in arrays):
            return None
        sizes = [len(part.tokens) for part in parts]
        filled = [np.full(size, missing) if array is None else array for array, size in zip(arrays, sizes, strict=True)]
        return np.concatenate(filled)

    return Document(
        parts[0].number,
        np.concatenate([part.tokens for part in parts]),
        concatenate([part.scored for part in parts], missing=True),
        concatenate([part.recall for part in parts], missing=0),
    )


NOTHING = np.empty(0, dtype=np.uint16)


def find_document(splits: Sequence[Index], number: int) -> tuple[int, int]:
    """Return the number of the split of a document that is numbered through all of them, and its number there."""
    firsts = [0, *accumulate(len(index.documents) for index in splits)]
    split = bisect(firsts, number) - 1
    return split, number - firsts[split]


class Documents:
    """Opens the documents of a split; each is checked against its checksum when it is opened."""

    def __init__(
        self,
        index: Index,
        lengths: np.ndarray,
        *,
        bos_id: int,
        on_corrupt: str | None = None,
        prefix: np.ndarray = NOTHING,
        others: Sequence[Index] = (),
    ) -> None:
        """Open documents of `index`.

        Args:
            lengths: (documents,) number of tokens read of each, as in the plan.
            on_corrupt: as data.on_corrupt; None: stop, and no configuration can change that.
            prefix: (num_tokens,) tokens that are read before the first of every document, and not scored.
            others: the further sources of a mixture; documents are numbered through all.
        """
        self.index = index
        self.splits = [index, *others]
        self.lengths = lengths
        self.bos_id = bos_id
        self.has_recall = any(each.documents.has_recall for each in self.splits)
        self._on_corrupt = on_corrupt
        self._prefix = Document(-1, prefix, np.zeros(len(prefix), dtype=bool), None)
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return len(self.lengths)

    def close(self) -> None:
        """Cancel all fetches of shards, also in other threads."""
        cancel_fetches(self.splits)

    def expect(self, number: int) -> None:
        """Announce that the document will be opened soon: its shard may have to be fetched."""
        if number < len(self):
            expect_document(*self._place_of(number))

    def open(self, number: int) -> Document:
        """Open a document; raise ShardError, with document and shard, if its checksum does not match."""
        index, own = self._place_of(number)
        check_document(index, own)
        length = int(self.lengths[number])
        document = Document(
            number,
            read_tokens(index, own, 0, length),
            read_mask(index, own, 0, length),
            read_recall(index, own, 0, length),
        )
        if not len(self._prefix.tokens):
            return document
        return join([self._prefix, document])._replace(number=number)

    def _place_of(self, number: int) -> tuple[Index, int]:
        split, own = find_document(self.splits, number)
        return self.splits[split], own

    def open_or_skip(self, number: int) -> Document | None:
        """Open a document; return None if it is damaged and data.on_corrupt is `skip`, with one warning for each."""
        try:
            return self.open(number)
        except ShardError as error:
            if self._on_corrupt == "stop":
                raise ShardError(f"{error}; data.on_corrupt=skip would leave it out") from error
            if self._on_corrupt != "skip":
                raise
            if number not in self._warned:
                self._warned.add(number)
                log.warning("skipped a damaged document: %s", error)
            return None

    def blank_document(self, number: int) -> Document:
        """Return a replacement of the same length that is all BOS and not scored."""
        length = int(self.lengths[number])
        return Document(number, np.full(length, self.bos_id), np.zeros(length, dtype=bool), None, is_damaged=True)
