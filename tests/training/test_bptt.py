"""Gradients flow through the segments of a window (`train.bptt_segments`), at every ZeRO stage as in plain autograd."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.contract.subject import require_same
from dist_mem.memory.base import detach_state
from dist_mem.model import DocumentStarts, LMState, reset_lanes
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
from tests.support.plain_updates import assert_plain_update
from tests.support.ranks import Pools


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "stage"), list(product(carrying(), [0, 1, 2, 3])))
def test_an_update_equals_plain_autograd_over_its_windows(rank_pool: Pools, case: str, stage: int) -> None:
    """Two ranks have two lane groups of two lanes each."""
    found = {}
    for bptt_segments, checkpointing in ((1, "none"), (2, "none"), (4, "blocks")):
        train: dict[str, Any] = {"micro_batch_size": 2, "segments_per_update": 4, "bptt_segments": bptt_segments}
        train["activation_checkpointing"] = checkpointing
        found[bptt_segments] = assert_plain_update(rank_pool(2), stage, CASES[case], train)
    for fewer, more in ((1, 2), (2, 4)):
        assert any(not torch.allclose(found[fewer][name], found[more][name], rtol=1e-4) for name in found[more])


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["transformer_xl", "linear", "rmt"])
def test_memories_are_emptied_where_train_reset_says(rank_pool: Pools, case: str) -> None:
    train: dict[str, Any] = {"micro_batch_size": 2, "segments_per_update": 4, "bptt_segments": 2}
    found = {
        reset: assert_plain_update(rank_pool(2), 2, CASES[case], {**train, "reset": reset})
        for reset in ("never", "window", "segment")
    }
    for one, other in (("never", "window"), ("window", "segment")):
        assert any(not torch.allclose(found[one][name], found[other][name], rtol=1e-4) for name in found[other])


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
            state = reset_lanes(detach_state(state) if cut else state, fresh, new)
            output = model(tokens, targets, full_lanes(), state=state)
            state = output.state
            losses.append(output.nll)
            total = total + output.nll.sum() + sum(part.sum() for part in output.aux.values())
        return losses, state, gradients(total)

    tokens, targets = (torch.cat(parts, dim=1) for parts in zip(*segments, strict=True))
    lengths = torch.full((LANES, len(segments)), SEG_LEN)
    state = reset_lanes(fresh, fresh, is_new[0])
    window = model(tokens, targets, lengths, state=state, later=[DocumentStarts(fresh, new) for new in is_new[1:]])
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
