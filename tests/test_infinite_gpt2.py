"""The published GPT-2 with long-term memories, segment after segment, against ours over plain causal attention.

Two layers read seven segments of 512 tokens; after 2048 tokens the published code forgets everything. Our memory lies
over an attention written here, as it lies over any memory; only what is around it is GPT-2's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_infinite_parity import WEIGHTS, assert_close, layer_spec, ours, theirs
from torch import Tensor

from dist_mem.layers import merge_heads, split_heads
from dist_mem.memory.base import Evicted, Memory, MemoryOutput
from dist_mem.memory.infinite import Infinite

GOLDEN = Path(__file__).parent / "golden" / "infinite"
SEG_LEN, WIDTH, NUM_HEADS, NUM_BASIS, NUM_LAYERS = 512, 24, 3, 128, 2
OPTIONS = {"num_basis": NUM_BASIS, "num_samples": 512, "widths": [0.005, 0.01], "tau": 0.5, "prior_mean": -1.0}
TOLERANCE = 2e-5  # golden README, with our own matrices


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    found = {**np.load(GOLDEN / "model_gpt2_weights.npz"), **np.load(GOLDEN / "model_gpt2_tiny.npz")}
    loaded = {key: torch.from_numpy(value) for key, value in found.items()}
    return {key: value.double() if value.is_floating_point() else value.long() for key, value in loaded.items()}


class CausalAttention(Memory):
    """GPT-2's attention sub-layer, with its layer norm; stores nothing."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(layer_spec(d_model=WIDTH, num_heads=NUM_HEADS, d_head=8, seg_len=SEG_LEN), object())
        self.weights = weights

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> tuple[()]:
        return ()

    def forward(self, x: Tensor, state: Any, valid_len: Tensor) -> MemoryOutput:
        weights = self.weights
        normed = F.layer_norm(x, (WIDTH,), weights["ln_1.weight"], weights["ln_1.bias"])
        projected = normed @ weights["attn.c_attn.weight"] + weights["attn.c_attn.bias"]
        query, key, value = (split_heads(part, NUM_HEADS) for part in projected.chunk(3, dim=-1))
        context = merge_heads(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        y = context @ weights["attn.c_proj.weight"] + weights["attn.c_proj.bias"]
        return MemoryOutput(y, state, {}, query, Evicted(x.detach(), valid_len == SEG_LEN))


class Gpt2(NamedTuple):
    weights: dict[str, Tensor]  # of the model, by their published names
    layers: list[dict[str, Tensor]]
    memories: list[Infinite]


def build(arrays: dict[str, Tensor]) -> Gpt2:
    prefix, memory_prefix = "w_transformer.", "attn.long_term_attention."
    weights = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    layers, memories = [], []
    for index in range(NUM_LAYERS):
        layer = {key.removeprefix(f"h.{index}."): value for key, value in weights.items() if f"h.{index}." in key}
        over = CausalAttention(layer)
        memory = Infinite(over.spec, Infinite.Options(**OPTIONS, kl_weight=0.01, memory_threshold=2048), over).double()
        given = {key.removeprefix(memory_prefix).replace(".", "_"): value for key, value in layer.items()}
        densities = ours(torch.cat([given["mu_weight"], given["sigma_weight"]]), 1)
        memory.load_state_dict({"densities": densities} | {WEIGHTS[name]: given[name] for name in WEIGHTS})
        layers.append(layer)
        memories.append(memory)
    return Gpt2(weights, layers, memories)


def read(model: Gpt2, tokens: Tensor, states: list[Any]) -> tuple[Tensor, list[MemoryOutput], list[Tensor]]:
    """Logits of one segment, what every memory gave, and the input of every block."""
    x = model.weights["wte.weight"][tokens] + model.weights["wpe.weight"]
    outputs, inputs = [], []
    for layer, memory, state in zip(model.layers, model.memories, states, strict=True):
        inputs.append(x)
        outputs.append(memory(x, state, torch.tensor([SEG_LEN])))
        x = x + outputs[-1].y
        normed = F.layer_norm(x, (WIDTH,), layer["ln_2.weight"], layer["ln_2.bias"])
        inner = F.gelu(normed @ layer["mlp.c_fc.weight"] + layer["mlp.c_fc.bias"], approximate="tanh")
        x = x + inner @ layer["mlp.c_proj.weight"] + layer["mlp.c_proj.bias"]
    final = F.layer_norm(x, (WIDTH,), model.weights["ln_f.weight"], model.weights["ln_f.bias"])
    return final @ model.weights["wte.weight"].T, outputs, inputs


def test_seven_segments_of_the_published_model(arrays: dict[str, Tensor]) -> None:
    """Logits, losses, block inputs, coefficients, divergences, the wipe, and gradients in the third segment."""
    model = build(arrays)
    states: list[Any] = [memory.init_state(torch.zeros(1), "cpu", torch.float64) for memory in model.memories]
    for number in range(7):
        tokens = arrays[f"s{number}_ids"]
        logits, outputs, inputs = read(model, tokens, states)
        states = [output.state for output in outputs]
        loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
        assert_close(logits[:, ::64], arrays[f"s{number}_logits"], TOLERANCE)
        assert_close(loss, arrays[f"s{number}_loss"], TOLERANCE)
        assert_close(inputs[1][:, ::32], arrays[f"s{number}_mem1"], TOLERANCE)
        for index, state in enumerate(states):
            assert state.num_tokens.item() == arrays[f"s{number}_count{index}"].item()
            if number:
                assert_close(theirs(state.coefficients, 1)[:, ::8], arrays[f"s{number}_B{index}"], TOLERANCE)
        kl = torch.stack([output.aux["kl"] for output in outputs]).sum()
        assert_close(kl, 0.01 * arrays.get(f"s{number}_kl_mean", torch.zeros(()).double()), TOLERANCE)
        if number == 2:
            (loss + kl).backward()
            assert_gradients(model, arrays, "s2_grad_transformer.h")


def assert_gradients(model: Gpt2, arrays: dict[str, Tensor], prefix: str) -> None:
    for index, memory in enumerate(model.memories):
        memory_prefix = f"{prefix}.{index}.attn.long_term_attention."
        for name, own_name in WEIGHTS.items():
            expected = arrays[memory_prefix + name.replace("_weight", ".weight").replace("_bias", ".bias")]
            assert_close(memory.get_parameter(own_name).grad, expected, TOLERANCE)
        for row, name in enumerate(("mu", "sigma")):
            found = theirs(memory.densities.grad, 1)[row : row + 1]
            assert_close(found, arrays[f"{memory_prefix}{name}.weight"], TOLERANCE)
