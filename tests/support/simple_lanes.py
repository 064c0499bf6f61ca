"""Reference reader of training lanes, token by token, without dist_mem.data.segments; a LaneReader must equal it."""

import math
from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch, Update
from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import START, Cursor, DocumentPlan, Plan, StreamPlan


class Token(NamedTuple):
    id: int
    is_scored: bool
    recall: int


class Read(NamedTuple):
    """One segment of a lane, with its position and document counts."""

    before: int  # the token before the segment
    own: list[Token]
    document: int
    is_new_document: bool
    after: Cursor
    started: int = 0  # documents whose first token is a target of this segment
    skipped: int = 0  # damaged documents skipped before this segment


IDLE = Read(0, [], -1, False, START)


def simple_updates(
    documents: Documents,
    plan: Plan,
    *,
    lane_ids: Sequence[int],
    micro_lanes: int = 1,
    segments_per_update: int = 1,
    cursors: Sequence[Cursor] | None = None,
    blocks: bool = False,
) -> Iterator[Update]:
    """Yield the same updates as a LaneReader with the same arguments."""
    starts = cursors or [START] * len(lane_ids)
    lanes = [open_lane(documents, plan, lane, cursor) for lane, cursor in zip(lane_ids, starts, strict=True)]
    while True:
        batches: list[Batch] = []
        started = skipped = 0
        for _ in range(segments_per_update):
            reads = [next(lane) for lane in lanes]
            for first in range(0, len(reads), micro_lanes):
                batches.append(batch_of(reads[first : first + micro_lanes], plan.seg_len, documents.has_recall, blocks))
            started += sum(read.started for read in reads)
            skipped += sum(read.skipped for read in reads)
        epochs = [
            plan.epochs_done(lane, *read.after)
            for lane, read in zip(lane_ids, reads, strict=True)
            if lane < plan.num_lanes
        ]
        yield Update(
            batches,
            torch.tensor([read.after for read in reads]),
            scored=[int((batch.targets != IGNORE).sum()) for batch in batches],
            epoch=math.fsum(epochs) / max(1, len(epochs)),  # `sum` rounds otherwise, and not alike in every Python
            documents_started=started,
            documents_skipped=skipped,
            num_recall=sum(num_recall(batch) for batch in batches),
        )


def num_recall(batch: Batch) -> int:
    return 0 if batch.recall is None else int(((batch.recall > 0) & (batch.targets != IGNORE)).sum())


def batch_of(reads: Sequence[Read], seg_len: int, with_recall: bool, blocks: bool) -> Batch:
    """Return one micro-batch; in blocks the inputs are a segment's own tokens, and its first one is no target."""
    inputs, targets = [], []
    for read in reads:
        ids = [token.id for token in read.own]
        inputs.append(ids if blocks else [read.before, *ids][: len(ids)])
        targets.append(read.own[int(blocks) :])

    def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
        return torch.tensor([[*row, *[padding] * (seg_len - len(row))] for row in rows])

    return Batch(
        padded(inputs, 0),
        padded([[token.id if token.is_scored else IGNORE for token in row] for row in targets], IGNORE),
        torch.tensor([len(read.own) for read in reads]),
        torch.tensor([read.is_new_document for read in reads]),
        torch.tensor([read.document for read in reads]),
        padded([[token.recall for token in row] for row in targets], 0) if with_recall else None,
    )


def open_lane(documents: Documents, plan: Plan, lane: int, cursor: Cursor) -> Iterator[Read]:
    if lane >= plan.num_lanes:
        return repeat(IDLE)
    if isinstance(plan, StreamPlan):
        return stream_lane(documents, plan, lane, cursor)
    return document_lane(documents, plan, lane, cursor)


def document_lane(documents: Documents, plan: DocumentPlan, lane: int, cursor: Cursor) -> Iterator[Read]:
    _, first_place, begin = cursor
    skipped = 0
    for epoch in count(cursor.epoch):
        numbers = plan.documents(epoch, lane)
        for place in range(first_place, len(numbers)):
            document = documents.open_or_skip(numbers[place])
            if document is None:
                skipped, begin = skipped + 1, 0
                continue
            length = len(document.tokens)
            while begin < length:
                is_short_first = plan.cut == "end" and begin == 0 and length % plan.seg_len
                stop = min(begin + (length % plan.seg_len if is_short_first else plan.seg_len), length)
                before = part_of(document, begin - 1).id if begin else documents.bos_id
                own = [part_of(document, offset) for offset in range(begin, stop)]
                after = Cursor(epoch, place, stop) if stop < length else Cursor(epoch, place + 1, 0)
                yield Read(before, own, document.number, begin == 0, after, int(begin == 0), skipped)
                begin, skipped = stop, 0
            begin = 0
        first_place = 0


def stream_lane(documents: Documents, plan: StreamPlan, lane: int, cursor: Cursor) -> Iterator[Read]:
    first, end = plan.span(lane)
    begin = first + cursor.offset
    for epoch in count(cursor.epoch):
        while begin < end:
            stop = min(begin + plan.seg_len, end)
            own = [token_at(documents, plan, position) for position in range(begin, stop)]
            numbers = [document_at(plan, position) for position in range(begin, stop)]
            begun = [
                number for number, at in zip(numbers, range(begin, stop), strict=True) if at == plan.starts[number]
            ]
            num_damaged = sum(documents.open_or_skip(number) is None for number in begun)
            before = token_at(documents, plan, begin - 1).id
            after = Cursor(epoch + 1, 0, 0) if stop == end else Cursor(epoch, 0, stop - first)
            yield Read(before, own, numbers[0], begin == first, after, len(begun) - num_damaged, num_damaged)
            begin = stop
        begin = first


def document_at(plan: StreamPlan, position: int) -> int:
    return max(number for number, start in enumerate(plan.starts[:-1]) if start <= position and plan.lengths[number])


def token_at(documents: Documents, plan: StreamPlan, position: int) -> Token:
    """Return the token at a position of the stream; BOS at -1, and in place of a damaged document."""
    number = document_at(plan, position) if position >= 0 else -1
    document = documents.open_or_skip(number) if number >= 0 else None
    if document is None:
        return Token(documents.bos_id, False, 0)
    return part_of(document, position - int(plan.starts[number]))


def part_of(document: Document, offset: int) -> Token:
    _, tokens, scored, recall, _ = document
    is_scored = scored is None or bool(scored[offset])
    return Token(int(tokens[offset]), is_scored, 0 if recall is None else int(recall[offset]))
