"""Gradients flow through the segments of a window (`train.bptt_segments`), at every ZeRO stage as in plain autograd."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import change_config
from dist_mem.contract.subject import require_same
from dist_mem.engine import window
from dist_mem.engine.window import PlainAutograd
from dist_mem.memory.base import detach_state
from dist_mem.model import DocumentStarts, LMState, MemoryLM, reset_lanes
from dist_mem.nn.layers import Dropout
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
    subject,
    takes_short_first,
)
from tests.support.plain_updates import assert_plain_update, config_of
from tests.support.ranks import Pools
from tests.support.tiny import full_parameters, run_steps, tiny_job


@pytest.mark.parametrize(("case", "stage"), list(product(carrying(), [0, 1, 2, 3])))
def test_an_update_equals_plain_autograd_over_its_windows(rank_pool: Pools, case: str, stage: int) -> None:
    """Two ranks have two lane groups of two lanes each."""
    found = {}
    for bptt_segments, checkpointing in ((1, "none"), (2, "none"), (4, "segments_and_blocks")):
        train: dict[str, Any] = {"micro_batch_size": 2, "segments_per_update": 4, "bptt_segments": bptt_segments}
        train["activation_checkpointing"] = checkpointing
        found[bptt_segments] = assert_plain_update(rank_pool(2), stage, CASES[case], train)
    for fewer, more in ((1, 2), (2, 4)):
        assert any(not torch.allclose(found[fewer][name], found[more][name], rtol=1e-4) for name in found[more])


@pytest.mark.parametrize("case", ["transformer_xl", "linear", "rmt"])
def test_memories_are_emptied_where_train_reset_says(rank_pool: Pools, case: str) -> None:
    train: dict[str, Any] = {"micro_batch_size": 2, "segments_per_update": 4, "bptt_segments": 2}
    found = {
        reset: assert_plain_update(rank_pool(2), 2, CASES[case], {**train, "reset": reset})
        for reset in ("never", "window", "segment")
    }
    for one, other in (("never", "window"), ("window", "segment")):
        assert any(not torch.allclose(found[one][name], found[other][name], rtol=1e-4) for name in found[other])


def trained_with(world: World, resets: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The parameters after one update with each of these keys of `train`."""
    train: dict[str, Any] = {"micro_batch_size": 2, "segments_per_update": 2}
    config = config_of(CASES["linear"], train)
    job = tiny_job(config, world, stage=2)
    for step, keys in enumerate(resets):
        changed = change_config(config, {f"train.{key}": value for key, value in keys.items()})
        job.context = replace(job.context, config=changed)
        run_steps(job, first=step, last=step + 1)
    return full_parameters(job)


def test_memories_are_carried_after_train_reset_steps(rank_pool: Pools) -> None:
    ends: dict[str, Any] = {"reset": "segment", "reset_steps": 1}
    segment: dict[str, Any] = {"reset": "segment"}
    runs: list[list[dict[str, Any]]] = [[segment, {"reset": "never"}], [ends, ends], [{}, {}], [segment, segment]]
    by_hand, by_key, never, always = (rank_pool(2).run(trained_with, resets)[0] for resets in runs)
    assert all(torch.equal(value, by_hand[name]) for name, value in by_key.items())
    for other in (never, always):
        assert any(not torch.equal(value, by_hand[name]) for name, value in other.items())


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


class _Scaled(PlainAutograd):
    """Autograd with the loss scale of fp16."""

    loss_scale = 2.0**10

    def backward(self, loss: Tensor) -> None:
        (self.loss_scale * loss).backward()


def dropping_model(case: str, dtype: torch.dtype, *, cut: str, checkpointing: str = "none") -> MemoryLM:
    """A model in training that drops half of its values."""
    model = subject(case, cut=cut).model(checkpointing=checkpointing).to(dtype).train()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.keep = 2**15
    return model


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; of zeros infinite unless it is 0."""
    most, far = (float(each.abs().max()) for each in (expected, found - expected))
    return far / most if most else math.inf if far else 0.0


HYBRID = "per block, with gradient"
CASES_BY_DAY = [*case_params(sorted(CASES.keys() - {HYBRID})), pytest.param(HYBRID, marks=pytest.mark.core)]
# Largest difference of gradients, each relative to its largest value; one unit in the last place is 2e-16 and 1e-7.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("case", CASES_BY_DAY)
@pytest.mark.parametrize(("cut", "inside"), [("start", "none"), ("end", "blocks")])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_window_recomputed_by_segments_is_the_whole_window(
    case: str, cut: str, inside: str, dtype: torch.dtype
) -> None:
    """Losses, states and random numbers bit for bit, gradients to rounding: documents begin and lanes are idle in it.

    `inside`: recomputed of the segment that is computed again.
    """
    cut = cut if takes_short_first(case) else "start"
    plain, again = (dropping_model(case, dtype, cut=cut, checkpointing=value) for value in ("none", inside))
    tokens, targets = (torch.cat(parts, dim=1) for parts in zip(*random_segments(), strict=True))
    lengths = torch.full((LANES, tokens.shape[1] // SEG_LEN), SEG_LEN)
    lengths[1, 2], lengths[2, -1] = 0, SEG_LEN - 1 if cut == "start" else 0
    found = []
    for run, recomputes in ((PlainAutograd(plain), False), (PlainAutograd(again), True), (_Scaled(again), True)):
        model = again if recomputes else plain
        model.zero_grad()
        torch.manual_seed(1)
        starts = [DocumentStarts(fresh_state(model, dtype), torch.arange(LANES) == number) for number in (0, 2)]
        text = window.Text(tokens, targets, lengths, [starts[0], None, starts[1], None])
        read = window.read(run, text, detach_state(fresh_state(model, dtype)), recomputes=recomputes)
        random = torch.get_rng_state()
        nll = read.begin_backward(lambda nll, aux: nll / 7 + aux / 3)
        read.end_backward()
        assert torch.equal(torch.get_rng_state(), random)
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found.append((read, nll, random, {name: value.clone() / run.loss_scale for name, value in gradients.items()}))
    (whole, losses, random, expected), *others = found
    assert any(value.abs().max() > 0 for value in expected.values())
    for read, nll, drawn, gradients in others:
        assert torch.equal(nll, losses) and torch.equal(read.aux, whole.aux) and torch.equal(drawn, random)
        require_same(read.state, whole.state, "a window leaves another state")
        assert read.logs.keys() == whole.logs.keys()
        assert gradients.keys() == expected.keys()
        far = [relative_difference(value, expected[name]) for name, value in gradients.items()]
        print(f"{case}, {dtype}, {inside} inside: {max(far):.1e}")  # docs/howto/bptt.md
        assert max(far) <= TOLERANCES[dtype]
