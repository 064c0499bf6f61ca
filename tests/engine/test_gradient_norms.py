"""Separate gradient norms of model and compression, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dist_mem.runtime.distributed import World
from tests.support.contract_cases import CASES, SEG_LEN
from tests.support.ranks import RankPool
from tests.support.tiny import full_parameters, run_steps, tiny_config, tiny_job

pytestmark = pytest.mark.ranks

CLIP = 0.05


def last_update(
    world: World, case: str, stage: int, max_grad_norm: float | None
) -> tuple[float, list[float], list[float]]:
    """Return the global norm, the logged norms of model and compression, and those of the steps of SGD with lr 1."""
    train = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "max_grad_norm": max_grad_norm}
    config = tiny_config({"train": train, "optimizer": {"lr": 1.0}})
    config.memory = CASES[case]
    job = tiny_job(config, world, stage=stage)
    run_steps(job, first=0, last=5)  # the memory is full then
    before = full_parameters(job)
    run_steps(job, first=5, last=6)
    after = full_parameters(job)
    squares = [0.0, 0.0]
    for name, value in after.items():
        squares[name in job.engine.module.auxiliary_parameter_names()] += float((before[name] - value).square().sum())
    return job.engine.gradient_norm(), list(job.engine.gradient_norms()), [square**0.5 for square in squares]


@pytest.mark.parametrize("max_grad_norm", [None, CLIP])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_logged_norms_equal_those_of_the_steps(
    rank_pool: Callable[[int], RankPool], stage: int, max_grad_norm: float | None
) -> None:
    for case in ("compressive", "infinite over compressive"):
        for total, norms, steps in rank_pool(2).run(last_update, case, stage, max_grad_norm):
            assert min(norms) > 1e-4
            assert sum(norm**2 for norm in norms) == pytest.approx(total**2, rel=1e-4)
            shrunk = 1.0 if max_grad_norm is None else CLIP / total
            assert shrunk <= 1.0
            assert steps == pytest.approx([norm * shrunk for norm in norms], rel=1e-3)


def norms_of_transformer_xl(world: World) -> object:
    return tiny_job(tiny_config(), world, stage=2).engine.gradient_norms()


def test_there_are_no_separate_norms_without_an_auxiliary_loss(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(1).run(norms_of_transformer_xl) == [None]
