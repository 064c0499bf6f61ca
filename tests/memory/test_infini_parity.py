"""Infini-attention against published code (tests/golden/infini; README.md there), in float64.

The published backbone is not ours (RMS norm, GEGLU, a softmax with bias), so it is written out here around our layer.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.base import detach_state
from dist_mem.memory.infini import Infini, InfiniState, rotate, turns
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, layer_spec, names_in

NAMES = names_in(GOLDEN / "infini")


class Backbone(Vectors):
    """The published model: x + attention(rms(x)), x + GEGLU(rms(x)), for every layer."""

    def __init__(self, name: str) -> None:
        super().__init__(GOLDEN / "infini" / f"{name}.npz")
        self.num_segments = sum(key.endswith("/input") for key in self.arrays)
        rule = "delta" if name.startswith("delta") else "linear"
        options = Infini.Options(rule=rule, gate_empty=name.endswith("_paper"))
        sizes = {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_head": 6, "seg_len": 6}
        self.layers = [Infini(layer_spec(layer_index=index, **sizes), options).double() for index in range(2)]

    def attention(self, index: int, rows: Tensor, state: InfiniState, valid_len: Tensor) -> tuple[Tensor, InfiniState]:
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

    def segment(self, number: int, states: list[InfiniState]) -> tuple[Tensor, list[Tensor], list[InfiniState]]:
        """Return losses (B, N), the outputs of attention and block of every layer, and the new states."""
        tokens, targets = self.tensor(f"seg{number}/input"), self.tensor(f"seg{number}/target")
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

    def empty(self) -> list[InfiniState]:
        return [layer.init_state(torch.arange(2), "cpu", torch.float64) for layer in self.layers]

    def losses(self, *, since: int, until: int) -> list[Tensor]:
        """Return the losses of segments up to `until`; the memory that enters segment `since` is a constant."""
        states, losses = self.empty(), []
        for number in range(until + 1):
            loss, _, states = self.segment(number, detach_state(states) if number == since else states)
            losses.append(loss)
        return losses


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * gain


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, outputs of every layer, and memories."""
    golden = Backbone(name)
    states = golden.empty()
    for number in range(golden.num_segments):
        seg = f"seg{number}"
        loss, found, states = golden.segment(number, states)
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
    for prefix, number, depth in golden.depths():
        golden.assert_gradients(golden.losses(since=number - depth, until=number)[-1].mean(), prefix)
    last = golden.num_segments - 1
    golden.assert_gradients(torch.cat(golden.losses(since=0, until=last), dim=1).mean(), "unroll/grad")


def test_rows_of_bfloat16_are_rotated_in_float32_and_rounded_once() -> None:
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rotate(rows.float(), turns(40, rows.float()))
    assert torch.equal(rotate(rows, turns(40, rows)), exact.bfloat16())
