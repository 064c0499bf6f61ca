"""The convolution of queries, keys and values in attention (`memory.kernel`).

That it keeps the contract and steps row by row is tested by the cases "convolution" of tests/support/contract_cases.py;
that segments of any length read the same rows, in test_txl_parity.py. Shape letters: B lanes, T segment, M memory, D
model, H heads, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory import build_memory
from dist_mem.memory.linear import LinearMemory
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.nn.convolution import ShortConvolution
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import RelativeAttention, initialize

LANES, SEG_LEN, MEM_LEN, KERNEL, D_MODEL, HEADS = 2, 4, 6, 3, 6, 2


def spec() -> LayerSpec:
    return LayerSpec(
        layer_index=0,
        num_layers=1,
        d_model=D_MODEL,
        num_heads=HEADS,
        d_head=D_MODEL // HEADS,
        seg_len=SEG_LEN,
        dropout=0.0,
        attention_dropout=0.0,
        norm="pre",
        clamp_len=None,
        same_length=False,
        seed=0,
    )


def drawn(kind: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    memory = build_memory({"kind": kind, **options}, spec())
    initialize(memory, std=0.5)
    memory.reset_parameters()
    return memory.double()


def written_out(memory: TransformerXL, text: Tensor) -> Tensor:
    """Return what Transformer-XL with the convolution makes of a text (L, D), number by number, from its equations."""
    attention = memory.attention
    assert isinstance(attention, RelativeAttention) and attention.convolution is not None
    rows, width = memory.norm(text), D_MODEL // HEADS
    projected = torch.cat([rows @ attention.query.weight.T, rows @ attention.key_value.weight.T], dim=1)
    mixed = torch.zeros_like(projected)
    for token in range(len(text)):
        for back in range(min(KERNEL, token + 1)):
            mixed[token] += attention.convolution.taps[:, KERNEL - 1 - back] * projected[token - back]
    mixed = mixed / (1.0 + torch.exp(-mixed))
    query, key, value = (part.unflatten(1, (HEADS, width)) for part in mixed.chunk(3, dim=1))
    frequency = 10000.0 ** (-torch.arange(0, D_MODEL, 2, dtype=text.dtype) / D_MODEL)
    found = torch.zeros(len(text), HEADS, width, dtype=text.dtype)
    for token in range(len(text)):
        begin = max(0, token // SEG_LEN * SEG_LEN - MEM_LEN)
        for head in range(HEADS):
            scores = []
            for other in range(begin, token + 1):
                angle = (token - other) * frequency
                table = attention.position.weight @ torch.cat([angle.sin(), angle.cos()])
                asked = query[token, head]
                by_content = (asked + attention.content_bias[head]) @ key[other, head]
                by_distance = (asked + attention.position_bias[head]) @ table.unflatten(0, (HEADS, width))[head]
                scores.append((by_content + by_distance) / math.sqrt(width))
            found[token, head] = torch.stack(scores).softmax(0) @ value[begin : token + 1, head]
    return found.flatten(1) @ attention.output.weight.T


def test_transformer_xl_with_a_convolution_is_what_its_equations_say() -> None:
    """Over several segments, the last ones with a full memory."""
    memory = drawn("transformer_xl", mem_len=MEM_LEN, kernel=KERNEL)
    assert isinstance(memory, TransformerXL)
    for name, parameter in memory.named_parameters():
        if name.endswith("bias"):  # then what an empty row is projected to is not 0
            torch.nn.init.normal_(parameter)
    text = torch.randn(LANES, 4 * SEG_LEN, D_MODEL, dtype=torch.float64)
    state, found = memory.init_state(torch.arange(LANES), "cpu", torch.float64), []
    for x in text.split(SEG_LEN, dim=1):
        output = memory(x, state, torch.full((LANES,), SEG_LEN))
        state = output.state
        found.append(output.y)
    expected = torch.stack([written_out(memory, lane) for lane in text])
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-10, atol=1e-12)


def test_it_is_the_operation_and_the_first_weights_of_linear_memories() -> None:
    """On the same projections, queries, keys and values are the same bits; taps come from the same distribution."""
    linear = drawn("linear", kernel=4, d_key=3, d_value=3, unit_keys=False, scale_queries=False)
    assert isinstance(linear, LinearMemory)
    convolution = ShortConvolution(3 * D_MODEL, kernel=4).double()
    torch.manual_seed(1)
    convolution.reset_parameters()
    torch.manual_seed(1)
    linear.reset_parameters()
    assert torch.equal(convolution.taps, linear.taps)
    x = torch.randn(LANES, SEG_LEN, D_MODEL, dtype=torch.float64)
    state = linear.init_state(torch.arange(LANES), "cpu", torch.float64)
    query = linear(x, state, torch.full((LANES,), SEG_LEN)).query
    projected = F.pad(linear.rows(linear.norm(x)), (0, 0, 3, 0))
    found, _ = convolution(*projected.split([D_MODEL, 2 * D_MODEL], dim=-1))
    assert torch.equal(found.unflatten(-1, (HEADS, -1)).permute(2, 0, 1, 3), query)
