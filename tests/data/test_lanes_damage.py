"""Damaged documents and missing shards: stop with a name, or skip and count, the same on every rank and resume."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from dist_mem.data.batch import IGNORE, Update
from dist_mem.data.lanes import evaluation_batches
from dist_mem.data.plan import make_plan
from dist_mem.data.shard import Index, ShardError, read_index
from dist_mem.errors import EXIT_USAGE
from tests.support.lane_corpus import (
    BOS,
    LAYOUTS,
    LENGTHS,
    SEG_LEN,
    STARTS,
    assert_equal_batches,
    assert_resumes_everywhere,
    damage,
    first_updates,
    global_steps,
    make_split,
    reader_of,
)
from tests.support.messages import refused

DAMAGED = (3, 6)


@pytest.fixture
def damaged_index(tmp_path: Path) -> Index:
    index = make_split(tmp_path, with_extras=True)
    for document in DAMAGED:
        damage(index, document)
    return read_index(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_document_stops_with_its_name_when_its_turn_comes(damaged_index: Index, layout: str) -> None:
    order = (
        make_plan(LENGTHS, num_lanes=1, seg_len=SEG_LEN, seed=0).documents(0, 0) if layout == "documents" else range(9)
    )
    good = list(takewhile(lambda document: document not in DAMAGED, order))
    num_read = 0
    with reader_of(damaged_index, num_lanes=1, layout=layout) as reader:
        with refused(ShardError, "data.on_corrupt"):
            for update in reader:
                num_read += int(update.batches[0].valid_len)
        with pytest.raises(ShardError):
            next(reader)
    assert num_read == sum(LENGTHS[document] for document in good)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("segments_per_update", [1, 2])
def test_skipping_damaged_documents_resumes_exactly_too(
    damaged_index: Index, layout: str, segments_per_update: int
) -> None:
    assert_resumes_everywhere(
        damaged_index, 30, on_corrupt="skip", layout=layout, segments_per_update=segments_per_update
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipping_damaged_documents_is_the_same_on_any_number_of_ranks(damaged_index: Index, layout: str) -> None:
    options: dict[str, Any] = {"num_lanes": 4, "on_corrupt": "skip", "layout": layout}
    for world_size in (2, 3):
        for one, other in zip(
            global_steps(damaged_index, 20, world_size=1, **options),
            global_steps(damaged_index, 20, world_size=world_size, **options),
            strict=True,
        ):
            for first, second in zip(one, other, strict=True):
                assert_equal_batches(first, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipping_leaves_out_the_damaged_documents_alone_and_counts_them(
    damaged_index: Index, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    with reader_of(damaged_index, num_lanes=1, layout=layout, on_corrupt="skip") as reader:
        updates: list[Update] = []
        while not updates or int(updates[-1].cursors[0, 0]) < 3:
            updates.append(next(reader))
    assert sum(update.documents_skipped for update in updates) in (6, 7)  # the fourth epoch may begin with one
    if layout == "documents":
        updates.pop()  # of the fourth epoch
    dropped = {*DAMAGED, 1, 4} if layout == "documents" else {*DAMAGED, 1}
    assert sum(update.documents_started for update in updates) == 3 * (len(LENGTHS) - len(dropped))
    bad = {token for document in DAMAGED for token in range(STARTS[document], STARTS[document + 1])}
    read = {int(token) for update in updates for batch in update.batches for token in batch.tokens.flatten()}
    assert not bad & read
    scored = Counter(int(token) for update in updates for batch in update.batches for token in batch.targets.flatten())
    del scored[IGNORE]
    good = [
        STARTS[document] + offset
        for document, length in enumerate(LENGTHS)
        for offset in range(length)
        if document not in dropped and (document % 3 or offset % 2)
    ]
    assert scored == Counter(good * 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert all("d3" in text or "d6" in text for text in warnings)


def test_a_missing_shard_stops_or_skips_its_documents(tmp_path: Path) -> None:
    index = make_split(tmp_path, max_shard_bytes=50)
    gone = index.shards[1].name
    (tmp_path / gone).unlink()
    with pytest.raises(ShardError, match=gone):
        first_updates(index, 40)
    updates = first_updates(index, 40, on_corrupt="skip")
    read = {int(number) for update in updates for batch in update.batches for number in batch.document}
    assert read == {
        number for number, entry in enumerate(index.documents) if entry.num_tokens >= 2 and entry.shard != gone
    }


def test_a_corpus_without_a_good_document_stops_even_when_skipping(tmp_path: Path) -> None:
    index = make_split(tmp_path)
    (tmp_path / index.shards[0].name).unlink()
    with refused(ShardError) as caught:
        first_updates(index, 1, on_corrupt="skip")
    assert caught.value.exit_code == EXIT_USAGE


def test_evaluation_never_skips_a_damaged_document(damaged_index: Index) -> None:
    lanes = [[0, 3]]
    steps = evaluation_batches(damaged_index, lanes, world_size=1, rank=0, micro_lanes=1, seg_len=SEG_LEN, bos_id=BOS)
    with refused(ShardError):
        list(steps)
