"""One update is the same whatever the ZeRO stage, the accumulation and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_mem import memory
from dist_mem.data.batch import IGNORE
from dist_mem.memory.base import MemoryOutput
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.model import MemoryLM, reset_lanes
from dist_mem.runtime.distributed import World
from tests.support.ranks import RankPool
from tests.support.tiny import VOCAB, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)


class WithAuxiliaryLoss(TransformerXL):
    """A memory that adds a loss of its own, averaged over the real queries of each lane."""

    def forward(self, x: Tensor, state: Any, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        is_real = torch.arange(x.shape[1]) < valid_len[:, None]
        energy = (output.y.square().mean(-1) * is_real).sum(1) / valid_len.clamp(min=1)
        return output._replace(aux={"energy": 0.3 * energy})


def with_auxiliary_loss() -> Any:
    return mock.patch.object(memory, "memory_class", lambda *_: WithAuxiliaryLoss)


def one_update(world: World, stage: int, train: dict[str, Any]) -> tuple[dict[str, Tensor], float, float]:
    with with_auxiliary_loss():
        job = tiny_job(tiny_config({"train": train}), world, stage=stage)
    (outcome,) = run_steps(job, first=0, last=1)
    return full_parameters(job), outcome.totals.nll, outcome.totals.aux


def plain_update(train: dict[str, Any]) -> tuple[dict[str, Tensor], float, float]:
    """The same update by autograd alone: one loss over all lanes and segments, one SGD step."""
    config = tiny_config({"train": train})
    torch.manual_seed(config.train.seed)
    with with_auxiliary_loss():
        model = MemoryLM(config, VOCAB)
    fresh = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    state, nll, aux, scored = fresh, torch.zeros(()), torch.zeros(()), 0
    for batch in ragged_segments(config, step=0):
        output = model(
            batch.tokens, batch.targets, batch.valid_len, state=reset_lanes(state, fresh, batch.is_new_document)
        )
        state, nll, aux = output.state, nll + output.nll.sum(), aux + output.aux["energy"].sum()
        scored += int((batch.targets != IGNORE).sum())
    loss = nll / scored + aux / (config.train.global_batch_size * config.train.segments_per_update)
    loss.backward()
    updated = {
        name: (value - config.optimizer.lr * value.grad).detach()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return updated, float(nll.detach()), float(aux.detach())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_sgd_step_equals_plain_autograd(
    rank_pool: Callable[[int], RankPool], stage: int, accumulation: int, world_size: int
) -> None:
    train = {"micro_batch_size": 8 // world_size // accumulation}
    compare_with_autograd(rank_pool(world_size), stage, train)


@pytest.mark.parametrize("stage", STAGES)
def test_successive_segments_of_one_update_equal_plain_autograd(
    rank_pool: Callable[[int], RankPool], stage: int
) -> None:
    compare_with_autograd(rank_pool(2), stage, {"micro_batch_size": 2, "segments_per_update": 2})


def compare_with_autograd(pool: RankPool, stage: int, train: dict[str, Any]) -> None:
    expected, nll, aux = plain_update(train)
    for parameters, rank_nll, rank_aux in pool.run(one_update, stage, train):
        assert rank_nll == pytest.approx(nll, rel=1e-5)
        assert rank_aux == pytest.approx(aux, rel=1e-5)
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def ten_losses(world: World, stage: int) -> list[float]:
    adam = {"optimizer": {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.1}}
    config = tiny_config({"train": {"micro_batch_size": 2, "max_grad_norm": 0.5}}, adam)
    return [
        outcome.totals.nll / outcome.totals.num_scored
        for outcome in run_steps(tiny_job(config, world, stage=stage), first=0, last=10)
    ]


@pytest.fixture(scope="module")
def one_rank_losses(rank_pool: Callable[[int], RankPool]) -> list[float]:
    return rank_pool(1).run(ten_losses, 0)[0]


@pytest.mark.parametrize(
    ("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 0), (4, 3)]
)
def test_ten_losses_agree_across_stages_and_ranks(
    rank_pool: Callable[[int], RankPool], one_rank_losses: list[float], world_size: int, stage: int
) -> None:
    """Three ranks do not divide eight lanes: the fourth lane group is idle."""
    assert len(set(one_rank_losses)) == 10
    for losses in rank_pool(world_size).run(ten_losses, stage):
        assert losses == pytest.approx(one_rank_losses, abs=1e-5)
