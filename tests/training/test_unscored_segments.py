"""Micro-batches without targets (the sorting task has many) cost no backward, and the update is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.engine.engine import Engine
from dist_mem.model import MemoryLM, reset_lanes
from dist_mem.runtime.distributed import World
from tests.support import tiny
from tests.support.ranks import RankPool
from tests.support.tiny import VOCAB, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

pytestmark = pytest.mark.ranks

TRAIN = {"micro_batch_size": 2, "segments_per_update": 3}  # two ranks: 2 lane groups of 2 lanes each
COMPRESSIVE = {"kind": "compressive", "mem_len": 8, "cmem_len": 8, "compression_rate": 2, "loss_weight": 0.5}


def sparse_segments(config: Any, *, step: int) -> list[Batch]:
    """Of three segments the first is scored nowhere, the second in the last two lanes alone, the third everywhere."""
    first, second, third = ragged_segments(config, step=step)
    nowhere = torch.full_like(first.targets, IGNORE)
    only_last = torch.where(
        torch.arange(config.train.global_batch_size)[:, None] < config.train.global_batch_size - 2,
        IGNORE,
        second.targets,
    )
    return [first._replace(targets=nowhere), second._replace(targets=only_last), third]


def one_update(world: World, stage: int, memory: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Parameters after one update, and how many backwards it took on this rank."""
    job = tiny_job(tiny_config({"train": TRAIN, "memory": memory}), world, stage=stage)
    with (
        mock.patch.object(tiny, "ragged_segments", sparse_segments),
        mock.patch.object(Engine, "backward", autospec=True, side_effect=Engine.backward) as backward,
    ):
        run_steps(job, first=0, last=1)
    return full_parameters(job), backward.call_count


def plain_update(memory: dict[str, Any]) -> dict[str, Tensor]:
    """The same update by autograd alone, with a gradient in every segment."""
    config = tiny_config({"train": TRAIN, "memory": memory})
    torch.manual_seed(config.train.seed)
    model = MemoryLM(config, VOCAB)
    fresh = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    segments = sparse_segments(config, step=0)
    num_scored = sum(int((batch.targets != IGNORE).sum()) for batch in segments)
    state, loss = fresh, torch.zeros(())
    for batch in segments:
        state = reset_lanes(state, fresh, batch.is_new_document)
        output = model(batch.tokens, batch.targets, batch.valid_len, state=state)
        state = output.state
        aux = sum((part.sum() for part in output.aux.values()), torch.zeros(()))
        loss = (
            loss
            + output.nll.sum() / num_scored
            + aux / (config.train.global_batch_size * config.train.segments_per_update)
        )
    loss.backward()
    return {
        name: (value if value.grad is None else value - config.optimizer.lr * value.grad).detach()
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("memory", "backwards"),
    [
        ({"kind": "transformer_xl", "mem_len": 12}, 3),  # of 6: the second group of segment two, and segment three
        (COMPRESSIVE, 6),  # the compression learns from all segments
    ],
    ids=["transformer_xl", "compressive"],
)
def test_segments_without_targets_cost_no_backward_and_change_nothing(
    rank_pool: Callable[[int], RankPool], stage: int, memory: dict[str, Any], backwards: int
) -> None:
    """The targets of the second segment are on one rank only; the other one goes with it."""
    expected = plain_update(memory)
    for parameters, count in rank_pool(2).run(one_update, stage, memory):
        assert count == backwards
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
