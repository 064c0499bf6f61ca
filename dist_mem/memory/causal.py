"""GPT-2's attention within the segment, which remembers nothing; a long-term memory may be built over it.

It adds no positions: in GPT-2 (model.kind: gpt2) the rows contain learned ones. Source: Radford et al. 2019; Martins et
al. 2022, "infinity-former", sec. 4.2. Alone, this memory is the paper's GPT-2; `infinite` over it is the
infinity-former.
"""

from __future__ import annotations

from typing import Any

from dist_mem.memory.base import LayerSpec
from dist_mem.memory.parts.within_segment import WithinSegment
from dist_mem.nn.flops import Flops
from dist_mem.nn.plain_attention import PlainAttention, plain_attention_flops


class Causal(WithinSegment):
    """GPT-2's causal attention within the segment."""

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        self.attention = PlainAttention(spec)

    def flops(self) -> Flops:
        return plain_attention_flops(self.spec, context_len=0, context_learns=False)
