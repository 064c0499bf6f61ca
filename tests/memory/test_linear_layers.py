"""The presets of linear memories: Mamba-2 against the published layer, and all against the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.memory import linear, typed_options
from dist_mem.memory.base import named_tensors
from dist_mem.memory.linear import LinearMemory
from dist_mem.memory.parts.linear_rule import recurrent_rule
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import initialize
from tests.support import parity, paths

MEMORY = paths.ROOT / "configs" / "memory"
D_MODEL, HEADS, D_HEAD, SEG_LEN = 12, 2, 6, 10
PRESETS = {  # numbers of the state of a lane, and of the weights, at these sizes: H K V + 3 (2 G K + H V); by hand
    "retnet": (144, 12 * (24 + 24 + 24) + 12 + 24 * 12),
    "mamba2": (144 + 3 * 36, 12 * (36 + 24 + 2) + 4 * 36 + 3 * 2 + 24 + 24 * 12),
    "gla": (144, 12 * (24 + 24 + 24) + 16 * (12 + 12) + 12 + 12 + 24 * 12),
    "deltanet": (72 + 3 * 36, 12 * (36 + 2) + 4 * 36 + 6 + 12 * 12),
    "gated_deltanet": (144 + 3 * 48, 12 * (48 + 24 + 4) + 4 * 48 + 2 * 2 + 12 + 24 * 12),
    "kda": (72 + 3 * 36, 12 * (36 + 2) + 2 * 6 * (12 + 12) + 4 * 36 + 2 + 12 + 6 + 12 * 12),
}


def preset(name: str, *, norm: str = "post", d_model: int = D_MODEL, d_head: int = D_HEAD, **more: Any) -> LinearMemory:
    """Return the layer of a preset in float64, with larger weights than initial ones."""
    block: Any = OmegaConf.to_container(OmegaConf.load(MEMORY / f"{name}.yaml").memory)
    spec = LayerSpec(
        layer_index=0, num_layers=1, d_model=d_model, num_heads=HEADS, d_head=d_head, seg_len=SEG_LEN, dropout=0.0,
        attention_dropout=0.0, norm=norm, clamp_len=None, same_length=False, seed=0,
    )  # fmt: skip
    layer = LinearMemory(spec, typed_options({**block, **more})[1])
    torch.manual_seed(0)
    initialize(layer, std=0.5)
    layer.reset_parameters()
    return layer.double()


def read(layer: LinearMemory, weights: dict[str, Tensor], x: Tensor, *, lengths: list[int]) -> list[Tensor]:
    """Return the outputs of a text in segments, and the last state."""
    state, outputs = layer.init_state(torch.arange(len(x)), "cpu", x.dtype), []
    for segment in x.split(lengths, dim=1):
        valid_len = torch.full((len(x),), segment.shape[1])
        found = torch.func.functional_call(layer, weights, (segment, state, valid_len))
        outputs.append(found.y)
        state = found.state
    return [torch.cat(outputs, dim=1), *state]


def test_mamba_2_equals_the_layer_of_transformers() -> None:
    arrays = {
        key: torch.from_numpy(array) for key, array in np.load(paths.GOLDEN / "linear_family/layer_mamba2.npz").items()
    }
    given = {
        key.removeprefix("param/"): part.requires_grad_() for key, part in arrays.items() if key.startswith("param/")
    }
    given["x"] = arrays["x"].requires_grad_()
    d_key, d_value = 3, 8
    z, value, keys, query, dt = given["in_proj.weight"].split([16, 16, d_key, d_key, 2])
    value_taps, key_taps, query_taps = given["conv1d.weight"].squeeze(1).split([16, d_key, d_key])
    weights = {
        "rows.weight": torch.cat([query, keys, value]),
        "taps": torch.cat([query_taps, key_taps, value_taps]),
        "gate.weight": z,
        "rates.weight": dt,
        "log_decay": given["A_log"],
        "decay_bias": given["dt_bias"],
        "skip": given["D"],
        "value_norm.weight": given["norm.weight"],
        "output.weight": given["out_proj.weight"],
    }
    layer = preset("mamba2", d_model=8, d_head=d_key, d_value=d_value, chunk_len=4)
    assert set(weights) == {name for name, _ in layer.named_parameters()}
    outputs, *_ = read(layer, weights, given["x"], lengths=[10, 10, 5])
    parity.assert_close(outputs, arrays["o"], "o")
    gradients = torch.autograd.grad((outputs * arrays["w"]).sum(), list(given.values()))
    for key, gradient in zip(given, gradients, strict=True):
        parity.assert_close(gradient, arrays[f"grad/{key}"], f"grad/{key}", tolerance=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_in_segments_equals_its_recurrence_over_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients of every weight, none of which is 0."""
    layer = preset(name, norm="pre", chunk_len=4)
    weights = {key: part.requires_grad_() for key, part in layer.named_parameters()}
    x = torch.randn(2, 3 * SEG_LEN, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def results(lengths: list[int]) -> list[Tensor]:
        found = read(layer, weights, x, lengths=lengths)
        loss = torch.stack([part.square().sum() for part in found]).sum()
        return [*found, *torch.autograd.grad(loss, list(weights.values()))]

    cut = results([SEG_LEN, 2, 2 * SEG_LEN - 2])
    monkeypatch.setattr(linear, "chunked_rule", lambda *given, chunk_len, **rest: recurrent_rule(*given, **rest))
    names = ["y", "matrix", "tail", *(f"grad of {key}" for key in weights)]
    for key, ours, reference in zip(names, cut, results([3 * SEG_LEN]), strict=True):
        if reference.numel():  # without convolution the state has no rows before it
            parity.assert_close(ours, reference, key, tolerance=1e-9 if key.startswith("grad") else 1e-10)
            assert reference.abs().max() > 0, key


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_weights_and_the_state_of_its_paper(name: str) -> None:
    layer = preset(name)
    state = named_tensors(layer.init_state(torch.arange(1), "cpu", torch.float32))
    found = sum(part.numel() for part in state.values()), sum(part.numel() for part in layer.parameters())
    assert found == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_log_is_the_share_of_the_matrix_that_a_real_token_leaves(name: str) -> None:
    layer, lengths = preset(name), torch.tensor([SEG_LEN, 3])
    x = torch.randn(2, SEG_LEN, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = layer(x, layer.init_state(torch.arange(2), "cpu", x.dtype), lengths).logs["kept"]
    shares = layer.beta_and_decay(layer.norm(x), x.dtype)[1].exp()  # (B, H, T, 1 or K)
    assert found.tolist() == pytest.approx(
        [shares[lane, :, :length].mean().item() for lane, length in enumerate(lengths)]
    )


def test_there_is_a_preset_of_every_published_layer() -> None:
    """And no other file of this kind."""
    kinds = {path.stem: OmegaConf.load(path).memory.kind for path in MEMORY.glob("*.yaml")}
    assert {name for name, kind in kinds.items() if kind == "linear"} == set(PRESETS)
