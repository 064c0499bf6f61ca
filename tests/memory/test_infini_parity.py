"""Infini-attention against published code (tests/golden/infini; README.md there), in float64.

The published backbone is not ours (RMS norm, GEGLU, a softmax with bias), so it is written out here around our layer.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.infini import Infini, State
from dist_mem.nn.layer_spec import LayerSpec
from tests.support import paths
from tests.support.parity import assert_close

GOLDEN = paths.GOLDEN / "infini"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


class Backbone:
    """The published model: x + attention(rms(x)), x + GEGLU(rms(x)), for every layer."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        self.num_segments = sum(key.endswith("/input") for key in self.arrays)
        self.weights = {
            key.removeprefix("param/"): torch.from_numpy(value).double().requires_grad_()
            for key, value in self.arrays.items()
            if key.startswith("param/")
        }
        options = Infini.Options(
            rule="delta" if name.startswith("delta") else "linear", gate_empty=name.endswith("_paper")
        )
        self.layers = [Infini(spec(index), options).double() for index in range(2)]

    def tensor(self, key: str) -> Tensor:
        value = torch.from_numpy(self.arrays[key])
        return value.double() if value.is_floating_point() else value

    def attention(self, index: int, rows: Tensor, state: State, valid_len: Tensor) -> tuple[Tensor, State]:
        """Run our layer with the published weights, so that gradients reach these."""
        qkv = self.weights[f"layers.{index}.0.to_qkv.weight"]
        query, rest = qkv[: len(qkv) // 3], qkv[len(qkv) // 3 :]
        named = {
            "attention.query.weight": query,
            "attention.key_value.weight": rest,
            "attention.output.weight": self.weights[f"layers.{index}.0.to_out.weight"],
            "beta": -self.weights[f"layers.{index}.0.fastweight_mem.head_gates"],
        }
        output = torch.func.functional_call(self.layers[index], named, (rows, state, valid_len))
        return output.y, output.state

    def segment(self, tokens: Tensor, targets: Tensor, states: list[State]) -> tuple[Tensor, list[Tensor], list[State]]:
        """Return losses (B, N), the outputs of attention and block of every layer, and the new states."""
        weights, found, new = self.weights, [], []
        x, valid_len = weights["token_emb.weight"][tokens], torch.full((len(tokens),), tokens.shape[1])
        for index, state in enumerate(states):
            attended, state = self.attention(index, rms(x, weights[f"layers.{index}.0.norm.gamma"]), state, valid_len)
            x = x + attended
            inner, gate = F.linear(
                rms(x, weights[f"layers.{index}.1.norm.gamma"]),
                weights[f"layers.{index}.1.proj_in.weight"],
                weights.get(f"layers.{index}.1.proj_in.bias"),
            ).chunk(2, dim=-1)
            out = weights[f"layers.{index}.1.proj_out.weight"], weights.get(f"layers.{index}.1.proj_out.bias")
            x = x + F.linear(inner * F.gelu(gate), *out)
            found += [attended, x]
            new.append(state)
        logits = F.linear(rms(x, weights["norm.gamma"]), weights["to_logits.weight"], weights.get("to_logits.bias"))
        return F.cross_entropy(logits.mT, targets, reduction="none"), found, new

    def empty(self) -> list[State]:
        return [layer.init_state(torch.arange(2), "cpu", torch.float64) for layer in self.layers]

    def losses(self, *, since: int, until: int) -> list[Tensor]:
        """Return the losses of segments up to `until`; the memory that enters segment `since` is a constant."""
        states, losses = self.empty(), []
        for number in range(until + 1):
            if number == since:
                states = [State(*(part.detach() for part in state)) for state in states]
            loss, _, states = self.segment(
                self.tensor(f"seg{number}/input"), self.tensor(f"seg{number}/target"), states
            )
            losses.append(loss)
        return losses

    def assert_gradients(self, loss: Tensor, prefix: str) -> None:
        names = list(self.weights)
        gradients = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True, materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            if f"{prefix}/{name}" in self.arrays:
                assert_close(gradient, self.tensor(f"{prefix}/{name}"), f"{prefix}/{name}")
            else:
                assert not gradient.any(), name


def spec(index: int) -> LayerSpec:
    return LayerSpec(
        layer_index=index,
        num_layers=2,
        d_model=8,
        num_heads=2,
        d_head=6,
        seg_len=6,
        dropout=0.0,
        attention_dropout=0.0,
        norm="post",  # the published layer norms outside
        clamp_len=None,
        same_length=False,
        seed=0,
    )


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * gain


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, outputs of every layer, and memories."""
    golden = Backbone(name)
    states = golden.empty()
    for number in range(golden.num_segments):
        seg = f"seg{number}"
        loss, found, states = golden.segment(golden.tensor(f"{seg}/input"), golden.tensor(f"{seg}/target"), states)
        assert_close(loss, golden.tensor(f"{seg}/loss"), "loss")
        for index, state in enumerate(states):
            assert_close(found[2 * index], golden.tensor(f"{seg}/layer{index}_attn"), f"attention {index}")
            assert_close(found[2 * index + 1], golden.tensor(f"{seg}/layer{index}_out"), f"block {index}")
            assert_close(state.matrix, golden.tensor(f"{seg}/state{index}_M"), f"matrix {index}")
            assert_close(state.norm, golden.tensor(f"{seg}/state{index}_z"), f"norm {index}")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_segments_equal_the_published_code(name: str) -> None:
    """Of each segment's loss through no, one and all earlier segments, and of the loss of all segments."""
    golden = Backbone(name)
    prefixes = sorted({"/".join(key.split("/")[:2]) for key in golden.arrays if "/gradK" in key})
    for prefix in prefixes:
        number, depth = int(prefix.split("/")[0].removeprefix("seg")), int(prefix.partition("gradK")[2])
        losses = golden.losses(since=number - depth, until=number)
        golden.assert_gradients(losses[-1].mean(), prefix)
    last = golden.num_segments - 1
    golden.assert_gradients(torch.cat(golden.losses(since=0, until=last), dim=1).mean(), "unroll/grad")
