"""The door to DeepSpeed: the same training at every stage and precision, and weights that come out as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import difference
from ranks import RankPool
from tiny import run_steps, tiny_config, tiny_job, update_of_rank
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.distributed import World
from dist_mem.engine import consolidated_state_dict
from dist_mem.meter import Meter
from dist_mem.update import train_step

FROZEN = [{"match": "embedding|bias", "trainable": False}]


def losses_of(world: World, stage: int, precision: str, optimizer: dict[str, Any]) -> list[float]:
    config = tiny_config({"optimizer": optimizer, "train": {"precision": precision, "micro_lanes": 2}})
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
    train_step(job, update._replace(batches=silent, num_scored=0), 0, 0, stop=False)
    return Meter(lane_segments_per_update=8).read(job.engine)


@pytest.mark.parametrize("stage", [0, 2])
def test_first_update_without_targets_can_be_logged(rank_pool: Callable[[int], RankPool], stage: int) -> None:
    (found,) = rank_pool(1).run(metrics_of_first_silent_update, stage)
    assert found["grad_norm"] != found["grad_norm"]  # nan: there was none


def masters(job: Any) -> dict[str, Tensor]:
    """What the optimizer trains, whole, and what is frozen; under the first name of each parameter."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    optimizer = job.engine.optimizer
    known: dict[int, Tensor] = {}
    if job.engine.stage == 0 and hasattr(optimizer, "fp32_groups"):
        for halves, wholes in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            known.update({id(half): whole for half, whole in zip(halves, wholes, strict=True)})
    found = {}
    for name, parameter in job.engine.module.named_parameters():
        whole = known.get(id(parameter))
        if whole is None and parameter.requires_grad and job.engine.stage:
            whole = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], enabled=job.engine.stage == 3):
            found[name] = (parameter if whole is None else whole).detach().clone().float()
    return found


def train_and_save(world: World, directory: Path, stage: int, precision: str, groups: list[Any]) -> dict[str, Tensor]:
    optimizer = {"kind": "adamw", "lr": 0.01, "groups": groups}
    job = tiny_job(tiny_config({"optimizer": optimizer, "train": {"precision": precision}}), world, stage=stage)
    run_steps(job, first=0, last=2)
    job.engine.save(directory)
    return masters(job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("groups", [[], FROZEN], ids=["all", "some-frozen"])
def test_consolidated_weights_are_what_the_optimizer_trains(
    tmp_path: Path, rank_pool: Callable[[int], RankPool], stage: int, precision: str, groups: list[Any]
) -> None:
    expected = rank_pool(2).run(train_and_save, tmp_path, stage, precision, groups)[0]
    found = consolidated_state_dict(tmp_path)
    assert difference({name: found[name] for name in expected}, expected) is None
    assert torch.equal(found["head.bins.0.weight"], found["embedding.bins.0.weight"])


def test_what_deepspeed_refuses_is_a_value_error(rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(AssertionError, match="ValueError: deepspeed: DeepSpeed refuses this block: unsupported mix"):
        rank_pool(1).run(start_with_fp32_accumulation, 0)


def test_checkpoints_that_could_not_be_evaluated_are_refused(rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(AssertionError, match=r"grad_accum_dtype: with bf16 at ZeRO stage 1"):
        rank_pool(1).run(start_with_fp32_accumulation, 1)


def start_with_fp32_accumulation(world: World, stage: int) -> None:
    config = tiny_config({"train": {"precision": "bf16"}})
    tiny_job(config, world, stage=stage, block={"data_types": {"grad_accum_dtype": "fp32"}})
