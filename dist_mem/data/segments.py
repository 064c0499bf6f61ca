"""Documents cut into segments, and segments collated into a Batch.

A lane is a generator of (segment, cursor after it): the cursor is data, so that resume starts a new generator there.
The arrays of a segment are views of the memory-mapped shard; `collate` copies them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Document, Documents
from dist_mem.data.shard import ShardError
from dist_mem.data.stream import START, Cursor, DocumentPlan, StreamPlan


class Segment(NamedTuple):
    """Up to T successive tokens for one lane."""

    inputs: np.ndarray  # (length,) any integer type
    targets: np.ndarray  # (length,) the token after each input
    scored: np.ndarray | None  # (length,) bool, which targets count; None: all
    recall: np.ndarray | None  # (length,) distance of each target's referent; None: none in this document
    document: int  # of the first target; -1: idle
    is_new_document: bool
    documents_started: int = 0  # documents whose first token is a target here
    documents_skipped: int = 0  # damaged documents passed over on the way here


NOTHING = np.empty(0, dtype=np.int64)
IDLE = Segment(NOTHING, NOTHING, None, None, document=-1, is_new_document=False)
Lane = Iterator[tuple[Segment, Cursor]]


def document_segments(document: Document, *, start: int, seg_len: int, bos_id: int) -> Iterator[tuple[Segment, int]]:
    """Segments of one document from token `start` on, each with the number of tokens read after it."""
    _, tokens, scored, recall = document
    for begin in range(start, len(tokens), seg_len):
        part = slice(begin, min(begin + seg_len, len(tokens)))
        inputs = tokens[begin - 1 : part.stop - 1] if begin else np.concatenate(([bos_id], tokens[: part.stop - 1]))
        segment = Segment(
            inputs,
            tokens[part],
            None if scored is None else scored[part],
            None if recall is None else recall[part],
            document.number,
            is_new_document=begin == 0,
            documents_started=int(begin == 0),
        )
        yield segment, part.stop


def document_lane(documents: Documents, plan: DocumentPlan, *, lane: int, cursor: Cursor) -> Lane:
    """The endless segments of one lane, document after document."""
    epoch, first_place, offset = cursor
    skipped = skipped_in_a_row = 0
    while True:
        numbers = plan.documents(epoch, lane)
        for place in range(first_place, len(numbers)):
            document = documents.open_or_skip(numbers[place])
            if document is None:
                skipped, skipped_in_a_row = skipped + 1, skipped_in_a_row + 1
                _check_any_left(skipped_in_a_row, documents)
                offset = 0
                continue
            skipped_in_a_row = 0
            parts = document_segments(document, start=offset, seg_len=plan.seg_len, bos_id=documents.bos_id)
            for segment, read in parts:
                at_end = read == len(document.tokens)
                after = Cursor(epoch, place + 1, 0) if at_end else Cursor(epoch, place, read)
                yield segment._replace(documents_skipped=skipped) if skipped else segment, after
                skipped = 0
            offset = 0
        epoch, first_place = epoch + 1, 0


def stream_lane(documents: Documents, plan: StreamPlan, *, lane: int, cursor: Cursor) -> Lane:
    """The endless segments of one lane of the token stream; it starts over in each epoch.

    A damaged document that is to be skipped stays in place as BOS that is not scored, so that nothing else moves.
    """
    reader = _StreamReader(documents, plan)
    first, stop = plan.span(lane)
    epoch, _, offset = cursor
    while True:
        for begin in range(first + offset, stop, plan.seg_len):
            end = min(begin + plan.seg_len, stop)
            segment = reader.read(begin, end)._replace(is_new_document=begin == first)
            after = Cursor(epoch + 1, 0, 0) if end == stop else Cursor(epoch, 0, end - first)
            yield segment, after
        epoch, offset = epoch + 1, 0


def finite_lane(documents: Documents, numbers: Sequence[int], *, seg_len: int) -> Iterator[Segment]:
    """The segments of the given documents once, then idle ones for ever; a damaged document is always an error."""
    for number in numbers:
        document = documents.open(number)
        for segment, _ in document_segments(document, start=0, seg_len=seg_len, bos_id=documents.bos_id):
            yield segment
    yield from repeat(IDLE)


def idle_lane() -> Lane:
    """A lane without documents, where the number of ranks does not divide G."""
    return repeat((IDLE, START))


def collate(segments: Sequence[Segment], *, seg_len: int, with_recall: bool) -> Batch:
    """One segment of each of B lanes, right-padded to T, as a Batch."""
    shape = (len(segments), seg_len)
    tokens, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    recall = np.zeros(shape, dtype=np.int64) if with_recall else None
    for row, segment in enumerate(segments):
        length = len(segment.inputs)
        tokens[row, :length] = segment.inputs
        targets[row, :length] = segment.targets
        if segment.scored is not None:
            targets[row, :length][~segment.scored] = IGNORE
        if recall is not None and segment.recall is not None:
            recall[row, :length] = segment.recall
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        valid_len=torch.tensor([len(segment.inputs) for segment in segments]),
        is_new_document=torch.tensor([segment.is_new_document for segment in segments]),
        document=torch.tensor([segment.document for segment in segments]),
        recall=None if recall is None else torch.from_numpy(recall),
    )


def collate_groups(segments: Sequence[Segment], *, micro_lanes: int, seg_len: int, with_recall: bool) -> list[Batch]:
    """One Batch for each group of `micro_lanes` lanes, in lane order."""
    return [
        collate(segments[first : first + micro_lanes], seg_len=seg_len, with_recall=with_recall)
        for first in range(0, len(segments), micro_lanes)
    ]


class _StreamReader:
    """Reads positions of the concatenated documents; keeps the document it stands in open."""

    def __init__(self, documents: Documents, plan: StreamPlan) -> None:
        self._documents = documents
        self._starts = plan.starts
        self._current: Document | None = None
        self._is_damaged = False

    def read(self, begin: int, end: int) -> Segment:
        """Targets at positions begin..end - 1; each input is the token before it, BOS at the start of the corpus."""
        before = self._documents.bos_id if begin == 0 else int(self._piece(begin - 1, begin)[0].tokens[0])
        pieces: list[Document] = []
        started = skipped = 0
        position = begin
        while position < end:
            piece, offset = self._piece(position, end)
            pieces.append(piece)
            started += offset == 0 and not self._is_damaged
            skipped += offset == 0 and self._is_damaged
            position += len(piece.tokens)
        tokens = np.concatenate(([before], *(piece.tokens for piece in pieces)))
        return Segment(
            tokens[:-1],
            tokens[1:],
            _join([piece.scored for piece in pieces], pieces, missing=True),
            _join([piece.recall for piece in pieces], pieces, missing=0),
            pieces[0].number,
            is_new_document=False,
            documents_started=started,
            documents_skipped=skipped,
        )

    def _piece(self, position: int, end: int) -> tuple[Document, int]:
        """What one document holds of positions position..end - 1, and where in the document that begins."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        if self._current is None or self._current.number != number:
            document = self._documents.open_or_skip(number)
            self._is_damaged = document is None
            self._current = self._documents.blank(number) if document is None else document
        _, tokens, scored, recall = self._current
        offset = position - int(self._starts[number])
        part = slice(offset, offset + end - position)
        piece = Document(
            number, tokens[part], None if scored is None else scored[part], None if recall is None else recall[part]
        )
        return piece, offset


def _join(parts: Sequence[np.ndarray | None], pieces: Sequence[Document], *, missing: int) -> np.ndarray | None:
    """The parts end to end, `missing` where a piece has none; None if none has any."""
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [
            np.full(len(piece.tokens), missing) if part is None else part
            for part, piece in zip(parts, pieces, strict=True)
        ]
    )


def _check_any_left(skipped_in_a_row: int, documents: Documents) -> None:
    if skipped_in_a_row > len(documents):
        raise ShardError(
            f"{documents.index.split_dir}: a lane met {skipped_in_a_row} damaged documents and no good one"
        )
