"""The plan: each document once an epoch, lanes busy, nothing read twice at once, the same for ever."""

import csv
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_mem.data import plan as plan_module
from dist_mem.data.plan import (
    Cursor,
    DocumentPlan,
    StreamPlan,
    busy_lanes,
    evaluation_plan,
    forward_sizes,
    lanes_of_rank,
    make_plan,
    num_segments_of,
    segment_starts,
)
from tests.support.messages import refused

SEG_LEN = 4

corpora = st.tuples(
    st.lists(st.integers(2, 60), min_size=5, max_size=40),
    st.integers(1, 5),  # lanes
    st.integers(0, 2**32),  # seed
)


def document_plan(lengths: list[int], num_lanes: int, seed: int = 0) -> DocumentPlan:
    return DocumentPlan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN, seed=seed)


def schedule(plan: DocumentPlan, num_epochs: int) -> list[tuple[int, int, int]]:
    """(document, first step, segments) of everything the lanes read in the first epochs, lane after lane."""
    visits = []
    for lane in range(plan.num_lanes):
        step = 0
        for epoch in range(num_epochs):
            for document in plan.documents(epoch, lane):
                segments = -(-int(plan.lengths[document]) // plan.seg_len)
                visits.append((document, step, segments))
                step += segments
    return visits


@pytest.mark.parametrize("at_once", [1, 7, 40, 41])
def test_the_deal_does_not_depend_on_how_many_are_dealt_at_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 60, 40).tolist()
    expected = schedule(document_plan(lengths, 5), 4)
    monkeypatch.setattr(plan_module, "DEALT_AT_ONCE", at_once)
    assert schedule(document_plan(lengths, 5), 4) == expected


@given(corpora)
@settings(deadline=None)
def test_each_document_is_dealt_once_an_epoch_and_lanes_stay_level_to_within_the_longest(
    corpus: tuple[list[int], int, int],
) -> None:
    lengths, num_lanes, seed = corpus
    plan, loads = document_plan(lengths, num_lanes, seed), np.zeros(num_lanes)
    for epoch in range(4):
        dealt = [plan.documents(epoch, lane) for lane in range(num_lanes)]
        assert sorted(chain(*dealt)) == list(range(len(lengths)))
        loads += [num_segments_of(plan.lengths[documents], SEG_LEN).sum() for documents in dealt]
        assert loads.max() - loads.min() <= num_segments_of(plan.lengths, SEG_LEN).max()
        assert loads.sum() == plan.num_segments * (epoch + 1)


@given(st.lists(st.integers(2, 9), min_size=3, max_size=9), st.integers(1, 3), st.integers(0, 50))
@settings(deadline=None, max_examples=60)  # without `_keep_apart`, a third of such corpora fail
def test_no_two_lanes_read_the_same_tokens_in_one_step(lengths: list[int], num_lanes: int, seed: int) -> None:
    visits = schedule(document_plan(lengths, num_lanes, seed), num_epochs=6)
    assert all(count == 1 for count in Counter((document, step) for document, step, _ in visits).values())


def test_the_plan_does_not_depend_on_what_was_asked_before() -> None:
    lengths = [2 + 7 * number % 50 for number in range(30)]
    in_order, at_once = document_plan(lengths, 4, seed=3), document_plan(lengths, 4, seed=3)
    late = [at_once.documents(5, lane) for lane in range(4)]
    asked = [[in_order.documents(epoch, lane) for lane in range(4)] for epoch in range(6)]
    assert asked[5] == late
    assert at_once.documents(0, 2) == asked[0][2]
    assert asked[0] != asked[1]
    assert asked[0][0] != document_plan(lengths, 4, seed=4).documents(0, 0)


def test_empty_and_one_token_documents_are_skipped_and_counted() -> None:
    plan = document_plan([5, 0, 1, 2, 9], num_lanes=2)
    assert plan.skipped == [1, 2]
    assert sorted(plan.documents(0, 0) + plan.documents(0, 1)) == [0, 3, 4]
    assert StreamPlan([5, 0, 1], num_lanes=2, seg_len=SEG_LEN).skipped == [1]


def test_fewer_documents_or_tokens_than_lanes_are_refused() -> None:
    with refused(ValueError, "train.global_batch_size", "data.layout"):
        document_plan([5, 6, 1, 7], num_lanes=4)
    with refused(ValueError, "train.global_batch_size = 6", "5 tokens"):
        StreamPlan([5], num_lanes=6, seg_len=4)


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_segment_is_complete_but_the_last_or_if_cut_from_the_end_the_first(length: int, seg_len: int) -> None:
    for cut, short in (("start", -1), ("end", 0)):
        sizes = np.diff([*segment_starts(length, seg_len=seg_len, cut=cut), length]).tolist()
        assert sum(sizes) == length and len(sizes) == -(-length // seg_len)
        if sizes:
            assert 1 <= sizes.pop(short) <= seg_len
        assert set(sizes) <= {seg_len}


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6))
def test_every_rank_holds_the_same_number_of_lanes(num_lanes: int, world_size: int, micro_lanes: int) -> None:
    held = [
        lanes_of_rank(num_lanes, world_size=world_size, rank=rank, micro_lanes=micro_lanes)
        for rank in range(world_size)
    ]
    assert len({len(lanes) for lanes in held}) == 1
    assert len(held[0]) % micro_lanes == 0
    assert [lane for lanes in held for lane in lanes] == list(range(world_size * len(held[0])))
    assert world_size * len(held[0]) >= num_lanes
    assert len(held[0]) < -(-num_lanes // world_size) + micro_lanes


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 7))
def test_stream_lanes_share_the_corpus_out_evenly(lengths: list[int], num_lanes: int) -> None:
    assume(sum(lengths) >= num_lanes)
    plan = StreamPlan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
    spans = [plan.span(lane) for lane in range(num_lanes)]
    assert [position for span in spans for position in range(*span)] == list(range(sum(lengths)))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1
    assert plan.num_segments == sum(-(-size // SEG_LEN) for size in sizes)


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 8))
def test_evaluation_deals_every_document_once_longest_first(lengths: list[int], num_lanes: int) -> None:
    lanes = evaluation_plan(lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
    assert sorted(chain(*lanes)) == [number for number, length in enumerate(lengths) if length > 0]
    for before, after in chain(*map(pairwise, lanes)):  # of equal length as in the index: other sums have other bits
        assert (-lengths[before], before) < (-lengths[after], after)
    segments = [-(-length // SEG_LEN) for length in lengths]
    loads = [sum(segments[document] for document in lane) for lane in lanes]
    assert len(lanes) == min(num_lanes, sum(length > 0 for length in lengths))
    assert all(loads)
    busy = busy_lanes(lanes, lengths, seg_len=SEG_LEN)
    assert busy == [sum(load > step for load in loads) for step in range(max(loads, default=0))]
    assert all(load > step for step, num_busy in enumerate(busy) for load in loads[:num_busy])  # always the first ones
    assert max(loads, default=0) <= sum(segments) / num_lanes + max(segments, default=0)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 6))
def test_ranks_make_equally_many_forwards_and_read_every_busy_lane(
    num_busy: int, world_size: int, micro_lanes: int
) -> None:
    sizes = [
        forward_sizes(num_busy, world_size=world_size, rank=rank, micro_lanes=micro_lanes) for rank in range(world_size)
    ]
    assert len({len(of_rank) for of_rank in sizes}) == 1
    assert all(1 <= size <= micro_lanes for of_rank in sizes for size in of_rank)
    num_idle = [
        sum(of_rank) - len(range(rank, num_busy, world_size)) for rank, of_rank in enumerate(sizes)
    ]  # rows without a lane: one a forward at most, and none on rank 0
    assert num_idle[0] == 0
    assert all(0 <= idle <= len(sizes[0]) for idle in num_idle)


def test_epochs_done_grows_with_every_segment_and_is_whole_at_the_ends() -> None:
    plan = document_plan([9, 2, 13, 4], num_lanes=2)
    for lane in range(2):
        places = plan.documents(0, lane)
        cursors = [
            Cursor(0, place, offset)
            for place, number in enumerate(places)
            for offset in range(0, int(plan.lengths[number]), SEG_LEN)
        ]
        done = [plan.epochs_done(lane, *cursor) for cursor in cursors]
        total = len(cursors)
        assert done == pytest.approx([step / total for step in range(total)])
        assert plan.epochs_done(lane, 0, len(places), 0) == 1.0
        assert plan.epochs_done(lane, 2, 0, 0) in (2.0, 3.0)  # 3 where the lane has nothing in epoch 2


@pytest.mark.parametrize(
    "cursor", [Cursor(0, 9, 0), Cursor(0, 0, 99), Cursor(0, 0, -1), Cursor(1, -1, 0), Cursor(-1, 0, 0)]
)
@pytest.mark.parametrize("layout", ["documents", "stream"])
def test_a_cursor_of_another_plan_is_refused(layout: str, cursor: Cursor) -> None:
    plan = make_plan([9, 5, 13, 4], num_lanes=2, seg_len=SEG_LEN, seed=0, layout=layout)
    plan.check_cursor(1, Cursor(0, 0, 4))
    with refused(ValueError, "data.seed"):
        plan.check_cursor(1, cursor)


def test_padding_stays_under_one_percent_on_the_lengths_of_all_pg19_books(shared_data: Path) -> None:
    with (shared_data / "data/pg19_meta/official_manifest.csv").open() as rows:
        train = [row for row in csv.DictReader(rows) if row["split"] == "train"]
    lengths = np.array([int(int(row["num_bytes"]) / 4.32) for row in train])  # bytes per token of a 32k BPE
    plan = DocumentPlan(lengths, num_lanes=64, seg_len=512, seed=0)
    assert len(plan.skipped) == 1  # train/90.txt has 0 bytes
    read = lengths[lengths >= 2]
    assert 1 - read.sum() / (plan.num_segments * 512) < 0.01
