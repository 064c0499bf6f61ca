"""A LaneReader gives the updates of the reference reader, which reads token by token."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dist_mem.data.plan import Cursor
from dist_mem.data.shard import Index, read_index
from tests.support.lane_corpus import (
    LAYOUTS,
    READER_OPTIONS,
    assert_equal_updates,
    damage,
    first_updates,
    make_split,
    reader_of,
    simply,
)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return make_split(tmp_path, with_extras=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", READER_OPTIONS)
def test_updates_equal_those_read_token_by_token(index: Index, layout: str, options: dict[str, Any]) -> None:
    simple, updates = (read(index, 70, layout=layout, **options) for read in (simply, first_updates))
    for one, other in zip(simple, updates, strict=True):
        assert_equal_updates(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_documents_are_skipped_alike(tmp_path: Path, layout: str) -> None:
    written = make_split(tmp_path, with_extras=True)
    for document in (3, 6):
        damage(written, document)
    options = {"layout": layout, "on_corrupt": "skip", "segments_per_update": 2}
    simple, updates = (read(read_index(tmp_path), 50, **options) for read in (simply, first_updates))
    assert sum(update.documents_skipped for update in simple) > 4
    for one, other in zip(simple, updates, strict=True):
        assert_equal_updates(one, other)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=3, max_size=12),
    num_lanes=st.integers(1, 3),
    seed=st.integers(0, 5),
    layout=st.sampled_from(LAYOUTS),
    with_extras=st.booleans(),
    resume_at=st.integers(0, 40),
)
@settings(deadline=None, max_examples=40)
def test_any_corpus_reads_alike_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    num_lanes: int,
    seed: int,
    layout: str,
    with_extras: bool,
    resume_at: int,
) -> None:
    assume(sum(length >= 2 for length in lengths) >= num_lanes)
    index = make_split(tmp_path_factory.mktemp("any"), lengths, with_extras=with_extras)
    options: dict[str, Any] = {"num_lanes": num_lanes, "seed": seed, "layout": layout}
    cursors = first_updates(index, resume_at + 1, **options)[-1].cursors
    updates = first_updates(index, 40, cursors=cursors, **options)
    simple = simply(index, 40, cursors=[Cursor(*row) for row in cursors.tolist()], **options)
    for one, other in zip(simple, updates, strict=True):
        assert_equal_updates(one, other)


def test_an_update_handed_out_never_changes_again(index: Index) -> None:
    with reader_of(index) as reader:
        first = next(reader)
        kept = deepcopy(first)
        for _ in range(100):
            next(reader)
    assert_equal_updates(first, kept)
