"""The engine's files of a checkpoint: whole weights out of any, the same bytes for the same state, few slices."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader, RankSlice, engine_index, engine_ranges, places
from dist_mem.checkpoint.rank_file import rank_file
from dist_mem.checkpoint.schemas import engine_problems
from dist_mem.engine.zero_state import Slice
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import World
from tests.support.engine_saves import FROZEN, engine_job, gathered, masters, next_losses, save_engine
from tests.support.jobs import difference
from tests.support.messages import refused
from tests.support.ranks import Pools


def train_and_save(
    world: World, directory: Path, stage: int, precision: str, groups: list[Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights as DeepSpeed's own functions gather them, and what the ranks own together."""
    job = engine_job(world, stage, {"optimizer": {"groups": groups}, "train": {"precision": precision}})
    next_losses(job, 2)
    for name in ("first", "second"):
        save_engine(job, directory / name)
    return masters(job), gathered(job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "groups"), [("fp32", []), ("bf16", []), ("fp32", FROZEN), ("bf16", FROZEN)])
def test_weights_are_what_the_optimizer_trains(
    tmp_path: Path, rank_pool: Pools, stage: int, precision: str, groups: list[Any]
) -> None:
    expected, owned = rank_pool(2).run(train_and_save, tmp_path, stage, precision, groups)[0]
    reader = EngineReader(tmp_path / "first")
    weights = reader.weights()
    assert difference({name: weights[name] for name in expected}, expected) is None
    assert torch.equal(weights["head.bins.0.weight"], weights["embedding.bins.0.weight"])
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    for key, tensor in owned.items():
        kind, _, name = key.partition("/")
        found = reader.read(kind, name, 0, tensor.numel() if tensor.dim() else 1)
        assert found is not None
        assert torch.equal(found, tensor), key
        assert (
            not groups or kind != "frozen" or found.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        )


def test_files_hold_every_element_once_and_no_padding(tmp_path: Path, rank_pool: Pools) -> None:
    """Same state, same bytes, in equal shares; no more elements than the parameters have, though 37 leaves padding."""
    for stage in range(4):
        directory = tmp_path / str(stage)
        rank_pool(2).run(train_and_save, directory, stage, "fp32", [])
        shapes = EngineReader(directory / "first").index["shapes"]
        stored: dict[str, int] = {}
        for rank in range(2):
            files = [directory / name / rank_file(rank) for name in ("first", "second")]
            assert files[0].read_bytes() == files[1].read_bytes()
            for key, tensor in load_file(files[0]).items():
                stored[key] = stored.get(key, 0) + (tensor.numel() if tensor.dim() else 0)
        sizes = [(directory / "first" / rank_file(rank)).stat().st_size for rank in range(2)]
        assert abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)
        wanted = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        assert stored == {
            f"engine/{kind}/{name}": 0 if kind == "step" else size
            for name, size in wanted.items()
            for kind in ("master", "exp_avg", "exp_avg_sq", "step")
        }


@pytest.fixture
def saved(tmp_path: Path, rank_pool: Pools) -> Path:
    rank_pool(2).run(train_and_save, tmp_path, 2, "fp32", [])
    return tmp_path / "first"


def test_any_range_is_read_from_whichever_files_have_it(saved: Path) -> None:
    reader = EngineReader(saved)
    name = next(name for name, slices in reader.index["slices"].items() if len(slices) == 2)
    whole = reader.weights()[name].flatten()
    cut = reader.index["slices"][name][0][2]
    for start, stop in ((0, 1), (cut - 1, cut + 1), (0, cut), (cut, len(whole)), (cut - 3, cut)):
        found = reader.read("master", name, start, stop)
        assert found is not None and torch.equal(found, whole[start:stop])
    assert reader.read("momentum_buffer", name, 0, 1) is None
    assert reader.read("master", "no such parameter", 0, 1) is None


def test_only_files_that_are_needed_are_opened(saved: Path) -> None:
    reader = EngineReader(saved)
    (saved / rank_file(1)).unlink()
    name, (first, *others) = next(iter(reader.index["slices"].items()))
    assert first[0] == 0
    assert not others
    assert reader.read("master", name, first[1], first[2]) is not None
    with refused(CheckpointError, saved / rank_file(1)):
        reader.weights()


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


@settings(deadline=None)
@given(st.builds(cut_at, BOUNDS) | st.builds(cut_every_parameter, st.integers(1, 30)), st.data())
def test_runs_name_the_slices_of_every_rank(cuts: Cuts, data: st.DataObject) -> None:
    slices = index_of(cuts)
    for name, size in SIZES.items():
        expected = [
            RankSlice(rank, start, stop) for rank, cut in enumerate(cuts) for found, start, stop in cut if found == name
        ]
        assert list(places(slices[name], 0, size)) == expected
        low, high = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        met = [place for place in expected if max(low, place.start) < min(high, place.stop)]
        assert list(places(slices[name], low, high)) == met
