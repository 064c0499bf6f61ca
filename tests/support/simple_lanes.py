"""Reference reader of training lanes, one segment of one lane at a time; spans.py and chunks.py must equal it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.batch import IGNORE, Batch, Update
from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import START, Cursor, DocumentPlan, Plan, StreamPlan
from dist_mem.data.segments import IDLE, Segment, collate_groups, document_segments


class Read(NamedTuple):
    """One segment of a lane, with its position and document counts."""

    segment: Segment
    after: Cursor
    started: int = 0  # documents whose first token is a target of this segment
    skipped: int = 0  # damaged documents skipped before this segment


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
    lanes = [
        open_lane(documents, plan, lane, cursor, blocks=blocks) for lane, cursor in zip(lane_ids, starts, strict=True)
    ]
    while True:
        batches: list[Batch] = []
        started = skipped = 0
        for _ in range(segments_per_update):
            reads = [next(lane) for lane in lanes]
            segments = [read.segment for read in reads]
            batches += collate_groups(
                segments, micro_lanes=micro_lanes, seg_len=plan.seg_len, with_recall=documents.has_recall
            )
            started += sum(read.started for read in reads)
            skipped += sum(read.skipped for read in reads)
        busy = [(lane, read.after) for lane, read in zip(lane_ids, reads, strict=True) if lane < plan.num_lanes]
        yield Update(
            batches,
            torch.tensor([read.after for read in reads]),
            num_scored=sum(int((batch.targets != IGNORE).sum()) for batch in batches),
            epoch=sum(plan.epochs_done(lane, *after) for lane, after in busy) / len(busy) if busy else 0.0,
            documents_started=started,
            documents_skipped=skipped,
            num_recall=sum(num_recall(batch) for batch in batches),
        )


def num_recall(batch: Batch) -> int:
    return 0 if batch.recall is None else int(((batch.recall > 0) & (batch.targets != IGNORE)).sum())


def open_lane(documents: Documents, plan: Plan, lane: int, cursor: Cursor, *, blocks: bool) -> Iterator[Read]:
    if lane >= plan.num_lanes:
        return repeat(Read(IDLE, START))
    if isinstance(plan, StreamPlan):
        return stream_lane(documents, plan, lane, cursor, blocks=blocks)
    return document_lane(documents, plan, lane, cursor, blocks=blocks)


def document_lane(
    documents: Documents, plan: DocumentPlan, lane: int, cursor: Cursor, *, blocks: bool
) -> Iterator[Read]:
    epoch, first_place, offset = cursor
    skipped = 0
    while True:
        numbers = plan.documents(epoch, lane)
        for place in range(first_place, len(numbers)):
            document = documents.open_or_skip(numbers[place])
            if document is None:
                skipped, offset = skipped + 1, 0
                continue
            sizes = {"start": offset, "seg_len": plan.seg_len, "bos_id": documents.bos_id}
            parts = document_segments(document, cut=plan.cut, **sizes)
            for segment, stop in parts:
                if blocks:
                    begin = stop - len(segment.inputs)
                    parts_read = [part_of(document, place) for place in range(begin, stop)]
                    segment = block(parts_read, document.number, is_new_document=begin == 0)
                after = Cursor(epoch, place, stop) if stop < len(document.tokens) else Cursor(epoch, place + 1, 0)
                yield Read(segment, after, int(segment.is_new_document), skipped)
                skipped = 0
            offset = 0
        epoch, first_place = epoch + 1, 0


def stream_lane(documents: Documents, plan: StreamPlan, lane: int, cursor: Cursor, *, blocks: bool) -> Iterator[Read]:
    """Read a lane of the stream position by position."""
    first, stop = plan.span(lane)
    epoch, _, offset = cursor
    while True:
        for begin in range(first + offset, stop, plan.seg_len):
            end = min(begin + plan.seg_len, stop)
            tokens = [token_at(documents, plan, position) for position in range(begin - 1, end)]
            places = [(int(np.searchsorted(plan.starts, at, side="right")) - 1, at) for at in range(begin, end)]
            opened = [documents.open_or_skip(number) for number, at in places if at == plan.starts[number]]
            segment = Segment(
                np.array([token for token, _, _ in tokens[:-1]]),
                np.array([token for token, _, _ in tokens[1:]]),
                np.array([is_scored for _, is_scored, _ in tokens[1:]]),
                np.array([distance for _, _, distance in tokens[1:]]),
                places[0][0],
                is_new_document=begin == first,
            )
            if blocks:
                segment = block(tokens[1:], places[0][0], is_new_document=begin == first)
            after = Cursor(epoch + 1, 0, 0) if end == stop else Cursor(epoch, 0, end - first)
            num_damaged = sum(document is None for document in opened)
            yield Read(segment, after, len(opened) - num_damaged, num_damaged)
        epoch, offset = epoch + 1, 0


def token_at(documents: Documents, plan: StreamPlan, position: int) -> tuple[int, bool, int]:
    """Return the token at a position of the stream, whether it is scored, and its recall distance; BOS at -1."""
    if position < 0:
        return documents.bos_id, False, 0
    number = int(np.searchsorted(plan.starts, position, side="right")) - 1
    document = documents.open_or_skip(number)
    if document is None:
        return documents.bos_id, False, 0
    return part_of(document, position - int(plan.starts[number]))


def part_of(document: Document, offset: int) -> tuple[int, bool, int]:
    """Return the same as `token_at`, at an offset in a document."""
    _, tokens, scored, recall = document
    return int(tokens[offset]), scored is None or bool(scored[offset]), 0 if recall is None else int(recall[offset])


def block(own: Sequence[tuple[int, bool, int]], document: int, *, is_new_document: bool) -> Segment:
    """Return a segment whose inputs are its own tokens; the targets are the next ones, and the last has no target."""
    following = [*own[1:], (0, False, 0)]
    tokens, scored, recall = (np.array(part) for part in zip(*following, strict=True))
    return Segment(np.array([token for token, _, _ in own]), tokens, scored, recall, document, is_new_document)
