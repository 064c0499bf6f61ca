"""LaMemo: its identities with Transformer-XL, the look-ahead against explicit loops, what it costs and what it keeps.

The reference vectors are in test_lamemo_parity.py, the memory contract in test_memory_contract.py.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dist_mem.block import model_spec
from dist_mem.config import Config, ModelConfig, TrainConfig
from dist_mem.memory.base import named_tensors
from dist_mem.memory.lamemo import LaMemoState
from dist_mem.memory.parts.look_ahead import LookAheadAttention, Past, visible_ahead
from dist_mem.model import LMState, MemoryLM
from dist_mem.nn.layers import newest_rows, sinusoid_table, visible_keys
from tests.support.messages import refused

VOCAB, WIDTH, LANES, SEG_LEN = 13, 12, 3, 4
every_norm = pytest.mark.parametrize("norm", ["pre", "post"])


def build(memory: dict[str, Any], *, num_layers: int = 3, seg_len: int = SEG_LEN, **model: Any) -> MemoryLM:
    """A small model with weights large enough that attention is far from uniform, float64."""
    sizes = {"num_layers": num_layers, "d_model": WIDTH, "num_heads": 2, "d_head": 5, "d_inner": 16, "dropout": 0.0}
    config = Config(
        model=ModelConfig(**{**sizes, "init_std": 0.4, **model}), memory=memory, train=TrainConfig(seg_len=seg_len)
    )
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, VOCAB)).double()


def segments(count: int = 5, seg_len: int = SEG_LEN) -> Tensor:
    """Tokens (count, LANES, seg_len)."""
    return torch.randint(VOCAB, (count, LANES, seg_len), generator=torch.Generator().manual_seed(1))


def fresh(model: MemoryLM, dtype: torch.dtype = torch.float64) -> LMState:
    return model.init_state(torch.arange(LANES), "cpu", dtype)


def losses(model: MemoryLM, read: Tensor, state: LMState, *, valid_len: int | None = None) -> tuple[Tensor, LMState]:
    """One segment, tokens as their own targets."""
    lengths = torch.full((len(read),), read.shape[1] if valid_len is None else valid_len)
    output = model(read, read, lengths, state=state)
    return output.nll, output.state


def warm(model: MemoryLM, dtype: torch.dtype = torch.float64) -> LMState:
    state = fresh(model, dtype)
    with torch.no_grad():
        for read in segments():
            _, state = losses(model, read, state)
    return state


def keeping_the_past(state: LMState) -> LMState:
    """s so large that alpha is 1."""
    blocks = [
        block if block.past == () else LaMemoState(block.past._replace(log_sum=block.past.log_sum + 1e4), block.length)
        for block in state.blocks
    ]
    return LMState(tuple(blocks), state.stem)


@every_norm
@pytest.mark.parametrize("mem_len", [SEG_LEN - 1, SEG_LEN, 2 * SEG_LEN, 2 * SEG_LEN + 1])
@pytest.mark.parametrize("how", ["alpha is 1", "no look-ahead", "a single block"])
def test_without_look_ahead_it_is_transformer_xl(norm: str, mem_len: int, how: str) -> None:
    """Alpha 1 by a large s, the switch, or one block, which has nothing to refresh: the losses are the same."""
    num_layers = 1 if how == "a single block" else 3
    lamemo = build(
        {"kind": "lamemo", "mem_len": mem_len, "look_ahead": how != "no look-ahead"}, norm=norm, num_layers=num_layers
    )
    plain = build({"kind": "transformer_xl", "mem_len": mem_len}, norm=norm, num_layers=num_layers)
    weights = {name: value for name, value in lamemo.state_dict().items() if not name.endswith("ahead_bias")}
    plain.load_state_dict(weights)
    assert (len(weights) < len(lamemo.state_dict())) == (how == "alpha is 1"), "no other has a use for a second v"
    state, plain_state = fresh(lamemo), fresh(plain)
    for read in segments():
        ours, state = losses(lamemo, read, state)
        expected, plain_state = losses(plain, read, plain_state)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
        if how == "alpha is 1":
            state = keeping_the_past(state)
    # The memory is a constant there; here it is computed again, so only the topmost weights have equal gradients.
    lamemo.zero_grad()
    ours.sum().backward()
    expected.sum().backward()
    for name, parameter in plain.head.named_parameters():
        torch.testing.assert_close(lamemo.head.get_parameter(name).grad, parameter.grad, rtol=0, atol=1e-8)


class Refresh:
    """A look-ahead attention with random weights, memory and past, and its formulas written as loops."""

    num_heads, d_head, num_lanes = 2, 3, 4

    def __init__(self, mem_len: int, seg_len: int, **options: Any) -> None:
        self.mem_len, self.seg_len = mem_len, seg_len
        self.options = {"clamp_len": None, "disentangled": True, "interpolation": True, **options}
        generator = torch.Generator().manual_seed(mem_len + 10 * seg_len)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        d_model = self.num_heads * self.d_head
        self.attention = LookAheadAttention(
            mem_len=mem_len, window=min(mem_len, seg_len), look_ahead=True, d_model=d_model, num_heads=self.num_heads,
            d_head=self.d_head, dropout=0.0, attention_dropout=0.0, **self.options,
        ).double()  # fmt: skip
        with torch.no_grad():
            for parameter in self.attention.parameters():
                parameter.copy_(draw(*parameter.shape))
            self.attention.output.weight.copy_(torch.eye(d_model))  # so that y is the context itself
        self.x = draw(self.num_lanes, mem_len + seg_len, d_model)
        shape = (self.num_lanes, mem_len, self.num_heads)
        self.past = Past(draw(*shape, self.d_head), 3 * draw(*shape))
        self.length = torch.tensor([0, 1, mem_len - 1, mem_len])
        self.window_len = torch.minimum(self.length, torch.tensor([seg_len, seg_len, seg_len, seg_len - 1]))

    def computed(self) -> tuple[Tensor, Past]:
        """Contexts of memory rows and segment, (B, M + T, H, K), and the new past."""
        valid = newest_rows(self.length, self.mem_len)
        visible = visible_keys(valid, self.seg_len, same_length=False)
        ahead = visible_ahead(valid, self.window_len, self.attention.window)
        attended, refreshed = self.attention(self.x, self.past, visible, ahead)
        return attended.y.unflatten(-1, (self.num_heads, self.d_head)), refreshed.past

    def looped(self, lane: int, row: int, head: int) -> tuple[Tensor, Tensor]:
        """New C (K,) and s of one memory row, from the formulas."""
        part = slice(head * self.d_head, (head + 1) * self.d_head)
        weights, attention = self.attention.key_value.weight.chunk(2), self.attention
        v = attention.ahead_bias if self.options["disentangled"] else attention.position_bias
        query = attention.query.weight[part] @ self.x[lane, row]
        old_context, old_sum = self.past.context[lane, row, head], self.past.log_sum[lane, row, head]
        found, values = [], []
        for key in range(self.mem_len - int(self.window_len[lane]) + 1, self.mem_len + 1):
            if key <= row or row < self.mem_len - int(self.length[lane]):
                continue
            distance = min(key - row, self.options["clamp_len"] or 10**9)
            signed = torch.tensor([distance if self.options["disentangled"] else -distance])
            position = attention.position.weight[part] @ sinusoid_table(signed, self.x.shape[-1], torch.float64)[0]
            content = (query + attention.content_bias[head]) @ (weights[0][part] @ self.x[lane, key])
            found.append((content + (query + v[head]) @ position) / math.sqrt(self.d_head))
            values.append(weights[1][part] @ self.x[lane, key])
        if not found:
            return old_context, old_sum
        scores = torch.stack(found)
        looking, ahead_sum = scores.softmax(0) @ torch.stack(values), scores.logsumexp(0)
        if not self.options["interpolation"]:
            return looking, ahead_sum
        largest = torch.maximum(old_sum, ahead_sum)
        old, ahead = (old_sum - largest).exp(), (ahead_sum - largest).exp()
        alpha = old / (old + ahead + self.options.get("epsilon", 0.0))
        return alpha * old_context + (1 - alpha) * looking, torch.logaddexp(old_sum, ahead_sum)


@pytest.mark.parametrize(("mem_len", "seg_len"), [(4, 4), (8, 4), (7, 3), (3, 4), (10, 3), (5, 1), (2, 4)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clamp_len": 2},
        {"disentangled": False},
        {"disentangled": False, "clamp_len": 3},
        {"interpolation": False},
        {"epsilon": 0.3},
        {"epsilon": 0.3, "interpolation": False},
    ],
    ids=str,
)
def test_refresh_equals_explicit_loops(mem_len: int, seg_len: int, options: dict[str, Any]) -> None:
    """With gradients: memories longer and shorter than a segment, lanes partly filled, windows less than a segment."""
    case = Refresh(mem_len, seg_len, **options)
    contexts, past = case.computed()
    assert torch.equal(past.context, contexts[:, -mem_len:])
    looped = torch.empty_like(contexts[:, :mem_len])
    for lane, row, head in np.ndindex(case.num_lanes, mem_len, case.num_heads):
        looped[lane, row, head], log_sum = case.looped(lane, row, head)
        if row >= seg_len:  # otherwise it has left the memory
            assert (past.log_sum[lane, row - seg_len, head] - log_sum).abs() <= 1e-9
    torch.testing.assert_close(contexts[:, :mem_len], looped, rtol=0, atol=1e-9)
    learned = {name: part for name, part in case.attention.named_parameters() if not name.startswith("output")}
    found, expected = (
        torch.autograd.grad(part.sin().sum(), list(learned.values()), allow_unused=True, materialize_grads=True)
        for part in (contexts[:, :mem_len], looped)
    )
    for name, one, other in zip(learned, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=name)


@torch.no_grad()
@pytest.mark.parametrize(("window", "same"), [("previous", True), ("segment", False)])
def test_only_the_published_window_depends_on_how_many_tokens_follow(window: str, same: bool) -> None:
    """Generation reads a segment again and again, one token longer each time."""
    model = build({"kind": "lamemo", "mem_len": 2 * SEG_LEN, "window": window})
    state, read = warm(model), segments(6)[-1]
    short, _ = losses(model, read, state, valid_len=2)
    whole, _ = losses(model, read, state)
    assert torch.equal(short[:, :2], whole[:, :2]) is same


@torch.no_grad()
def test_all_that_is_kept_is_read_and_the_last_block_keeps_nothing() -> None:
    """Noise in any part of the state changes the next losses: the published code carries a C and s no loss can see."""
    model = build({"kind": "lamemo", "mem_len": 2 * SEG_LEN})
    state, read = warm(model), segments(6)[-1]
    before, _ = losses(model, read, state)
    parts = named_tensors(state)
    assert set(parts) == {
        *(f"blocks.{index}.past.{name}" for index in range(2) for name in ("context", "log_sum")),
        *(f"blocks.{index}.length" for index in range(3)),
        "stem.hidden",
        "stem.length",
    }
    for name, part in parts.items():
        if part.is_floating_point():
            kept = part.clone()
            part += 0.1 * torch.randn_like(part)
            after, _ = losses(model, read, state)
            assert ((after - before).abs().amax(dim=1) > 1e-6).all(), name
            part.copy_(kept)


def test_cost_grows_linearly_with_the_memory() -> None:
    """Forward and backward: as many operations more from 3 to 4 segments of memory as from 2 to 3."""
    counts = []
    for factor in (2, 3, 4, 8):
        model = build({"kind": "lamemo", "mem_len": factor * SEG_LEN})
        state = fresh(model)
        with FlopCounterMode(display=False) as counter:
            nll, _ = losses(model, segments()[0], state)
            nll.sum().backward()
        counts.append(counter.get_total_flops())
    step = counts[1] - counts[0]
    assert counts[2] - counts[1] == step and counts[3] - counts[2] == 4 * step


def test_evicts_the_oldest_rows_as_they_reach_the_block() -> None:
    model = build({"kind": "lamemo", "mem_len": 2 * SEG_LEN})
    x = torch.randn(LANES, 3 * SEG_LEN, WIDTH, dtype=torch.float64, requires_grad=True)
    state, valid_len = fresh(model), torch.full((LANES,), SEG_LEN)
    for block, block_state in zip(model.blocks, state.blocks, strict=True):
        filling = block_state._replace(length=torch.tensor([2 * SEG_LEN, SEG_LEN, 0]))
        evicted = block.memory(x, filling, valid_len).evicted
        assert torch.equal(evicted.rows, x[:, :SEG_LEN]) and not evicted.rows.requires_grad
        assert evicted.valid.tolist() == [True, False, False]
        assert block.memory.evicted_len == SEG_LEN
    with refused(ValueError, "memory.mem_len", "train.seg_len"):
        build({"kind": "lamemo", "mem_len": 7}).memories()[0].evicted_len  # noqa: B018


class Nothing(nn.Module):
    """Dropout that keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@torch.no_grad()
def test_dropout_of_probabilities_leaves_alpha_and_the_sums() -> None:
    """As published: the contexts attended now lose terms, alpha C and s do not."""
    case = Refresh(8, 4)
    contexts, past = case.computed()
    case.attention.attention_dropout = Nothing()
    dropped, dropped_past = case.computed()
    assert torch.equal(dropped_past.log_sum, past.log_sum)
    alpha = dropped[:, :8] / case.past.context
    assert (alpha.amax(-1) - alpha.amin(-1)).abs().max() < 1e-9, "one alpha for each row, lane and head"
    assert (alpha[3] < 1 - 1e-6).all() and (alpha[0] == 1).all()
    assert not dropped[:, 8:].any() and contexts[:, 8:].all()


@torch.no_grad()
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_sums_neither_overflow_nor_lose_the_context(size: float, epsilon: float) -> None:
    case = Refresh(8, 4, epsilon=epsilon)
    case.past = Past(case.past.context, torch.full_like(case.past.log_sum, size))
    contexts, past = case.computed()
    assert torch.isfinite(contexts).all() and torch.isfinite(past.log_sum).all()
    full = contexts[3, :8]
    assert torch.allclose(full, case.past.context[3], rtol=0, atol=100 * epsilon) is (size > 0)
    assert torch.equal(contexts[0, :8], case.past.context[0]), "an empty lane keeps what it has"


def test_bfloat16_activations_keep_s_in_float32() -> None:
    """Losses near those of float64 over five segments, s to the rounding of the scores."""
    options = {"kind": "lamemo", "mem_len": 2 * SEG_LEN}
    exact, half = build(options, init_std=0.2), build(options, init_std=0.2).to(torch.bfloat16)
    state, half_state = fresh(exact), fresh(half, torch.bfloat16)
    for read in segments():
        expected, state = losses(exact, read, state)
        found, half_state = losses(half, read, half_state)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.1)
    found.sum().backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in half.parameters())
    for block, exact_block in zip(half_state.blocks[:-1], state.blocks[:-1], strict=True):
        assert block.past.log_sum.dtype == torch.float32 and block.past.context.dtype == torch.bfloat16
        torch.testing.assert_close(block.past.log_sum.double(), exact_block.past.log_sum, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("options", "key"), [({"mem_len": 0}, "mem_len"), ({"look_ahead": False, "interpolation": False}, "interpolation")]
)
def test_wrong_options_are_named(options: dict[str, Any], key: str) -> None:
    with refused(ValueError, f"memory.{key}"):
        build({"kind": "lamemo", **options})
