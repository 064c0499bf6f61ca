"""Runs: successive segments that a lane reads in training, cut only where a document (or the stream) ends.

    plan, cursor -> DocumentLane or StreamLane -> Run of up to K segments -> the lane's column of a block (chunks.py)

Reading many segments takes no more Python than reading one. A cursor is the complete position of a lane, so a lane
opened at a saved cursor continues as if it had never stopped. tests/support/simple_lanes.py reads one segment at a time
and gives the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import Cursor, DocumentPlan, Plan, StreamPlan
from dist_mem.data.shard import ShardError


class Run(NamedTuple):
    """R successive segments of one lane; all have T tokens except the last, which may be shorter.

    The short first segment of a document that is cut from its end (`data.cut`) is a separate run.
    """

    tokens: np.ndarray  # (n + 1,) any integer type: the token before (BOS at first), then those of the segments
    scored: np.ndarray | None  # (n,) bool, which tokens of the segments count as targets; None: all
    recall: np.ndarray | None  # (n,) distance of each token's referent; None: none
    document: np.ndarray | int  # (R,), or one for all: index of the document of the first token
    counts: np.ndarray  # (R, 2) documents whose first token is in the segment, damaged ones skipped before it
    is_new_document: bool  # the first segment begins with a fresh memory; no other segment does
    cursors: np.ndarray  # (R, 3) after each segment
    epochs: np.ndarray  # (R,) completed by the lane after each segment


def open_lane(documents: Documents, plan: Plan, *, lane: int, cursor: Cursor) -> DocumentLane | StreamLane:
    """Return the reader of one lane of a plan."""
    if isinstance(plan, StreamPlan):
        return StreamLane(documents, plan, lane=lane, cursor=cursor)
    return DocumentLane(documents, plan, lane=lane, cursor=cursor)


class DocumentLane:
    """A lane that reads document after document, each from BOS, endlessly."""

    def __init__(self, documents: Documents, plan: DocumentPlan, *, lane: int, cursor: Cursor) -> None:
        self._documents, self._plan, self._lane = documents, plan, lane
        self._cursor = cursor
        self._numbers = plan.documents(cursor.epoch, lane)
        self._current: Document | None = None  # the document at the cursor; None: not opened yet

    def read(self, max_segments: int) -> Run:
        """Read the next segments, up to the end of their document."""
        skipped = self._open()
        assert self._current is not None, "_open has opened it"
        number, tokens, scored, recall = self._current
        epoch, place, begin = self._cursor
        stop = min(begin + max_segments * self._plan.seg_len, len(tokens))
        if begin == 0 and self._plan.cut == "end":
            stop = (len(tokens) - 1) % self._plan.seg_len + 1
        after = Cursor(epoch, place, stop) if stop < len(tokens) else Cursor(epoch, place + 1, 0)
        cursors, epochs = _progress(self._plan, self._lane, self._cursor, after, num_tokens=stop - begin)
        counts = np.zeros((len(cursors), 2), dtype=np.int64)
        counts[0] = begin == 0, skipped
        self._cursor = after
        if stop == len(tokens):
            self._current = None
        return Run(
            tokens[begin - 1 : stop] if begin else np.concatenate(([self._documents.bos_id], tokens[:stop])),
            None if scored is None else scored[begin:stop],
            None if recall is None else recall[begin:stop],
            number,
            counts,
            is_new_document=begin == 0,
            cursors=cursors,
            epochs=epochs,
        )

    def _open(self) -> int:
        """Open the document at the cursor, or the first intact one after it; return how many were skipped."""
        skipped = 0
        while self._current is None:
            epoch, place, offset = self._cursor
            while place == len(self._numbers):
                epoch, place, offset = epoch + 1, 0, 0
                self._numbers = self._plan.documents(epoch, self._lane)
            self._current = self._documents.open_or_skip(self._numbers[place])
            for number in self._numbers[place + 1 : place + 2]:
                self._documents.expect(number)
            if self._current is not None:
                self._cursor = Cursor(epoch, place, offset)
                break
            self._cursor = Cursor(epoch, place + 1, 0)
            skipped += 1
            if skipped > len(self._documents):
                where = self._documents.index.split_dir
                raise ShardError(f"{where}: a lane met {skipped} damaged documents and no good one")
        return skipped


class StreamLane:
    """A lane that reads its part of the token stream again and again.

    A skipped, damaged document is replaced by BOS tokens that are not scored, so that no other position changes.
    """

    def __init__(self, documents: Documents, plan: StreamPlan, *, lane: int, cursor: Cursor) -> None:
        self._documents, self._plan, self._lane = documents, plan, lane
        self._cursor = cursor
        self._current: Document | None = None  # the document read last
        self._is_damaged = False

    def read(self, max_segments: int) -> Run:
        """Read the next segments, up to the end of the lane's part."""
        seg_len = self._plan.seg_len
        first, end = self._plan.span(self._lane)
        epoch, _, offset = self._cursor
        begin = first + offset
        stop = min(begin + max_segments * seg_len, end)
        after = Cursor(epoch, 0, stop - first) if stop < end else Cursor(epoch + 1, 0, 0)
        cursors, epochs = _progress(self._plan, self._lane, self._cursor, after, num_tokens=stop - begin)
        counts = np.zeros((len(cursors), 2), dtype=np.int64)
        before = self._piece(begin - 1, begin)[0].tokens if begin else [self._documents.bos_id]
        pieces: list[Document] = []
        position = begin
        while position < stop:
            piece, offset = self._piece(position, stop)
            if offset == 0:
                counts[(position - begin) // seg_len, int(self._is_damaged)] += 1
            pieces.append(piece)
            position += len(piece.tokens)
        self._cursor = after
        return Run(
            np.concatenate([before, *(piece.tokens for piece in pieces)]),
            _join([piece.scored for piece in pieces], pieces, missing=True),
            _join([piece.recall for piece in pieces], pieces, missing=0),
            self._plan.document_at(np.arange(begin, stop, seg_len)),
            counts,
            is_new_document=begin == first,
            cursors=cursors,
            epochs=epochs,
        )

    def _piece(self, position: int, stop: int) -> tuple[Document, int]:
        """Return one document's part of positions position..stop - 1, and the part's offset in the document."""
        number = int(self._plan.document_at(position))
        if self._current is None or self._current.number != number:
            document = self._documents.open_or_skip(number)
            self._documents.expect(number + 1)
            self._is_damaged = document is None
            self._current = self._documents.blank(number) if document is None else document
        _, tokens, scored, recall = self._current
        offset = position - int(self._plan.starts[number])
        part = slice(offset, offset + stop - position)
        piece = Document(
            number, tokens[part], None if scored is None else scored[part], None if recall is None else recall[part]
        )
        return piece, offset


def _progress(
    plan: Plan, lane: int, before: Cursor, after: Cursor, *, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cursor after each segment of a run, (R, 3) int64, and the epochs completed by then, (R,)."""
    num_segments = -(-num_tokens // plan.seg_len)
    cursors = np.full((num_segments, 3), before, dtype=np.int64)
    cursors[:, 2] += np.minimum(np.arange(1, num_segments + 1) * plan.seg_len, num_tokens)
    epochs = np.asarray(plan.epochs_done(lane, before.epoch, before.place, cursors[:, 2]))
    if after[:2] != before[:2]:
        cursors[-1], epochs[-1] = after, plan.epochs_done(lane, *after)
    return cursors, epochs


def _join(parts: list[np.ndarray | None], pieces: list[Document], *, missing: int) -> np.ndarray | None:
    """Concatenate the parts, with `missing` for a piece without one; return None if no piece has one."""
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [
            np.full(len(piece.tokens), missing) if part is None else part
            for part, piece in zip(parts, pieces, strict=True)
        ]
    )
