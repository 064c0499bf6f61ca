"""Gated DeltaNet, the default of `linear`, against the published code (tests/golden/gated_deltanet), in float64."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.linear import LinearMemory, State
from dist_mem.memory.parts.linear_rule import Tokens, chunked_rule, recurrent_rule
from dist_mem.nn.layer_spec import LayerSpec
from tests.support import parity, paths

GOLDEN = paths.GOLDEN / "gated_deltanet"
RULES = sorted(path.stem for path in GOLDEN.glob("rule*.npz"))
LAYERS = sorted(path.stem for path in GOLDEN.glob("layer*.npz"))


class Golden:
    """One file of reference vectors."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        self.settings: dict[str, Any] = json.loads(str(self.arrays["config_json"]))

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.arrays[key]).double()

    def assert_equal(self, ours: Tensor, key: str) -> None:
        parity.assert_close(ours, self.tensor(key), key)


def unit(rows: Tensor, num_heads: int) -> Tensor:
    """Raw queries or keys (B, T, G, K) as the rule wants them, (B, H, T, K)."""
    rows = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
    return rows.transpose(1, 2).repeat_interleave(num_heads // rows.shape[2], dim=1)


@pytest.mark.parametrize(
    "chunk_len", [1, 3, 64, None], ids=lambda length: f"chunks of {length or 'one token, written out'}"
)
@pytest.mark.parametrize("name", RULES)
def test_the_rule_equals_the_published_code(name: str, chunk_len: int | None) -> None:
    """Values and gradients of a stream that is cut into segments, and into chunks of any length."""
    golden = Golden(name)
    given = {key: golden.tensor(key).requires_grad_() for key in ("q", "k", "v", "g", "beta", "S0")}
    num_heads = given["v"].shape[2]
    query, keys = unit(given["q"], num_heads) / math.sqrt(given["q"].shape[-1]), unit(given["k"], num_heads)
    value, decay, beta = (given[key].transpose(1, 2) for key in ("v", "g", "beta"))
    tokens, matrix, read = Tokens(query, keys, value, decay[..., None], beta), given["S0"], []
    lengths = golden.settings["segments"]
    for number, segment in enumerate(zip(*(part.split(lengths, dim=2) for part in tokens), strict=True)):
        part = Tokens(*segment)
        if chunk_len is None:
            found, matrix = recurrent_rule(part, matrix, delta=True)
        else:
            found, matrix = chunked_rule(part, matrix, delta=True, chunk_len=chunk_len)
        read.append(found)
        golden.assert_equal(matrix, f"S_after_seg{number}")
    rows = torch.cat(read, dim=2).transpose(1, 2)
    golden.assert_equal(rows, "o")
    loss = (rows * golden.tensor("w_o")).sum() + (matrix * golden.tensor("w_S")).sum()
    for key, gradient in zip(given, torch.autograd.grad(loss, list(given.values())), strict=True):
        golden.assert_equal(gradient, f"grad/{key}")


class Layer:
    """Our layer with the published weights, which stay the leaves that gradients are asked of."""

    def __init__(self, name: str) -> None:
        self.golden = Golden(name)
        prefix = "param/"
        self.weights = {
            key.removeprefix(prefix): self.golden.tensor(key).requires_grad_()
            for key in self.golden.arrays
            if key.startswith(prefix)
        }
        given = self.golden.settings
        self.heads, self.key_heads = given["v_heads"], given["k_heads"]
        self.d_key, self.d_value = given["d_k"], given["d_v"]
        spec = LayerSpec(
            layer_index=0, num_layers=1, d_model=given["d_model"], num_heads=self.heads, d_head=self.d_key,
            seg_len=max(given["segments"]), dropout=0.0, attention_dropout=0.0, norm="post", clamp_len=None,
            same_length=False, seed=0,
        )  # fmt: skip
        options = LinearMemory.Options(
            num_key_heads=self.key_heads, d_key=self.d_key, d_value=self.d_value, kernel=given["kernel"], chunk_len=3
        )
        self.layer = LinearMemory(spec, options).double()

    def named(self) -> dict[str, Tensor]:
        """The published weights by our names: theirs are grouped by the head of keys."""
        weights, share = self.weights, self.heads // self.key_heads
        grouped = weights["in_proj_qkvz.weight"].unflatten(0, (self.key_heads, -1))
        sizes = [self.d_key, self.d_key, share * self.d_value, share * self.d_value]
        q, k, v, z = (part.flatten(0, 1) for part in grouped.split(sizes, dim=1))
        b, a = (
            part.flatten(0, 1) for part in weights["in_proj_ba.weight"].unflatten(0, (self.key_heads, -1)).chunk(2, 1)
        )
        return {
            "rows.weight": torch.cat([q, k, v]),
            "gate.weight": z,
            "rates.weight": torch.cat([b, a]),
            "taps": weights["conv1d.weight"].squeeze(1),
            "log_decay": weights["A_log"],
            "decay_bias": weights["dt_bias"],
            "value_norm.weight": weights["norm.weight"],
            "output.weight": weights["out_proj.weight"],
        }

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        valid_len = torch.full((len(x),), x.shape[1])
        output = torch.func.functional_call(self.layer, self.named(), (x, state, valid_len))
        return output.y, output.state


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_equals_the_published_code(name: str) -> None:
    """Outputs, states and gradients, with the state constant before any number of segments."""
    ours = Layer(name)
    golden = ours.golden
    lengths = golden.settings["segments"]
    segments = golden.tensor("x").split(lengths, dim=1)
    weight = golden.tensor("loss_weight").split(lengths, dim=1)
    prefixes = sorted({"/".join(key.split("/")[:2]) for key in golden.arrays if "/gradK" in key})
    assert prefixes

    def losses(*, since: int, until: int) -> list[Tensor]:
        state, found = ours.layer.init_state(torch.arange(len(segments[0])), "cpu", torch.float64), []
        for number in range(until + 1):
            state = State(*(part.detach() for part in state)) if number == since else state
            y, state = ours.run(segments[number], state)
            golden.assert_equal(y, f"seg{number}/y")
            golden.assert_equal(state.matrix, f"seg{number}/S")
            kept = golden.tensor(f"seg{number}/conv_state").mT[:, 1:]
            parity.assert_close(state.tail, kept, f"seg{number}/conv_state")
            found.append((y * weight[number]).sum())
        return found

    def assert_gradients(loss: Tensor, prefix: str) -> None:
        gradients = torch.autograd.grad(loss, list(ours.weights.values()), allow_unused=True, materialize_grads=True)
        for key, gradient in zip(ours.weights, gradients, strict=True):
            golden.assert_equal(gradient, f"{prefix}/{key}")

    for prefix in prefixes:
        number, depth = int(prefix.split("/")[0].removeprefix("seg")), int(prefix.partition("gradK")[2])
        assert_gradients(losses(since=number - depth, until=number)[-1], prefix)
    assert_gradients(torch.stack(losses(since=0, until=len(lengths) - 1)).sum(), "unroll/grad")


@pytest.mark.parametrize("norm_eps", [1e-6, 1e-5])  # of qwen3_next, the default, and of flash-linear-attention
def test_the_norm_of_what_is_read_adds_the_epsilon_of_the_options(norm_eps: float) -> None:
    layer = Layer(LAYERS[0]).layer
    options = LinearMemory.Options(**{**vars(layer.options), "norm_eps": norm_eps})
    rows = torch.full((1, layer.d_value), 1e-3, dtype=torch.float64)
    found = LinearMemory(layer.spec, options).double().value_norm(rows)
    torch.testing.assert_close(found, rows * (1e-6 + norm_eps) ** -0.5, rtol=1e-12, atol=0)
    assert vars(LinearMemory.Options())["norm_eps"] == 1e-6


def test_initial_decays_are_those_of_the_published_code() -> None:
    """A in U(0, 16), and softplus of the bias between 0.001 and 0.1."""
    layer = Layer(LAYERS[0]).layer.float()
    torch.manual_seed(0)
    layer.reset_parameters()
    assert (layer.log_decay.exp() <= 16).all() and (layer.log_decay.exp() >= 0.0099).all()
    steps = F.softplus(layer.decay_bias)
    assert (steps >= 0.00099).all() and (steps <= 0.101).all()
