"""No memory: attention within the segment only, with relative positions (the papers' "Transformer + RPE")."""

from __future__ import annotations

from typing import Any

from dist_mem.memory.base import LayerSpec, Memory
from dist_mem.memory.parts.within_segment import WithinSegment
from dist_mem.nn.flops import Flops, relative_attention
from dist_mem.nn.layers import RelativeAttention


class NoMemory(WithinSegment):
    """Relative attention within the segment."""

    attention: RelativeAttention

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        self.attention = RelativeAttention(**spec.attention)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, NoMemory)
        self.attention.share_biases(first.attention)

    def flops(self) -> Flops:
        return relative_attention(self.spec, context_len=0, context_learns=False)
