"""GPT-2's attention within the segment, which remembers nothing; a long-term memory may be built over it.

It adds no positions: in GPT-2 (model.kind: gpt2) the rows contain learned ones. Source: Radford et al. 2019; Martins et
al. 2022, "infinity-former", sec. 4.2. Alone, this memory is the paper's GPT-2; `infinite` over it is the
infinity-former.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.memory.base import Evicted, LayerSpec, Memory, MemoryOutput
from dist_mem.nn.flops import Flops
from dist_mem.nn.layers import visible_keys
from dist_mem.nn.plain_attention import PlainAttention, plain_attention_flops


class State(NamedTuple):
    """An empty state: nothing is carried."""


class Causal(Memory):
    """GPT-2's causal attention within the segment."""

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        if spec.same_length:
            raise ValueError("model.same_length needs a memory: set it to false, or memory.kind to another than causal")
        self.norm = nn.LayerNorm(spec.d_model) if spec.norm == "pre" else nn.Identity()
        self.attention = PlainAttention(spec)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        return State()

    @property
    def takes_short_first(self) -> bool:
        return True

    def flops(self) -> Flops:
        return plain_attention_flops(self.spec, context_len=0, context_learns=False)

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        no_context = x.new_empty(x.shape[0], 0, x.shape[2])
        nothing = no_context.new_empty(x.shape[0], 0, dtype=torch.bool)
        visible = visible_keys(nothing, x.shape[1], same_length=False)
        y, query, _ = self.attention(self.norm(x), no_context, visible)
        # Raw rows, before the layer norm, as the published GPT-2 code passes them to its long-term memory.
        everything = Evicted(x.detach(), torch.ones_like(valid_len, dtype=torch.bool))
        return MemoryOutput(y, state, {}, query, everything)
