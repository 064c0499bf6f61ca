"""Small memories of the infinity-former, and segments that they read."""

from typing import Any

import torch
from torch import Tensor

from dist_mem.memory import build_memory
from dist_mem.memory.base import LayerSpec
from dist_mem.memory.infinite import Infinite
from tests.support.published_infinite import layer_spec

WIDTH, NUM_HEADS, D_HEAD, SEG_LEN, LANES = 8, 2, 4, 6, 3
SMALL: dict[str, Any] = {
    "num_basis": 16, "basis_widths": [0.05, 0.1], "num_samples": 12, "tau": 0.5, "kl_weight": 1.0, "ridge": 0.1,
}  # fmt: skip


def spec_of() -> LayerSpec:
    return layer_spec(d_model=WIDTH, num_heads=NUM_HEADS, d_head=D_HEAD, seg_len=SEG_LEN)


def memory_of(seed: int = 0, **options: Any) -> Infinite:
    """In float64, with large weights."""
    memory = build_memory({"kind": "infinite", **SMALL, **options}, spec_of())
    torch.manual_seed(seed)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    assert isinstance(memory, Infinite)
    return memory.double()


def segments(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(LANES, SEG_LEN, WIDTH, generator=generator, dtype=torch.float64) for _ in range(number)]


def read(memory: Infinite, inputs: list[Tensor], document_ids: Tensor | None = None) -> list[Any]:
    """Complete segments, one after the other."""
    state = memory.init_state(torch.arange(LANES) if document_ids is None else document_ids, "cpu", torch.float64)
    outputs = []
    for x in inputs:
        outputs.append(memory(x, state, torch.full((LANES,), SEG_LEN)))
        state = outputs[-1].state
    return outputs


def smooth(positions: Tensor) -> Tensor:
    return torch.stack([(3.0 * positions).sin(), (5.0 * positions + 1.0).cos()], dim=-1)
