"""Scaled rotary positions, norms of heads and sliding windows, against reference vectors (tests/golden/rope)."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.config import RopeConfig
from dist_mem.hf.llama import rope_keys
from dist_mem.nn.attention_inputs import Visible, newest_rows, visible_keys, within
from dist_mem.nn.layer_spec import LayerSpec, LlamaSpec
from dist_mem.nn.rope import attention_factor, frequencies
from dist_mem.nn.rotary_attention import RotaryAttention, turns
from tests.support.paths import GOLDEN

ARRAYS = dict(np.load(GOLDEN / "rope" / "frequencies.npz"))
SETTINGS = sorted(name.removesuffix("/config_json") for name in ARRAYS if name.endswith("config_json"))


def setting(name: str) -> tuple[RopeConfig, int, float]:
    """Return the configuration of a setting, as config.json of a model is read, the width that turns, and theta."""
    content = json.loads(str(ARRAYS[f"{name}/config_json"]))
    keys = {key.removeprefix("rope."): value for key, value in rope_keys(content).items()}
    rope = content["rope_parameters"]
    width = int(content["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    return RopeConfig(**{"original_positions": content["max_position_embeddings"], **keys}), width, rope["rope_theta"]


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_the_published_ones(name: str) -> None:
    rope, width, theta = setting(name)
    found = frequencies(rope, width, theta=theta, num_keys=1)
    np.testing.assert_allclose(found, ARRAYS[f"{name}/inv_freq"], rtol=1e-12, atol=0)
    assert attention_factor(rope) == pytest.approx(float(ARRAYS[f"{name}/attention_scaling"]), rel=1e-14)
    lengths = [key.split("/")[2] for key in ARRAYS if key.startswith(f"{name}/seq_len_")]
    assert bool(lengths) == (rope.kind == "dynamic")
    for length in lengths:
        num_keys = int(length.removeprefix("seq_len_"))
        found = frequencies(rope, width, theta=theta, num_keys=num_keys)
        np.testing.assert_allclose(found, ARRAYS[f"{name}/{length}/inv_freq"], rtol=1e-12, atol=0)
    if f"{name}/cos" in ARRAYS:
        positions = ARRAYS[f"{name}/positions"]
        by = turns(
            torch.zeros(width, dtype=torch.float64), first=0, num_rows=int(positions.max()) + 1, theta=theta, rope=rope
        )
        for part, wanted in zip(by, ("cos", "sin"), strict=True):
            half = ARRAYS[f"{name}/{wanted}"][:, : width // 2]
            np.testing.assert_allclose(part[positions], half, rtol=0, atol=1e-10)


def spec_of(sizes: dict[str, Any], **keys: Any) -> LayerSpec:
    llama = LlamaSpec(sizes["kv_heads"], rope_theta=sizes["theta"], norm_eps=sizes["eps"], qkv_bias=False, **keys)
    shape = {"d_model": sizes["hidden_size"], "num_heads": sizes["heads"], "d_head": sizes["head_dim"]}
    none: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "clamp_len": None, "same_length": False}
    return LayerSpec(
        layer_index=0, num_layers=1, seg_len=sizes["segment"], norm="pre", seed=0, llama=llama, **shape, **none
    )


def test_attention_with_norms_of_heads_is_qwen3s() -> None:
    """Outputs and the gradients of everything; heads are wider than the model divided by their number."""
    arrays = dict(np.load(GOLDEN / "rope" / "qwen3_attention.npz"))
    sizes = json.loads(str(arrays.pop("config_json")))
    given = {name: torch.from_numpy(value) for name, value in arrays.items()}
    attention = RotaryAttention(spec_of(sizes, qk_norm=True)).double()
    keys, values = (given[f"param/{name}_proj.weight"] for name in ("k", "v"))
    weights = {
        "query.weight": given["param/q_proj.weight"],
        "key_value.weight": torch.cat([keys, values]),
        "output.weight": given["param/o_proj.weight"],
        "query_norm.weight": given["param/q_norm.weight"],
        "key_norm.weight": given["param/k_norm.weight"],
    }
    attention.load_state_dict(weights)
    x = given["x"].requires_grad_()
    nothing = x.new_zeros(len(x), 0, x.shape[2])
    visible = visible_keys(nothing.new_ones(len(x), 0, dtype=torch.bool), x.shape[1], same_length=False)
    y = attention(x, nothing, visible).y
    torch.testing.assert_close(y, given["y"], rtol=0, atol=1e-10)
    (y * given["weight/y"]).sum().backward()
    found = {name: parameter.grad for name, parameter in attention.named_parameters()}
    expected = {
        "query.weight": given["grad/q_proj.weight"],
        "key_value.weight": torch.cat([given["grad/k_proj.weight"], given["grad/v_proj.weight"]]),
        "output.weight": given["grad/o_proj.weight"],
        "query_norm.weight": given["grad/q_norm.weight"],
        "key_norm.weight": given["grad/k_norm.weight"],
    }
    torch.testing.assert_close({**found, "x": x.grad}, {**expected, "x": given["grad/x"]}, rtol=0, atol=1e-9)


@pytest.mark.parametrize("back_end", ["chunked", "sdpa"])
@pytest.mark.parametrize("window", [1, 30, 170])
def test_back_ends_attend_to_the_same_window(back_end: str, window: int) -> None:
    """Rows and gradients, over several chunks and with a lane whose context is short."""
    sizes = {"hidden_size": 12, "heads": 4, "kv_heads": 2, "head_dim": 6, "theta": 1e4, "eps": 1e-6, "segment": 150}
    rope = RopeConfig(kind="dynamic", factor=2.0, original_positions=100)
    torch.manual_seed(0)
    attention = RotaryAttention(spec_of(sizes, sliding_window=window, qk_norm=True, rope=rope)).double()
    x, context = torch.randn(2, 150, 12).double(), torch.randn(2, 60, 12).double().requires_grad_()
    visible = visible_keys(newest_rows(torch.tensor([60, 7]), 60), 150, same_length=False, is_tail=True)
    found = []
    for name in ("simple", back_end):
        attention.back_end = name
        y = attention(x, context, visible).y
        found.append([y, *torch.autograd.grad(y.cos().sum(), [context, *attention.parameters()])])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-11)
    assert bool(found[0][1].any()) == (window > 1)


def tokens_seen(mask: Tensor) -> Tensor:
    return mask.sum(dim=-1)[0]


@pytest.mark.parametrize("same_length", [False, True])
def test_a_query_sees_itself_and_the_newest_keys_before_it(same_length: bool) -> None:
    """A description and a mask alike, and no limit where a window is as long as all keys."""
    visible = visible_keys(torch.ones(1, 3, dtype=torch.bool), 4, same_length=same_length)
    most = torch.full((4,), 3) if same_length else torch.arange(4, 8)
    for window in (1, 2, 5, 7, None):
        found = within(visible, window)
        limited = most if window is None else most.clamp(max=window)
        assert tokens_seen(found.mask()).tolist() == limited.tolist()
        mask: Any = visible.mask()
        assert torch.equal(torch.as_tensor(within(mask, window)), found.mask())
    assert within(visible, 7) is visible is within(visible, None)
    assert isinstance(within(visible, 2), Visible)
