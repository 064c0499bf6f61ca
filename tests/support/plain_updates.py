"""An update of an engine beside that of plain autograd."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import Config, change_config
from dist_mem.data.batch import IGNORE, Batch
from dist_mem.engine.engine import Engine
from dist_mem.memory.base import detach_state
from dist_mem.model import MemoryLM, reset_lanes
from dist_mem.runtime.distributed import World
from tests.support import tiny
from tests.support.ranks import RankPool
from tests.support.tiny import VOCAB, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

Segments = Callable[..., list[Batch]]  # of a configuration and a step


class Updated(NamedTuple):
    parameters: dict[str, Tensor]
    nll: float
    aux: float
    backwards: int = 0  # of one rank


def config_of(memory: dict[str, Any], train: dict[str, Any]) -> Config:
    config: Config = tiny_config({"train": train})
    return change_config(config, {"memory": memory})


def one_update(world: World, memory: dict[str, Any], stage: int, train: dict[str, Any], segments: Segments) -> Updated:
    job = tiny_job(config_of(memory, train), world, stage=stage)
    with (
        mock.patch.object(tiny, "ragged_segments", segments),
        mock.patch.object(Engine, "backward", autospec=True, side_effect=Engine.backward) as backward,
    ):
        (outcome,) = run_steps(job, first=0, last=1)
    return Updated(full_parameters(job), outcome.totals.nll, outcome.totals.aux, backward.call_count)


def plain_update(memory: dict[str, Any], train: dict[str, Any], segments: Segments) -> Updated:
    """The same by autograd alone: one loss over all lanes and segments, cut between windows, and one SGD step."""
    config = config_of(memory, train)
    torch.manual_seed(config.train.seed)
    model = MemoryLM(model_spec(config, VOCAB))
    state = fresh = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    nll, aux, num_scored = torch.zeros(()), torch.zeros(()), 0
    batches = segments(config, step=0)
    for number, batch in enumerate(batches):
        state = detach_state(state) if number % config.train.bptt_segments == 0 else state
        is_reset = {"never": False, "window": number % config.train.bptt_segments == 0, "segment": True}
        state = reset_lanes(state, fresh, batch.is_new_document | is_reset[config.train.reset])
        output = model(batch.tokens, batch.targets, batch.valid_len, state=state)
        state, nll = output.state, nll + output.nll.sum()
        aux = aux + sum(part.sum() for part in output.aux.values())
        num_scored += int((batch.targets != IGNORE).sum())
    loss = nll / num_scored + aux / (config.train.global_batch_size * len(batches))
    loss.backward()
    updated = {
        name: (value if value.grad is None else value - config.optimizer.lr * value.grad).detach()
        for name, value in model.named_parameters()
    }
    return Updated(updated, float(nll.detach()), float(aux.detach()))


def assert_plain_update(
    pool: RankPool,
    stage: int,
    memory: dict[str, Any],
    train: dict[str, Any],
    *,
    segments: Segments = ragged_segments,
    backwards: int | None = None,
) -> dict[str, Tensor]:
    """Compare all ranks with plain autograd; return the parameters that it gives."""
    expected = plain_update(memory, train, segments)
    for found in pool.run(one_update, memory, stage, train, segments):
        assert found.nll == pytest.approx(expected.nll, rel=1e-5)
        assert found.aux == pytest.approx(expected.aux, rel=1e-5)
        assert backwards is None or found.backwards == backwards
        assert found.parameters.keys() == expected.parameters.keys()
        for name, value in found.parameters.items():
            torch.testing.assert_close(value, expected.parameters[name], rtol=1e-5, atol=2e-6, msg=name)
    return expected.parameters
