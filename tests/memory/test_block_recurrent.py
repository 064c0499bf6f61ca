"""The Block-Recurrent Transformer against the authors' code (tests/golden/block_recurrent), in float64.

The published layer is written out here around ours, with the published output of the layer below as its input: RMS
norms, which ours has not with `norm: post`, the feed-forward network and the softmax.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.base import detach_state, named_tensors, select_lanes
from dist_mem.memory.block_recurrent import BlockRecurrent, BlockRecurrentState
from tests.support.messages import refused
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, layer_spec, names_in, rms

NAMES = names_in(GOLDEN / "block_recurrent")
SPEC = layer_spec(num_layers=2, d_model=6, num_heads=2, d_head=5, seg_len=4)


class Published(Vectors):
    """The recurrent layer of the published model, with ours as its attention and cell."""

    def __init__(self, name: str) -> None:
        super().__init__(GOLDEN / "block_recurrent" / f"{name}.npz")
        self.sizes = self.settings
        self.window, self.lanes = self.sizes["window"], self.sizes["lanes"]
        spec = replace(
            SPEC, layer_index=1, d_model=self.sizes["d_model"], num_heads=self.sizes["num_heads"],
            d_head=self.sizes["head_size"], seg_len=self.sizes["segment"],
        )  # fmt: skip
        self.cell = "single" if self.sizes["single_gate"] else "skip" if self.sizes["skip_ffn"] else "dual"
        options = BlockRecurrent.Options(
            num_states=self.sizes["num_states"], window=self.window, cell=self.cell, d_inner=self.sizes["mlp_dim"],
            gate="lstm" if self.sizes["gate"] == "lstm" else "fixed", attend_empty=not name.startswith("masked"),
        )  # fmt: skip
        self.layer = BlockRecurrent(spec, options).double()

    def heads(self, prefix: str) -> dict[str, Tensor]:
        weights = self.weights
        names = [f"{prefix}/_kvq/{name}_layer/kernel" for name in ("keys", "values", "queries", "queries2")]
        return {
            "rows.weight": torch.cat([weights[name].mT for name in names]),
            "scale": weights[f"{prefix}/_kvq/attention_scale"],
            "cross_scale": weights[f"{prefix}/attention_scale2"],
        }

    def gate(self, prefix: str) -> dict[str, Tensor]:
        weights = self.weights
        if f"{prefix}/gate_bias" in weights:
            return {"bias": weights[f"{prefix}/gate_bias"]}
        pairs = [(weights[f"{prefix}/{name}_gate/kernel"].mT, weights[f"{prefix}/{name}_gate/bias"])
                 for name in ("forget", "input")]  # fmt: skip
        return {"rates.weight": torch.cat([pair[0] for pair in pairs]), "rates.bias": torch.cat([p[1] for p in pairs])}

    def named(self) -> dict[str, Tensor]:
        """The published weights of the recurrent layer by our names."""
        weights, layer = self.weights, "transformer1"
        state = f"{layer}/recurrent_tbase"
        found = {
            "tokens.table": weights[f"{layer}/relative_positions/rel_embedding"],
            "output.weight": weights[f"{layer}/tbase/post_attn_mlp/output_layer/kernel"].mT,
            "start.start": weights[f"{layer}/recurrent_initial_state"],
            "states.ids": weights[f"{state}/_kvq/position_embeddings"],
            "states.norm.weight": weights[f"{state}/_kvq/pre_attn_layernorm/scale"],
        }
        parts = [("tokens", self.heads(f"{layer}/tbase")), ("states", self.heads(state))]
        if self.cell != "single":
            found["update.project.weight"] = weights[f"{state}/post_attn_mlp/output_layer/kernel"].mT
            parts.append(("update.gate", self.gate(f"{state}/post_attn_mlp")))
        if self.cell == "dual":
            found["update.norm.weight"] = weights[f"{state}/pre_ffn_layernorm/scale"]
        if self.cell != "skip":
            found["update.expand.weight"] = weights[f"{state}/ffn/hidden0/kernel"].mT
            found["update.contract.weight"] = weights[f"{state}/ffn/output_layer/kernel"].mT
            parts.append(("update.inner_gate", self.gate(f"{state}/ffn")))
        return found | {f"{prefix}.{name}": tensor for prefix, part in parts for name, tensor in part.items()}

    def assert_segments(self) -> None:
        """Compare outputs and states of all segments, and the gradients of each one's loss with a constant memory."""
        weights, sizes, base = self.weights, self.sizes, "transformer1/tbase"
        fresh = state = self.layer.init_state(torch.arange(self.lanes), "cpu", torch.float64)
        stream, full = self.tensor("stream").long(), torch.full((self.lanes,), sizes["segment"])
        for number in range(sizes["segments"]):
            seg = f"seg{number}"
            state = select_lanes(self.tensor(f"{seg}/start"), fresh, detach_state(state))
            below = self.tensor(f"{seg}/layer0_out")
            rows = rms(below, weights[f"{base}/_kvq/pre_attn_layernorm/scale"])
            output = torch.func.functional_call(self.layer, self.named(), (rows, state, full))
            state, middle = output.state, below + output.y
            inner = rms(middle, weights[f"{base}/pre_ffn_layernorm/scale"]) @ weights[f"{base}/ffn/hidden0/kernel"]
            last = middle + inner.relu() @ weights[f"{base}/ffn/output_layer/kernel"]
            logits = (
                rms(last, weights["final_layernorm/scale"])
                @ weights["embed/embedding"].detach().T
                / sizes["d_model"] ** 0.5
            )
            targets = stream[:, number * sizes["segment"] + 1 :][:, : sizes["segment"]]
            loss = F.cross_entropy(logits.mT, targets, reduction="none")
            self.assert_equal(middle, f"{seg}/layer1_mid")
            self.assert_equal(loss, f"{seg}/loss")
            prefix = f"{seg}/state/transformer1"
            self.assert_equal(state.keys.transpose(1, 2), f"{prefix}/previous_keys_test")
            self.assert_equal(state.values.transpose(1, 2), f"{prefix}/previous_values_test")
            self.assert_equal(state.recurrent, f"{prefix}/recurrent_state_test")
            mine = {name: weight for name, weight in weights.items() if name.startswith(("transformer1", "final"))}
            for name, gradient in self.gradients(loss.mean(), mine).items():
                if f"{seg}/grad/{name}" in self.arrays:
                    self.assert_equal(gradient, f"{seg}/grad/{name}")
                else:
                    assert not gradient.any(), name


@pytest.mark.parametrize("name", NAMES)
def test_outputs_states_and_gradients_equal_the_published_code(name: str) -> None:
    Published(name).assert_segments()


def layer_of(seg_len: int = 4, **options: Any) -> BlockRecurrent:
    """Return a layer with random weights, in float64."""
    torch.manual_seed(0)
    options = {"num_states": 3, "window": 2, "d_inner": 7} | options
    layer = BlockRecurrent(replace(SPEC, seg_len=seg_len), BlockRecurrent.Options(**options)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def rows_of(num_rows: int) -> Tensor:
    return torch.randn(2, num_rows, SPEC.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def unroll(layer: BlockRecurrent, x: Tensor) -> tuple[Tensor, BlockRecurrentState, dict[str, Tensor]]:
    """Read rows in segments of one window of segments: outputs, last state, gradients."""
    state, found = layer.init_state(torch.arange(len(x)), "cpu", torch.float64), []
    for segment in x.split(layer.spec.seg_len, dim=1):
        output = layer(segment, state, torch.full((len(x),), segment.shape[1]))
        state = output.state
        found.append(output.y)
    y = torch.cat(found, dim=1)
    gradients = torch.autograd.grad((y.sin()).sum(), list(layer.parameters()), allow_unused=True)
    learned = zip(layer.named_parameters(), gradients, strict=True)
    return y, state, {name: gradient for (name, _), gradient in learned if gradient is not None}


def assert_close(state: BlockRecurrentState, other: BlockRecurrentState) -> None:
    for one, two in zip(named_tensors(state).values(), named_tensors(other).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gate", ["fixed", "lstm"])
@pytest.mark.parametrize(("cell", "kernel"), [("skip", None), ("dual", None), ("single", None), ("skip", 4)])
def test_any_cut_into_segments_has_the_same_outputs_and_gradients(cell: str, gate: str, kernel: int | None) -> None:
    """Gradients flow through states, keys and values alike, as through the windows of a published segment."""
    x, options = rows_of(8), {"cell": cell, "gate": gate, "kernel": kernel}
    whole = unroll(layer_of(8, **options), x)
    for seg_len in (2, 4):
        y, state, gradients = unroll(layer_of(seg_len, **options), x)
        torch.testing.assert_close(y, whole[0], rtol=1e-10, atol=1e-12)
        assert_close(state, whole[1])
        assert gradients.keys() == whole[2].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[2][name], rtol=1e-10, atol=1e-12, msg=name)


def test_one_window_teaches_the_cell_only_what_a_later_segment_reads() -> None:
    """The published trap: with one window a segment and no gradient between segments the cell never learns."""
    layer = layer_of(2)
    alone, joined = (unroll(layer, rows_of(num_rows))[2] for num_rows in (2, 4))
    cell = [name for name in alone if name.startswith("update.")]
    assert cell and not any(alone[name].any() for name in cell) and all(joined[name].any() for name in cell)


def test_initial_weights_are_those_of_the_published_code() -> None:
    layer = layer_of(gate="lstm", cell="dual", num_states=400).float()
    layer.reset_parameters()
    assert (layer.tokens.scale == 1).all() and (layer.states.cross_scale == 1).all()
    assert layer.start.start.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.states.ids.std().item() == pytest.approx(1.0, rel=0.1)
    gate = layer.update.inner_gate
    assert gate.rates.weight.abs().max() <= 2 * (0.1 / 7) ** 0.5
    fixed = layer_of()
    fixed.reset_parameters()
    assert fixed.update.gate.bias.abs().max() < 0.5


def test_a_window_that_does_not_divide_the_segment_is_refused() -> None:
    with refused(ValueError, "memory.window", "train.seg_len"):
        layer_of(window=3)
