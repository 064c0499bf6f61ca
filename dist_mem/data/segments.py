"""Cut documents into segments, and collate segments into a Batch, one segment at a time.

Evaluation and single texts are read this way; training reads many segments at once (spans.py, chunks.py).
The arrays of a segment are views of the memory-mapped shard; `collate` copies them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Document, Documents
from dist_mem.data.plan import segment_starts


class Segment(NamedTuple):
    """Up to T successive tokens for one lane."""

    inputs: np.ndarray  # (length,) any integer type
    targets: np.ndarray  # (length,) the token after each input
    scored: np.ndarray | None  # (length,) bool, which targets count; None: all
    recall: np.ndarray | None  # (length,) distance of each target's referent; None: none in this document
    document: int  # of the first token; -1: idle
    is_new_document: bool


NOTHING = np.empty(0, dtype=np.int64)
IDLE = Segment(NOTHING, NOTHING, None, None, document=-1, is_new_document=False)


def as_block(segment: Segment) -> Segment:
    """Return the segment as `data.blocks` reads it: inputs are its tokens; the first is no target, the last has none.

    Without `data.blocks` the inputs are the token before each target, at first BOS. The mask and recall distance of a
    target move with it, left by one.
    """
    _, tokens, scored, recall, _, _ = segment
    is_target = np.ones(len(tokens), dtype=bool) if scored is None else np.asarray(scored, dtype=bool)
    return segment._replace(
        inputs=tokens,
        targets=moved_left(tokens, 0),
        scored=moved_left(is_target, False),
        recall=None if recall is None else moved_left(recall, 0),
    )


def moved_left(values: np.ndarray, last: int) -> np.ndarray:
    """Return values (n,) without the first, then `last`, of the same dtype."""
    return np.append(values[1:], values.dtype.type(last))


def document_segments(
    document: Document, *, start: int, seg_len: int, bos_id: int, blocks: bool = False, cut: str = "start"
) -> Iterator[tuple[Segment, int]]:
    """Yield segments of one document from token `start` on, each with the number of tokens read after it.

    Args:
        start: first token of a segment.  blocks: as `data.blocks`, see `as_block`.  cut: as `data.cut`.
    """
    _, tokens, scored, recall = document
    edges = [*segment_starts(len(tokens), seg_len=seg_len, cut=cut).tolist(), len(tokens)]
    for begin, end in pairwise(edge for edge in edges if edge >= start):
        part = slice(begin, end)
        inputs = tokens[begin - 1 : part.stop - 1] if begin else np.concatenate(([bos_id], tokens[: part.stop - 1]))
        segment = Segment(
            inputs,
            tokens[part],
            None if scored is None else scored[part],
            None if recall is None else recall[part],
            document.number,
            is_new_document=begin == 0,
        )
        yield as_block(segment) if blocks else segment, part.stop


def finite_lane(
    documents: Documents, numbers: Sequence[int], *, seg_len: int, blocks: bool = False, cut: str = "start"
) -> Iterator[Segment]:
    """Yield the segments of the given documents once, then idle ones forever; a damaged document is always an error."""
    for number in numbers:
        document = documents.open(number)
        parts = document_segments(document, start=0, seg_len=seg_len, bos_id=documents.bos_id, blocks=blocks, cut=cut)
        yield from (segment for segment, _ in parts)
    yield from repeat(IDLE)


def collate(segments: Sequence[Segment], *, seg_len: int, with_recall: bool) -> Batch:
    """Collate one segment of each of B lanes, right-padded to T, into a Batch."""
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
    """Return one Batch for each group of `micro_lanes` lanes, in lane order."""
    return [
        collate(segments[first : first + micro_lanes], seg_len=seg_len, with_recall=with_recall)
        for first in range(0, len(segments), micro_lanes)
    ]
