"""The convolution of queries, keys and values in attention (`memory.kernel`).

That it keeps the contract and steps row by row is tested by the cases "convolution" of tests/support/contract_cases.py;
that segments of any length read the same rows, in test_txl_parity.py. Shape letters: B lanes, T segment, M memory, D
model, H heads, K head width.
"""

import math

import torch
from torch import Tensor

from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.nn.layers import RelativeAttention, initialize
from tests.support.published import layer_spec

LANES, SEG_LEN, MEM_LEN, KERNEL, D_MODEL, HEADS = 2, 4, 6, 3, 6, 2


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
    torch.manual_seed(0)
    spec = layer_spec(d_model=D_MODEL, num_heads=HEADS, d_head=D_MODEL // HEADS, seg_len=SEG_LEN, norm="pre")
    memory = TransformerXL(spec, TransformerXL.Options(mem_len=MEM_LEN, kernel=KERNEL)).double()
    initialize(memory, std=0.5)
    memory.reset_parameters()
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
