"""engine.json lists runs of slices: they name the slices of every rank, and grow with parameters plus ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.checkpoint.engine_files import Place, engine_index, engine_ranges, places
from dist_mem.checkpoint.schemas import engine_problems
from dist_mem.engine.zero_state import Slice

Cuts = list[list[tuple[str, int, int]]]  # of every rank: name, start, stop
SHAPES = {"a": [7], "b": [1], "c": [64, 10], "d": [3, 5], "e": [0]}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}


def index_of(cuts: Cuts) -> dict[str, list[list[int]]]:
    ranges = [engine_ranges([Slice(name, start, stop, {}) for name, start, stop in cut], SHAPES) for cut in cuts]
    index = engine_index({"shapes": SHAPES, "aliases": {}, "counters": {}}, ranges)
    assert not list(engine_problems("", index))
    slices: dict[str, list[list[int]]] = index["slices"]
    return slices


def cut_every_parameter(world: int) -> Cuts:
    """As ZeRO stage 3: each rank has an equal part of every parameter, the last ones less, or nothing."""
    sizes = [(name, size, -(-size // world)) for name, size in SIZES.items()]
    whole = [
        [(name, min(rank * part, size), min((rank + 1) * part, size)) for name, size, part in sizes]
        for rank in range(world)
    ]
    return [[(name, start, stop) for name, start, stop in cut if start < stop] for cut in whole]


def cut_at(bounds: Sequence[int]) -> Cuts:
    """As ZeRO stages 0 to 2: the parameters end to end, cut at these places, one part a rank."""
    ends = np.cumsum([0, *SIZES.values()]).tolist()
    spans = list(zip(SIZES, ends[:-1], ends[1:], strict=True))
    return [
        [
            (name, max(low, first) - first, min(high, last) - first)
            for name, first, last in spans
            if max(low, first) < min(high, last)
        ]
        for low, high in itertools.pairwise([0, *bounds, ends[-1]])
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 16, 1024])
def test_equal_parts_are_few_runs_and_a_parameter_that_all_ranks_share_is_one(world: int) -> None:
    shared = index_of(cut_every_parameter(world))
    assert sum(map(len, shared.values())) <= 2 * len(SHAPES)
    assert world < 3 or {name: len(runs) for name, runs in shared.items()} == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 0}
    part = -(-sum(SIZES.values()) // world)
    slices = index_of(cut_at([min(rank * part, sum(SIZES.values())) for rank in range(1, world)]))
    assert sum(map(len, slices.values())) <= 3 * len(SHAPES)


BOUNDS = st.lists(st.integers(0, sum(SIZES.values())), max_size=12).map(sorted)


@given(st.builds(cut_at, BOUNDS) | st.builds(cut_every_parameter, st.integers(1, 30)), st.data())
def test_runs_name_the_slices_of_every_rank(cuts: Cuts, data: st.DataObject) -> None:
    slices = index_of(cuts)
    for name, size in SIZES.items():
        expected = [
            Place(rank, start, stop) for rank, cut in enumerate(cuts) for found, start, stop in cut if found == name
        ]
        assert list(places(slices[name], 0, size)) == expected
        low, high = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        met = [place for place in expected if max(low, place.start) < min(high, place.stop)]
        assert list(places(slices[name], low, high)) == met
