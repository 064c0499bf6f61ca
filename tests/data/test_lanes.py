"""Lanes: every token once an epoch and in order, the same for any number of ranks, resumable at any update.

The properties are of small corpora of any lengths, in both layouts, cut from either end, in blocks or not, with some
documents damaged.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Documents
from dist_mem.data.index import ShardEntry
from dist_mem.data.lanes import evaluation_batches
from dist_mem.data.plan import (
    START,
    Plan,
    busy_lanes,
    cut_lengths,
    evaluation_plan,
    forward_sizes,
    lanes_of_rank,
    make_plan,
)
from dist_mem.data.prefetch import Prefetcher
from dist_mem.data.segments import read_lane
from dist_mem.data.shard import Index, ShardError, ShardSource, read_index
from dist_mem.errors import EXIT_USAGE
from tests.support.lane_corpus import (
    BOS,
    LAYOUTS,
    LENGTHS,
    SEG_LEN,
    assert_equal_batches,
    assert_equal_updates,
    damage,
    first_updates,
    make_split,
    reader_of,
)
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.simple_lanes import simple_updates


@dataclass(frozen=True)
class Reading:
    """A corpus, and how its lanes read it."""

    corpus: dict[str, Any]  # arguments of `make_split`
    damaged: set[int]
    num_lanes: int
    data: dict[str, Any]  # keys of the configuration

    @contextmanager
    def index(self) -> Iterator[Index]:
        with TemporaryDirectory() as folder:
            index = make_split(Path(folder), **self.corpus)
            for document in self.damaged:
                damage(index, document)
            yield read_index(Path(folder))

    @property
    def lengths(self) -> np.ndarray:
        return cut_lengths(self.corpus["lengths"], self.data["max_document_len"])

    def plan(self) -> Plan:
        options = {key: self.data[key] for key in ("seed", "layout", "cut")}
        return make_plan(self.lengths, num_lanes=self.num_lanes, seg_len=SEG_LEN, **options)


@st.composite
def readings(draw: st.DrawFn, *, is_damaged: bool = True) -> Reading:
    lengths = draw(st.lists(st.integers(0, 20), min_size=5, max_size=12))
    readable = [number for number, length in enumerate(lengths) if length > 1]
    num_lanes = draw(st.integers(1, 5))
    assume(len(readable) >= num_lanes)
    some = is_damaged and len(readable) > 2 * num_lanes + 2  # no lane meets damaged ones alone
    layout, cut = draw(st.sampled_from([("documents", "start"), ("documents", "end"), ("stream", "start")]))
    return Reading(
        {
            "lengths": lengths,
            "with_extras": draw(st.booleans()),
            "dtype": draw(st.sampled_from([np.uint16, np.uint32])),
        },
        draw(st.sets(st.sampled_from(readable), max_size=2)) if some else set(),
        num_lanes,
        {
            "layout": layout,
            "cut": cut,
            "blocks": draw(st.booleans()),
            "max_document_len": draw(st.none() | st.integers(2, 9)),
            "seed": draw(st.integers(0, 5)),
            "on_corrupt": "skip",
        },
    )


class Division(NamedTuple):
    """Of the lanes among ranks, and of a rank's lanes."""

    world_size: int
    micro_lanes: int

    def lanes(self, num_lanes: int, rank: int) -> range:
        return lanes_of_rank(num_lanes, self.world_size, rank, self.micro_lanes)


DIVISIONS = st.builds(Division, st.integers(1, 4), st.integers(1, 3))
POSITIONS = st.integers(0, 25)


@given(readings(), DIVISIONS, st.integers(0, 3), st.integers(1, 3), POSITIONS)
@settings(deadline=None, max_examples=40)
def test_updates_are_those_read_token_by_token_and_go_on_from_any_of_them(
    reading: Reading, division: Division, rank: int, segments_per_update: int, position: int
) -> None:
    rank %= division.world_size
    sizes: dict[str, Any] = {"micro_lanes": division.micro_lanes, "segments_per_update": segments_per_update}
    options = {**reading.data, **sizes, "num_lanes": reading.num_lanes, "world_size": division.world_size, "rank": rank}
    with reading.index() as index:
        documents = Documents(index, reading.lengths, bos_id=BOS, on_corrupt="skip")
        straight = first_updates(index, position + 5, **options)
        resumed = first_updates(index, 4, cursors=straight[position].cursors, **options)
        lane_ids = division.lanes(reading.num_lanes, rank)
        simple = simple_updates(documents, reading.plan(), lane_ids=lane_ids, blocks=reading.data["blocks"], **sizes)
        for one, other in zip(straight, simple, strict=False):
            assert_equal_updates(one, other)
    for one, other in zip(straight[position + 1 :], resumed, strict=True):
        assert_equal_updates(one, other)


def segments_of_all(
    index: Index, reading: Reading, division: Division, count: int, cursors: Tensor | None = None
) -> tuple[list[Batch], Tensor]:
    """The first segments of all lanes, joined over the ranks, and the cursors after them; idle lanes are empty."""
    held = [division.lanes(reading.num_lanes, rank) for rank in range(division.world_size)]
    padded = torch.zeros(held[-1].stop, 3, dtype=torch.int64)
    if cursors is not None:
        padded[: reading.num_lanes] = cursors
    options = {**reading.data, **division._asdict(), "num_lanes": reading.num_lanes}
    ranks = [
        first_updates(index, count, rank=rank, cursors=padded[list(lanes)], **options)
        for rank, lanes in enumerate(held)
    ]
    joined = []
    for updates in zip(*ranks, strict=True):
        rows = zip(*(batch for update in updates for batch in update.batches), strict=True)
        whole = Batch._make(None if part[0] is None else torch.cat(part) for part in rows)
        idle = Batch._make(None if part is None else part[reading.num_lanes :] for part in whole)
        assert not idle.tokens.any() and (idle.targets == IGNORE).all() and not idle.valid_len.any()
        assert (idle.document == -1).all() and not idle.is_new_document.any()
        joined.append(Batch._make(None if part is None else part[: reading.num_lanes] for part in whole))
        padded = torch.cat([update.cursors for update in updates])
    return joined, padded[: reading.num_lanes]


@given(readings(), DIVISIONS, DIVISIONS, POSITIONS)
@settings(deadline=None, max_examples=30)
def test_any_ranks_go_on_where_any_others_have_stopped(
    reading: Reading, first: Division, second: Division, position: int
) -> None:
    with reading.index() as index:
        alone, _ = segments_of_all(index, reading, Division(1, 1), position + 8)
        before, cursors = segments_of_all(index, reading, first, position + 1)
        after, _ = segments_of_all(index, reading, second, 7, cursors)
    for one, other in zip(alone, before + after, strict=True):
        assert_equal_batches(one, other)


@given(readings(is_damaged=False), DIVISIONS, st.integers(1, 20))
@settings(deadline=None, max_examples=60)
def test_an_evaluation_reads_every_token_once_for_any_lanes_and_ranks(
    reading: Reading, division: Division, num_lanes: int
) -> None:
    reading.corpus["with_extras"] = False
    options = {key: reading.data[key] for key in ("max_document_len", "cut", "blocks")}
    lanes = evaluation_plan(reading.lengths, num_lanes=num_lanes, seg_len=SEG_LEN)
    num_busy = busy_lanes(lanes, reading.lengths, seg_len=SEG_LEN)
    read, begun = Counter[int](), Counter[int]()
    with reading.index() as index:
        for rank in range(division.world_size):
            sizes: dict[str, Any] = {**division._asdict(), "rank": rank}
            steps = list(evaluation_batches(index, lanes, seg_len=SEG_LEN, bos_id=BOS, **sizes, **options))
            assert [[len(batch.tokens) for batch in step] for step in steps] == [
                forward_sizes(number, **sizes) for number in num_busy
            ]
            for batch in (batch for step in steps for batch in step):
                begun.update(batch.document[batch.is_new_document].tolist())
                own = batch.tokens if options["blocks"] else batch.targets  # without masks each token is one of both
                for row, length in zip(own, batch.valid_len.tolist(), strict=True):
                    read.update(row[:length].tolist())
    starts = np.cumsum([0, *reading.corpus["lengths"]])[:-1]
    documents = [np.arange(length) + start for start, length in zip(starts, reading.lengths, strict=True)]
    assert read == Counter(np.concatenate(documents).tolist())
    assert begun == Counter(np.flatnonzero(reading.lengths).tolist())


@given(readings(is_damaged=False), st.integers(0, 4), POSITIONS, POSITIONS)
@settings(deadline=None, max_examples=60)
def test_a_position_by_arithmetic_is_the_position_after_reading(
    reading: Reading, lane: int, begin: int, count: int
) -> None:
    plan, lane = reading.plan(), lane % reading.num_lanes
    with reading.index() as index:
        documents = Documents(index, reading.lengths, bos_id=BOS)
        read = list(islice(read_lane(documents, plan, lane=lane), begin + count + 1))
        cursor = plan.advance(lane, read[begin - 1].after if begin else START, count)
        plan.check_cursor(lane, cursor)
        found = next(read_lane(documents, plan, lane=lane, cursor=cursor))
    assert found.tokens.tolist() == read[-1].tokens.tolist()
    assert (found.document, found.is_new_document, found.after) == (
        read[-1].document, read[-1].is_new_document, read[-1].after
    )  # fmt: skip


def test_cursors_of_another_plan_are_refused(tmp_path: Path) -> None:
    index = make_split(tmp_path)
    of_others = {"shape (2, 3)": torch.zeros(2, 3, dtype=torch.int64), "epoch 77": torch.full((3, 3), 77)}
    for named, cursors in of_others.items():
        with refused(ValueError, named):
            first_updates(index, 1, cursors=cursors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_document_stops_with_its_name_when_its_turn_comes(tmp_path: Path, layout: str) -> None:
    index, damaged = make_split(tmp_path), (3, 6)
    for document in damaged:
        damage(index, document)
    plan = make_plan(LENGTHS, num_lanes=1, seg_len=SEG_LEN, seed=0)
    order = plan.documents(0, 0) if layout == "documents" else range(9)  # type: ignore[union-attr]
    num_read = 0
    with reader_of(read_index(tmp_path), num_lanes=1, layout=layout) as reader:
        with refused(ShardError, "data.on_corrupt"):
            for update in reader:
                num_read += int(update.batches[0].valid_len)
        with pytest.raises(ShardError):
            next(reader)
    assert num_read == sum(LENGTHS[document] for document in takewhile(lambda number: number not in damaged, order))


def test_a_missing_shard_stops_or_skips_its_documents_with_a_warning_for_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = make_split(tmp_path, max_shard_bytes=50)
    gone = index.shards[1].name
    (tmp_path / gone).unlink()
    with pytest.raises(ShardError, match=gone):
        first_updates(index, 40)
    updates = first_updates(index, 40, on_corrupt="skip")
    read = {int(number) for update in updates for batch in update.batches for number in batch.document}
    readable = {number: entry.shard for number, entry in enumerate(index.documents) if entry.num_tokens >= 2}
    assert read == {number for number, shard in readable.items() if shard != gone}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(set(warnings)) == len(readable) - len(read)


class NotingSource(ShardSource):
    """Notes the tars that are fetched without having been announced."""

    def __init__(self) -> None:
        self.announced: set[str] = set()
        self.late: set[str] = set()

    def expect(self, shard: ShardEntry) -> None:
        self.announced.add(shard.name)

    def fetch(self, shard: ShardEntry) -> None:
        self.late |= {shard.name} - self.announced


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tar_but_the_first_is_announced_before_it_is_read(tmp_path: Path, layout: str) -> None:
    """One that is elsewhere is fetched while the document before is read."""
    index = make_split(tmp_path, [7, 5, 30, 2, 11], max_shard_bytes=1)
    noting = NotingSource()
    first_updates(replace(index, source=noting), 16, num_lanes=1, layout=layout)
    assert len(noting.late) == 1
    assert noting.late | noting.announced == {shard.name for shard in index.shards}


def test_a_corpus_without_a_good_document_stops_even_when_skipping(tmp_path: Path) -> None:
    index = make_split(tmp_path)
    (tmp_path / index.shards[0].name).unlink()
    with refused(ShardError, "12 damaged documents") as caught:
        first_updates(index, 1, on_corrupt="skip")
    assert caught.value.exit_code == EXIT_USAGE


def test_an_evaluation_never_skips_a_damaged_document(tmp_path: Path) -> None:
    damage(make_split(tmp_path), 3)
    sizes: dict[str, Any] = {"world_size": 1, "rank": 0, "micro_lanes": 1}
    with refused(ShardError, "document d3"):
        list(evaluation_batches(read_index(tmp_path), [[0, 3]], seg_len=SEG_LEN, bos_id=BOS, **sizes))


# The reading thread: bounded, honest about errors, gone when closed


def test_closing_early_leaves_no_thread(tmp_path: Path) -> None:
    index = make_split(tmp_path)
    before = set(threading.enumerate())
    with reader_of(index, prefetch=2) as reader:
        next(reader)
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before
    reader.close()
    with refused(RuntimeError, "the reader is closed"):
        next(reader)


def test_the_prefetcher_reads_ahead_by_its_depth_and_no_more() -> None:
    depth, asked = 3, 0
    ahead: list[int] = []
    filled = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(100):
            ahead.append(number - asked)
            if number == depth:  # that many wait to be read, and the thread holds this one
                filled.set()
            yield number

    with closing(Prefetcher(numbers(), depth=depth)) as items:
        assert filled.wait(limit(10))
        for number in range(100):
            asked += 1
            assert next(items) == number
        with pytest.raises(StopIteration):
            next(items)
    assert max(ahead) == depth
