"""Norms of gradients and their checks: of model and compression at every ZeRO stage, and of all at once."""

import math
from functools import partial

import pytest
import torch

from dist_mem.config import change_config
from dist_mem.engine.fused_checks import has_not_finite, squared_norm
from dist_mem.runtime.distributed import World
from tests.support.contract_cases import CASES, SEG_LEN
from tests.support.ranks import Pools
from tests.support.tiny import full_parameters, run_steps, tiny_config, tiny_job, update_of_rank

CLIP = 0.05


def last_update(
    world: World, case: str, stage: int, max_grad_norm: float | None
) -> tuple[float, list[float], list[float]]:
    """Return the global norm, the logged norms of model and compression, and those of the steps of SGD with lr 1."""
    train = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "max_grad_norm": max_grad_norm}
    config = tiny_config({"train": train, "optimizer": {"lr": 1.0}})
    config = change_config(config, {"memory": CASES[case]})
    job = tiny_job(config, world, stage=stage)
    run_steps(job, first=0, last=5)  # the memory is full then
    before = full_parameters(job)
    run_steps(job, first=5, last=6)
    after = full_parameters(job)
    squares = [0.0, 0.0]
    for name, value in after.items():
        squares[name in job.engine.module.auxiliary_parameter_names()] += float((before[name] - value).square().sum())
    return job.engine.gradient_norm(), list(job.engine.gradient_norms() or ()), [square**0.5 for square in squares]


@pytest.mark.parametrize("max_grad_norm", [None, CLIP])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_logged_norms_equal_those_of_the_steps(rank_pool: Pools, stage: int, max_grad_norm: float | None) -> None:
    for case in ("compressive", "infinite over compressive"):
        for total, norms, steps in rank_pool(2).run(last_update, case, stage, max_grad_norm):
            assert min(norms) > 1e-4
            assert sum(norm**2 for norm in norms) == pytest.approx(total**2, rel=1e-4)
            shrunk = 1.0 if max_grad_norm is None else CLIP / total
            assert shrunk <= 1.0
            assert steps == pytest.approx([norm * shrunk for norm in norms], rel=1e-3)


def norms_without_a_step(world: World, stage: int) -> list[object]:
    """Return what is logged after an update that is discarded, and after one with a gradient that is not finite."""
    config = tiny_config({"train": {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN}})
    job = tiny_job(change_config(config, {"memory": CASES["compressive"]}), world, stage=stage)
    found: list[object] = []
    for factor, end in ((1.0, job.engine.discard), (math.inf, partial(job.engine.step, 1.0))):
        batch = update_of_rank(job.config, world, step=0).batches[0]
        output = job.engine(batch.tokens, batch.targets, batch.valid_len, state=job.states[0])
        job.engine.backward(factor * output.nll.sum())
        end()
        found.append(job.engine.gradient_norms())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_norms_of_an_update_without_a_step_are_absent(rank_pool: Pools, stage: int) -> None:
    assert rank_pool(2).run(norms_without_a_step, stage) == [[None, None]] * 2


def norms_of_transformer_xl(world: World) -> object:
    return tiny_job(tiny_config(), world, stage=2).engine.gradient_norms()


def test_there_are_no_separate_norms_without_an_auxiliary_loss(rank_pool: Pools) -> None:
    assert rank_pool(1).run(norms_of_transformer_xl) == [None]


SIZES = (1, 7, 0, 1000)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    from deepspeed.runtime.utils import has_inf_or_nan

    for bad in (0.0, math.inf, -math.inf, math.nan):
        for place in (0, 1, 3):
            given = gradients(dtype)
            given[place][-1] = bad
            assert bool(has_not_finite(given)) is any(map(bool, map(has_inf_or_nan, given))) is (bad != 0.0)
    assert not has_not_finite([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_has_the_bits_of_norms_of_float64(dtype: torch.dtype) -> None:
    given = [one for one in gradients(dtype) if one.numel()]
    expected = torch.stack([torch.linalg.vector_norm(one.double()) for one in given]).pow(2).sum().float()
    assert torch.equal(squared_norm(gradients(dtype)), expected)
    assert squared_norm([]) == 0.0
