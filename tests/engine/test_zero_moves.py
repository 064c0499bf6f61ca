"""A checkpoint of any ZeRO stage and number of ranks restores exactly at any other, or is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.runtime.distributed import World
from tests.support.engine_saves import FROZEN, engine_job, gathered, next_losses, restore_engine, save_engine
from tests.support.jobs import difference
from tests.support.messages import said
from tests.support.rank_errors import error_of
from tests.support.ranks import RankPool
from tests.support.tiny import full_parameters

pytestmark = pytest.mark.ranks

Pools = Callable[[int], RankPool]
BEFORE, AFTER = 2, 3  # steps before the save and after it
BF16 = {"train": {"precision": "bf16"}}


def trained(world: World, directory: Path, stage: int, overrides: list[Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Save after some steps; return the saved tensors and the losses that follow, from empty memories."""
    job = engine_job(world, stage, *overrides)
    empty = job.states
    next_losses(job, BEFORE)
    save_engine(job, directory)
    values = gathered(job)
    job.states = empty
    return values, next_losses(job, AFTER)


def settings(job: Any) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in job.engine.optimizer.param_groups]


def moved(world: World, directories: list[Path], stage: int, overrides: list[Any]) -> list[tuple[Any, list[float]]]:
    """The same of fresh engines that read it, with another accumulation."""
    found = []
    for directory in directories:
        job = engine_job(world, stage, *overrides, {"train": {"seed": 77, "micro_batch_size": 1}})
        configured = settings(job)
        restore_engine(job, directory)
        assert settings(job) == configured
        assert len(set(configured)) == 4
        values = gathered(job)
        job.step = BEFORE
        found.append((values, next_losses(job, AFTER)))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Callable[[int, int], Any]:
    """(world size, stage) -> directory, values and losses of a run of that kind; each made once."""

    @cache
    def get(world_size: int, stage: int) -> Any:
        directory = tmp_path_factory.mktemp(f"world{world_size}-stage{stage}-")
        return directory, *rank_pool(world_size).run(trained, directory, stage, [])[0]

    return get


def from_all(*worlds: int) -> list[tuple[int, int]]:
    return [(world, stage) for world in worlds for stage in range(4)]


def assert_equal_after_moves(
    pools: Pools, source: Callable[[int, int], Any], origins: list[tuple[int, int]], world_size: int, stage: int
) -> None:
    """Weights, moments and steps of each parameter by name; rates and decay stay those of the configuration."""
    sources = [source(*origin) for origin in origins]
    directories = [directory for directory, _, _ in sources]
    for (_, values, losses), (found, found_losses) in zip(
        sources, pools(world_size).run(moved, directories, stage, [])[0], strict=True
    ):
        assert {name.partition("/")[0] for name in values} == {"master", "exp_avg", "exp_avg_sq", "step"}
        assert difference(dict(sorted(values.items())), dict(sorted(found.items()))) is None
        assert found_losses == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_reads_every_stage_exactly(rank_pool: Pools, source: Callable[[int, int], Any], stage: int) -> None:
    assert_equal_after_moves(rank_pool, source, from_all(2), 2, stage)


@pytest.mark.parametrize(
    ("origins", "world_size", "stage"),
    [
        pytest.param([(2, 3), (2, 1)], 1, 0, marks=pytest.mark.core),
        ([(2, 0), (2, 2)], 1, 3),
        ([(1, 3), (1, 0)], 2, 2),
        ([(1, 2), (1, 1)], 2, 3),
        pytest.param(from_all(1, 2, 4), 3, 3, marks=pytest.mark.nightly),
        pytest.param(from_all(1, 2, 3), 4, 2, marks=pytest.mark.nightly),
        pytest.param(from_all(3, 4), 2, 1, marks=pytest.mark.nightly),
        pytest.param(from_all(3, 4), 1, 3, marks=pytest.mark.nightly),
        pytest.param(from_all(2, 4), 3, 0, marks=pytest.mark.nightly),
    ],
)
def test_every_number_of_ranks_reads_every_other_exactly(
    rank_pool: Pools, source: Callable[[int, int], Any], origins: list[tuple[int, int]], world_size: int, stage: int
) -> None:
    assert_equal_after_moves(rank_pool, source, origins, world_size, stage)


def freed(world: World, directory: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model of which a part was frozen, read by one that trains all, and by the frozen one again."""
    frozen = engine_job(world, stage, BF16, {"optimizer": {"groups": FROZEN}})
    save_engine(frozen, directory / "frozen")
    free = engine_job(world, stage, BF16, {"train": {"seed": 77}})
    restore_engine(free, directory / "frozen")
    save_engine(free, directory / "free")
    restore_engine(frozen, directory / "free")
    return full_parameters(free), full_parameters(frozen)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_are_read_as_trained_ones_and_back(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    for free, frozen in rank_pool(2).run(freed, tmp_path, stage):
        assert difference(free, frozen) is None
    saved = EngineReader(tmp_path / "frozen").weights()
    assert difference({name: saved[name] for name in free}, {name: part.float() for name, part in free.items()}) is None


def without_counts(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in sorted(values.items()) if not name.startswith("step/")}


def unfrozen(world: World, directory: Path, stages: list[int]) -> list[Any]:
    """A model of which a part is frozen for some steps, then trained at each stage, and again where it was frozen."""
    part = {"optimizer": {"groups": [{"param_regex": "embedding", "trainable": False}]}}
    whole: dict[str, Any] = {"optimizer": {"groups": []}}
    frozen = engine_job(world, 2, part)
    next_losses(frozen, BEFORE)
    save_engine(frozen, directory / "frozen")
    found = []
    for stage in stages:
        job = engine_job(world, stage, whole, {"train": {"seed": 77}})
        next_losses(job, 1)  # its own moments, as at a rollback
        restore_engine(job, directory / "frozen")
        at_start, names = gathered(job), job.engine.restored_empty
        job.step = BEFORE
        next_losses(job, AFTER)
        save_engine(job, directory / str(stage))
        back = engine_job(world, 2, whole)
        restore_engine(back, directory / str(stage))
        moved = difference(*(without_counts(gathered(one)) for one in (job, back)))
        moments = [at_start[name] for name in at_start if name.startswith("exp_avg") and "embedding" in name]
        steps = {float(part) for name, part in gathered(back).items() if name.startswith("step/")}
        found.append((names, [float(moment.abs().max()) for moment in moments], moved, steps))
    return found


def test_unfrozen_parameters_start_with_zero_moments_at_every_stage_and_move_back(
    tmp_path: Path, rank_pool: Pools
) -> None:
    for found in rank_pool(2).run(unfrozen, tmp_path, [0, 1, 2, 3]):
        for names, moments, moved, steps in found:
            assert names and all("embedding" in name for name in names)
            assert set(moments) <= {0.0}
            assert moved is None
            assert steps == {BEFORE + AFTER}


def counted_steps(world: World, directory: Path, stage: int) -> set[float]:
    """Counts of Adam's steps after one more, where all that was read of them is one and the same tensor."""
    job = engine_job(world, stage)
    next_losses(job, BEFORE)
    save_engine(job, directory)
    reader, one_for_all = EngineReader(directory), torch.tensor(float(BEFORE))
    job.engine.restore(
        lambda kind, *place: one_for_all if kind == "step" else reader.read(kind, *place), reader.counters
    )
    next_losses(job, 1)
    return {float(part.parts["step"]) for part in job.engine.held()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_everything_that_is_stepped_by_itself_counts_by_itself(tmp_path: Path, rank_pool: Pools, stage: int) -> None:
    assert rank_pool(2).run(counted_steps, tmp_path, stage) == [{BEFORE + 1.0}] * 2


def restored_otherwise(world: World, directory: Path, stage: int, change: Callable[..., Any]) -> None:
    """Restore, where the data that rank 1 reads is changed."""
    job = engine_job(world, stage)
    next_losses(job, 1)
    save_engine(job, directory)
    reader = EngineReader(directory)

    def read(kind: str, name: str, start: int, stop: int) -> Tensor | None:
        found = reader.read(kind, name, start, stop)
        return change(kind, name, found) if world.rank == 1 else found

    job.engine.restore(read, reader.counters)


def without_head(kind: str, name: str, found: Tensor | None) -> Tensor | None:
    return None if name.startswith("blocks.1") else found


def without_some_moments(kind: str, name: str, found: Tensor | None) -> Tensor | None:
    return None if kind == "exp_avg" and name.endswith("weight") else found


@pytest.mark.parametrize(("change", "named"), [(without_head, "blocks.1"), (without_some_moments, "exp_avg")])
def test_what_does_not_fit_is_refused_on_all_ranks(
    tmp_path: Path, rank_pool: Pools, change: Callable[..., Any], named: str
) -> None:
    for text in rank_pool(2).run(error_of, restored_otherwise, tmp_path, 2, change):
        said(text, "UnusableError", named)
