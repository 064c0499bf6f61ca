"""A position by arithmetic is the position after reading."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from dist_mem.data.documents import Documents
from dist_mem.data.plan import START, make_plan
from dist_mem.data.positions import advance
from dist_mem.data.segments import Segment, read_lane
from tests.support.lane_corpus import BOS, LENGTHS, SEG_LEN, make_split

NUM_SEGMENTS = 60  # of a lane, several epochs


def key(segment: Segment) -> tuple[object, ...]:
    return segment.tokens.tolist(), segment.document, segment.is_new_document, segment.after


@pytest.mark.parametrize(("layout", "cut"), [("documents", "start"), ("documents", "end"), ("stream", "start")])
@pytest.mark.parametrize("num_lanes", [1, 3, 8])
def test_reading_from_an_advanced_cursor_goes_on_as_reading_all(
    tmp_path: Path, layout: str, cut: str, num_lanes: int
) -> None:
    lengths = np.array(LENGTHS)
    plan = make_plan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN, seed=3, layout=layout, cut=cut)
    documents = Documents(make_split(tmp_path), lengths, bos_id=BOS)
    for lane in range(num_lanes):
        read = list(islice(read_lane(documents, plan, lane=lane), NUM_SEGMENTS))
        cursors = [START, *(segment.after for segment in read)]
        for begin in (0, 1, 5, 13):
            for count in range(NUM_SEGMENTS - begin):
                cursor = advance(plan, lane, cursors[begin], count)
                plan.check_cursor(lane, cursor)
                found = next(read_lane(documents, plan, lane=lane, cursor=cursor))
                assert key(found) == key(read[begin + count]), f"lane {lane}, {count} segments after {cursors[begin]}"
