"""Our defaults for DeepSpeed's keys, what they are worth in exactness, and keys that are refused."""

from typing import Any

import pytest
from torch import Tensor

from dist_mem.engine.defaults import deepspeed_config
from dist_mem.runtime.distributed import World
from tests.support.messages import said
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools
from tests.support.tiny import run_steps, tiny_config, tiny_job


def made(block: dict[str, Any], *, precision: str = "bf16", world_size: int = 8, **sizes: Any) -> dict[str, Any]:
    train = tiny_config({"train": {"precision": precision}}).train
    sizes = {"accumulation": 4, "num_parameters": 300_000_000, "on_gpu": True, **sizes}
    return deepspeed_config(block, train, world_size=world_size, **sizes)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


def test_what_the_user_writes_is_kept_and_not_changed() -> None:
    written = {**zero(overlap_comm=False, reduce_bucket_size=7), "data_types": {"grad_accum_dtype": "bf16"}}
    config = made(written)
    assert {name: config[name] for name in written} == written
    block = {**zero(), "data_types": {"buffer_dtype": "fp32"}}
    assert made(block)["data_types"] == {"buffer_dtype": "fp32", "grad_accum_dtype": "fp32"}
    assert block == {**zero(), "data_types": {"buffer_dtype": "fp32"}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_added_up_in_fp32_where_several_are_and_deepspeed_can(stage: int) -> None:
    block = {"zero_optimization": {"stage": stage}}
    assert ("data_types" in made(block)) == (stage >= 2)
    assert "data_types" not in made(block, accumulation=1)
    assert "data_types" not in made(block, precision="fp32")
    assert "data_types" not in made(zero(offload_optimizer={"device": "cpu"}))


def test_reductions_overlap_the_backward_in_buckets_on_gpus_only() -> None:
    def reduction(**sizes: Any) -> tuple[Any, Any]:
        found = made(zero(), **sizes)["zero_optimization"]
        return found.get("overlap_comm"), found["reduce_bucket_size"]

    assert reduction() == (True, 40_000_000)
    assert reduction(world_size=512) == (True, 300_000_000), "all parameters, as 512 million are more"
    assert reduction(world_size=128) == (True, 128_000_000)
    assert reduction(num_parameters=1_000) == (True, 1_000)
    assert reduction(on_gpu=False) == (None, 300_000_000)
    assert "reduce_bucket_size" not in made({"zero_optimization": {"stage": 0}})["zero_optimization"]


def error_of_sum(world: World, stage: int, block: dict[str, Any]) -> float:
    """The largest error of a bf16 gradient of eight micro-batches, relative to its largest element.

    Compared with the float64 sum of the gradients of the micro-batches.
    """
    train = {"micro_batch_size": 1, "precision": "bf16"}
    lr = 1e4  # so large that a weight's own rounding does not count
    config = tiny_config({"train": train, "optimizer": {"kind": "sgd", "lr": lr}})
    job = tiny_job(config, world, stage=stage, block=block)
    exact: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor) -> None:
        exact[name] = exact.get(name, 0.0) + gradient.double()

    for name, parameter in job.engine.module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: add(name, gradient))
    before = masters(job.engine)
    run_steps(job, first=0, last=1)
    errors = [
        float(((before[name] - after) / lr - exact[name].view(-1)).abs().max() / exact[name].abs().max())
        for name, after in masters(job.engine).items()
    ]
    return max(errors)


def masters(engine: Any) -> dict[str, Tensor]:
    return {found.name: found.parts["master"].double().clone() for found in engine.owned_slices()}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_sum_of_micro_batches_is_exact_to_fp32(rank_pool: Pools, stage: int) -> None:
    in_bf16 = {"data_types": {"grad_accum_dtype": "bf16"}}
    ((ours,), (theirs,)) = (rank_pool(1).run(error_of_sum, stage, block) for block in ({}, in_bf16))
    assert ours < 1e-5
    assert theirs > 1e-3


def start_with_fp32_accumulation(world: World, stage: int) -> None:
    config = tiny_config({"train": {"precision": "bf16"}})
    tiny_job(config, world, stage=stage, block={"data_types": {"grad_accum_dtype": "fp32"}})


@pytest.mark.parametrize(("stage", "named"), [(0, "deepspeed"), (1, "grad_accum_dtype")])
def test_what_deepspeed_refuses_and_what_could_not_be_evaluated_are_value_errors(
    rank_pool: Pools, stage: int, named: str
) -> None:
    (text,) = rank_pool(1).run(error_of, start_with_fp32_accumulation, stage)
    said(text, "ValueError", named)
