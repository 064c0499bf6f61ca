"""Where a lane stands after any number of segments, by the plan alone: no document is opened.

cursor of a checkpoint, or the start -> advance -> the cursor at which a step begins to read
"""

from __future__ import annotations

from itertools import count

import numpy as np

from dist_mem.data.plan import Cursor, DocumentPlan, Plan, StreamPlan, num_segments_of, segment_starts


def advance(plan: Plan, lane: int, cursor: Cursor, num_segments: int) -> Cursor:
    """Return the cursor of a lane after it has read `num_segments` more; `read_lane` goes on from there.

    A damaged document that a lane skips (`data.on_corrupt: skip`) is not known to a plan: it counts as read.
    """
    if isinstance(plan, StreamPlan):
        return _advance_in_stream(plan, lane, cursor, num_segments)
    return _advance_in_documents(plan, lane, cursor, num_segments)


def _advance_in_stream(plan: StreamPlan, lane: int, cursor: Cursor, num_segments: int) -> Cursor:
    first, stop = plan.span(lane)
    epochs, index = divmod(cursor.offset // plan.seg_len + num_segments, -(-(stop - first) // plan.seg_len))
    return Cursor(cursor.epoch + epochs, 0, index * plan.seg_len)


def _advance_in_documents(plan: DocumentPlan, lane: int, cursor: Cursor, num_segments: int) -> Cursor:
    def starts_of(number: int) -> np.ndarray:
        return segment_starts(int(plan.lengths[number]), seg_len=plan.seg_len, cut=plan.cut)

    place, left = cursor.place, num_segments  # segments from the beginning of the document at `place`
    if cursor.offset:
        left += int(np.searchsorted(starts_of(plan.documents(cursor.epoch, lane)[place]), cursor.offset))
    for epoch in count(cursor.epoch):
        numbers = plan.documents(epoch, lane)[place:]
        ends = np.cumsum(num_segments_of(plan.lengths[numbers], plan.seg_len))
        ended = int(np.searchsorted(ends, left, side="right"))  # documents read to their end
        left -= int(ends[ended - 1]) if ended else 0
        if ended < len(numbers):
            return Cursor(epoch, place + ended, int(starts_of(numbers[ended])[left]))
        place = 0
    raise AssertionError("a plan is endless")
