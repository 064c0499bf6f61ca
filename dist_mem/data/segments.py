"""Segments: what a lane reads, document after document or along the stream, and how segments become a Batch.

    plan, cursor -> read_lane -> Segment -> collate -> Batch

Training, evaluation and the scores of a text all read one segment of a lane at a time. A cursor is the complete
position of a lane, so a lane that is read from a saved cursor continues as if it had never stopped. The arrays of a
segment are views of the memory-mapped shard where possible; `collate` copies them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count, pairwise, repeat
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Document, Documents, join
from dist_mem.data.mixture import MixturePlan
from dist_mem.data.plan import START, Cursor, Plan, StreamPlan, segment_starts
from dist_mem.data.shard import ShardError


class Segment(NamedTuple):
    """Up to T successive tokens of one lane."""

    tokens: np.ndarray  # (length + 1,) any integer type: the token before (BOS at first), then those of the segment
    scored: np.ndarray | None  # (length,) bool, which tokens of the segment count as targets; None: all
    recall: np.ndarray | None  # (length,) distance of each token's referent; None: none
    document: int  # of the first token; -1: idle
    is_new_document: bool  # the lane's memory is empty before it: a document, or a lane's part of the stream, begins
    after: Cursor  # position of the lane after the segment
    num_started: int = 0  # documents whose first token is in the segment
    num_skipped: int = 0  # damaged documents skipped before or in it

    @property
    def length(self) -> int:
        """Number of tokens of the segment."""
        return len(self.tokens) - 1


IDLE = Segment(np.zeros(1, dtype=np.int64), None, None, document=-1, is_new_document=False, after=START)


def document_segments(
    document: Document, *, seg_len: int, bos_id: int, cut: str = "start", cursor: Cursor = START
) -> Iterator[Segment]:
    """Yield the segments of a document from the cursor on; its epoch and place are those of the document."""
    epoch, place, offset = cursor
    length = len(document.tokens)
    edges = [*segment_starts(length, seg_len=seg_len, cut=cut).tolist(), length]
    for begin, stop in pairwise(edge for edge in edges if edge >= offset):
        part = document.part(begin, stop)
        yield Segment(
            document.tokens[begin - 1 : stop] if begin else np.concatenate(([bos_id], part.tokens)),
            part.scored,
            part.recall,
            document.number,
            is_new_document=begin == 0,
            after=Cursor(epoch, place, stop) if stop < length else Cursor(epoch, place + 1, 0),
            num_started=int(begin == 0 and not document.is_damaged),
            num_skipped=int(begin == 0 and document.is_damaged),
        )


def read_lane(documents: Documents, plan: Plan, *, lane: int, cursor: Cursor = START) -> Iterator[Segment]:
    """Yield the segments of a lane of a plan from the cursor on, endlessly; idle ones if the plan has no such lane."""
    if lane >= plan.num_lanes:
        return repeat(IDLE)
    if isinstance(plan, StreamPlan):
        return read_stream(documents, plan, lane=lane, cursor=cursor)
    epochs = (plan.documents(epoch, lane) for epoch in count(cursor.epoch))
    blanks = isinstance(plan, MixturePlan)
    return read_documents(documents, epochs, seg_len=plan.seg_len, cut=plan.cut, cursor=cursor, blanks=blanks)


def read_documents(
    documents: Documents,
    epochs: Iterable[Sequence[int]],
    *,
    seg_len: int,
    cut: str = "start",
    cursor: Cursor = START,
    blanks: bool = False,
) -> Iterator[Segment]:
    """Yield the segments of a lane that reads document after document, each from BOS.

    Args:
        epochs: the lane's documents in each epoch, from the epoch of the cursor on.
        blanks: a skipped, damaged document is read as BOS tokens that are not scored, so that lanes stay level: new
            weights of a mixture begin after so many segments of each.
    """
    _, first_place, offset = cursor
    num_skipped = 0
    for epoch, numbers in enumerate(epochs, start=cursor.epoch):
        for place in range(first_place, len(numbers)):
            document = documents.open_or_skip(numbers[place])
            if document is None and blanks:
                document = documents.blank_document(numbers[place])
            for following in numbers[place + 1 : place + 2]:
                documents.expect(following)
            if document is None:
                num_skipped += 1
                if num_skipped > len(documents):
                    where = documents.index.split_dir
                    raise ShardError(f"{where}: a lane met {num_skipped} damaged documents and no good one")
            else:
                start = Cursor(epoch, place, offset)
                parts = document_segments(document, seg_len=seg_len, bos_id=documents.bos_id, cut=cut, cursor=start)
                for segment in parts:
                    yield segment._replace(num_skipped=num_skipped) if num_skipped else segment
                    num_skipped = 0
            offset = 0
        first_place = 0


def read_stream(documents: Documents, plan: StreamPlan, *, lane: int, cursor: Cursor = START) -> Iterator[Segment]:
    """Yield the segments of a lane that reads its part of the token stream again and again.

    A skipped, damaged document is replaced by BOS tokens that are not scored, so that no other position changes.
    """

    @lru_cache(maxsize=1)
    def open_document(number: int) -> Document:
        document = documents.open_or_skip(number) or documents.blank_document(number)
        documents.expect(number + 1)
        return document

    def parts(position: int, stop: int) -> Iterator[Document]:
        """Yield the documents' parts at positions position..stop - 1; BOS is at position -1."""
        if position < 0:
            yield Document(-1, np.array([documents.bos_id]), None, None)
        position = max(position, 0)
        while position < stop:
            number = int(plan.document_at(position))
            offset = position - int(plan.starts[number])
            part = open_document(number).part(offset, offset + stop - position)
            yield part
            position += len(part.tokens)

    first, end = plan.span(lane)
    offset = cursor.offset
    for epoch in count(cursor.epoch):
        for begin in range(first + offset, end, plan.seg_len):
            stop = min(begin + plan.seg_len, end)
            before, *begun = list(parts(begin - 1, stop))  # documents that are not in the token before begin here
            whole = join([before, *begun]) if begun else before
            yield Segment(
                whole.tokens,
                None if whole.scored is None else whole.scored[1:],
                None if whole.recall is None else whole.recall[1:],
                before.number if len(before.tokens) > 1 else begun[0].number,
                is_new_document=begin == first,
                after=Cursor(epoch, 0, stop - first) if stop < end else Cursor(epoch + 1, 0, 0),
                num_started=sum(not part.is_damaged for part in begun),
                num_skipped=sum(part.is_damaged for part in begun),
            )
        offset = 0


def collate(segments: Sequence[Segment], *, seg_len: int, with_recall: bool, blocks: bool = False) -> Batch:
    """Collate one segment of each of B lanes, right-padded to T, into a Batch.

    Args:
        blocks: as `data.blocks`: the inputs are the tokens of a segment, not the token before each. Then the first
            token is no target, and the last input has none.
    """
    shape = (len(segments), seg_len)
    tokens, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    recall = np.zeros(shape, dtype=np.int64) if with_recall else None
    first = int(blocks)  # the first token of a segment that is a target
    for row, segment in enumerate(segments):
        length, num_targets = segment.length, max(0, segment.length - first)
        tokens[row, :length] = segment.tokens[first : first + length]
        targets[row, :num_targets] = segment.tokens[1 + first :]
        if segment.scored is not None:
            targets[row, :num_targets][~segment.scored[first:]] = IGNORE
        if recall is not None and segment.recall is not None:
            recall[row, :num_targets] = segment.recall[first:]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        valid_len=torch.from_numpy(np.array([segment.length for segment in segments])),
        is_new_document=torch.from_numpy(np.array([segment.is_new_document for segment in segments])),
        document=torch.from_numpy(np.array([segment.document for segment in segments])),
        recall=None if recall is None else torch.from_numpy(recall),
    )
