"""Gradients flow through the segments of a window (`train.bptt_segments`), at every ZeRO stage as in plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import Config
from dist_mem.contract.subject import require_same
from dist_mem.data.batch import IGNORE, in_windows
from dist_mem.memory.base import detached
from dist_mem.model import LMState, MemoryLM, Start, reset_lanes
from dist_mem.runtime.distributed import World
from tests.support.contract_cases import (
    CASES,
    LANES,
    SEG_LEN,
    carrying,
    case_params,
    fresh_state,
    full_lanes,
    random_segments,
    small_model,
)
from tests.support.ranks import RankPool
from tests.support.tiny import VOCAB, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

TRAIN = {"micro_batch_size": 2, "segments_per_update": 4}  # two ranks: 2 lane groups of 2 lanes each


def config_of(case: str, train: dict[str, Any]) -> Config:
    config: Config = tiny_config({"train": TRAIN | train})
    config.memory = CASES[case]
    return config


def one_update(world: World, case: str, stage: int, train: dict[str, Any]) -> dict[str, Tensor]:
    job = tiny_job(config_of(case, train), world, stage=stage)
    run_steps(job, first=0, last=1)
    return full_parameters(job)


def plain_update(case: str, bptt_segments: int) -> dict[str, Tensor]:
    """The same update by autograd alone: one loss over all lanes and segments, cut between windows."""
    config = config_of(case, {})
    torch.manual_seed(config.train.seed)
    model = MemoryLM(config, VOCAB)
    fresh = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    segments = ragged_segments(config, step=0)
    assert any(batch.is_new_document.any() for batch in segments[1:])  # inside of a window too
    num_scored = sum(int((batch.targets != IGNORE).sum()) for batch in segments)
    state, loss = fresh, torch.zeros(())
    for number, batch in enumerate(segments):
        state = detached(state) if number % bptt_segments == 0 else state
        state = reset_lanes(state, fresh, batch.is_new_document)
        output = model(batch.tokens, batch.targets, batch.valid_len, state=state)
        auxiliary = sum(part.sum() for part in output.aux.values()) / (config.train.global_batch_size * len(segments))
        state, loss = output.state, loss + output.nll.sum() / num_scored + auxiliary
    loss.backward()
    return {
        name: (value if value.grad is None else value - config.optimizer.lr * value.grad).detach()
        for name, value in model.named_parameters()
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "stage"), list(product(carrying(), [0, 1, 2, 3])))
def test_an_update_equals_plain_autograd_over_its_windows(
    rank_pool: Callable[[int], RankPool], case: str, stage: int
) -> None:
    found = {}
    for bptt_segments, checkpointing in ((1, "none"), (2, "none"), (4, "blocks")):
        expected = plain_update(case, bptt_segments)
        train = {"bptt_segments": bptt_segments, "activation_checkpointing": checkpointing}
        for parameters in rank_pool(2).run(one_update, case, stage, train):
            assert parameters.keys() == expected.keys()
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        found[bptt_segments] = expected
    for fewer, more in ((1, 2), (2, 4)):
        assert any(not torch.allclose(found[fewer][name], found[more][name], rtol=1e-4) for name in found[more])


@pytest.mark.parametrize("case", case_params())
def test_a_window_is_its_segments_one_after_the_other(case: str) -> None:
    """Losses and states bit for bit; gradients in float64, where only a memory that carries one has another."""
    model = small_model(case).double()
    segments = random_segments()
    is_new = [torch.arange(LANES) == number for number in range(len(segments))]
    fresh = fresh_state(model, torch.float64)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    def alone(*, cut: bool) -> tuple[list[Tensor], LMState, dict[str, Tensor]]:
        state, losses, total = fresh, [], torch.zeros((), dtype=torch.float64)
        for (tokens, targets), new in zip(segments, is_new, strict=True):
            state = reset_lanes(detached(state) if cut else state, fresh, new)
            output = model(tokens, targets, full_lanes(), state=state)
            state = output.state
            losses.append(output.nll)
            total = total + output.nll.sum() + sum(part.sum() for part in output.aux.values())
        return losses, state, gradients(total)

    tokens, targets = (torch.cat(parts, dim=1) for parts in zip(*segments, strict=True))
    lengths = torch.full((LANES, len(segments)), SEG_LEN)
    state = reset_lanes(fresh, fresh, is_new[0])
    window = model(tokens, targets, lengths, state=state, later=[Start(fresh, new) for new in is_new[1:]])
    learned = gradients(window.nll.sum() + sum(part.sum() for part in window.aux.values()))
    losses, last, attached = alone(cut=False)
    assert torch.equal(window.nll, torch.cat(losses, dim=1))
    require_same(window.state, last, "a window leaves another state")
    assert learned.keys() == attached.keys()
    for name, value in learned.items():
        torch.testing.assert_close(value, attached[name], rtol=1e-10, atol=1e-12, msg=name)
    _, _, cut = alone(cut=True)
    changed = [name for name, value in learned.items() if (value - cut[name]).abs().max() > 1e-9]
    assert bool(changed) == model.memories()[0].carries_gradient


def test_windows_join_segments_of_one_lane_group() -> None:
    config = tiny_config({"train": {"segments_per_update": 4}})
    segments = ragged_segments(config, step=0)
    batches = [
        part._make(None if value is None else value[rows] for value in part)
        for part in segments
        for rows in (slice(0, 4), slice(4, 8))
    ]
    first, second, third, fourth = in_windows(batches, 2, 2)
    assert torch.equal(first.tokens, torch.cat([segments[0].tokens[:4], segments[1].tokens[:4]], dim=1))
    assert torch.equal(second.valid_len[:, 1], segments[1].valid_len[4:])
    assert torch.equal(third.is_new_document[:, 0], segments[2].is_new_document[:4])
    assert torch.equal(fourth.targets[:, -1], segments[3].targets[4:, -1])
    assert all(one is other for one, other in zip(in_windows(batches, 2, 1), batches, strict=True))
