"""Attention within the segment: the common part of memories without state. Shape letters: B lanes, T segment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.memory.base import Evicted, LayerSpec, Memory, MemoryOutput
from dist_mem.nn.layers import Attended, visible_keys


class State(NamedTuple):
    """An empty state: nothing is carried."""


class WithinSegment(Memory):
    """A memory without state; subclasses set `attention`, of (B, T, D), an empty context and visible keys."""

    attention: nn.Module

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        if spec.same_length:
            kind = type(self).__module__.rpartition(".")[2]
            raise ValueError(
                f"model.same_length needs a memory: set it to false, or memory.kind to another than {kind}"
            )
        self.norm = nn.LayerNorm(spec.d_model) if spec.norm == "pre" else nn.Identity()

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        return State()

    @property
    def takes_short_first(self) -> bool:
        return True

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        no_context = x.new_empty(x.shape[0], 0, x.shape[2])
        nothing = no_context.new_empty(x.shape[0], 0, dtype=torch.bool)
        visible = visible_keys(nothing, x.shape[1], same_length=False)
        attended: Attended = self.attention(self.norm(x), no_context, visible)
        # Raw rows, before the layer norm, as the published GPT-2 code passes them to its long-term memory.
        everything = Evicted(x.detach(), torch.ones_like(valid_len, dtype=torch.bool))
        return MemoryOutput(attended.y, state, {}, attended.query, everything)
