"""The door to DeepSpeed: the same training at every stage and precision, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_mem.data.batch import IGNORE
from dist_mem.runtime.distributed import World
from dist_mem.training.meter import Meter
from tests.support.messages import said
from tests.support.rank_errors import error_of
from tests.support.ranks import RankPool
from tests.support.tiny import run_steps, tiny_config, tiny_job, update_of_rank

pytestmark = pytest.mark.ranks


def losses_of(world: World, stage: int, precision: str, optimizer: dict[str, Any]) -> list[float]:
    config = tiny_config({"optimizer": optimizer, "train": {"precision": precision, "micro_batch_size": 2}})
    return [outcome.totals.nll for outcome in run_steps(tiny_job(config, world, stage=stage), first=0, last=4)]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_bf16_without_zero_trains_as_at_stage_1(rank_pool: Callable[[int], RankPool], kind: str) -> None:
    """DeepSpeed's optimizer for it makes a step of its own at the start: weights decayed, Adam's count one ahead."""
    optimizer = {"kind": kind, "lr": 0.02, "weight_decay": 0.5}
    found = [rank_pool(2).run(losses_of, stage, "bf16", optimizer)[0] for stage in (0, 1)]
    assert found[0] == found[1]


def metrics_of_first_silent_update(world: World, stage: int) -> dict[str, float]:
    job = tiny_job(tiny_config(), world, stage=stage)
    update = update_of_rank(job.config, world, step=0)
    silent = [batch._replace(targets=torch.full_like(batch.targets, IGNORE)) for batch in update.batches]
    job.train(update._replace(batches=silent, scored=[0, 0]), [0, 0])
    return Meter(lane_segments_per_update=8).read(job.engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_first_update_without_targets_can_be_logged(rank_pool: Callable[[int], RankPool], stage: int) -> None:
    (found,) = rank_pool(1).run(metrics_of_first_silent_update, stage)
    assert found["grad_norm"] != found["grad_norm"]  # nan: there was none


def start_with_fp32_accumulation(world: World, stage: int) -> None:
    config = tiny_config({"train": {"precision": "bf16"}})
    tiny_job(config, world, stage=stage, block={"data_types": {"grad_accum_dtype": "fp32"}})


@pytest.mark.parametrize(("stage", "named"), [(0, "deepspeed"), (1, "grad_accum_dtype")])
def test_what_deepspeed_refuses_and_what_could_not_be_evaluated_are_value_errors(
    rank_pool: Callable[[int], RankPool], stage: int, named: str
) -> None:
    (text,) = rank_pool(1).run(error_of, start_with_fp32_accumulation, stage)
    said(text, "ValueError", named)
