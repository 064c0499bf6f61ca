"""No memory: attention within the segment only, with relative positions (the papers' "Transformer + RPE")."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.config.keys import key
from dist_mem.memory.base import Inspectable, LayerSpec, Memory, MemoryOutput, Opened, Places, StepOutput, evict_all
from dist_mem.memory.parts.inspection import Inspection, segment_rows
from dist_mem.nn.attention_inputs import Visible
from dist_mem.nn.layers import AttentionOutput, HeadRows, RelativeAttention, visible_keys
from dist_mem.nn.norms import input_norm
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.nn.rotary_attention import RotaryAttention, attention_of
from dist_mem.nn.stepping import StepHeads


class EmptyState(NamedTuple):
    """An empty state: nothing is carried."""


class NoMemory(Inspectable):
    """Attention within the segment, with relative positions, or rotary ones in a Llama.

    With `memory.kernel`, the convolution of a segment's first tokens sees zeros before it: nothing is carried.
    """

    title = "no memory"
    takes_short_first = True
    min_seg_len = 1
    model_keys: Collection[str] = ("clamp_len", "sliding_window")
    can_step = True

    @dataclass
    class Options:
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        if spec.same_length:
            kind = type(self).__module__.rpartition(".")[2]
            raise ValueError(
                f"model.same_length needs a memory: set it to false, or memory.kind to another than {kind}"
            )
        self.norm = input_norm(spec)
        self.attention = self.make_attention()

    def make_attention(self) -> RelativeAttention | RotaryAttention | PlainAttention:
        """Return the attention layer."""
        return attention_of(self.spec, kernel=self.options.kernel)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, NoMemory)
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> EmptyState:
        return EmptyState()

    def forward(self, x: Tensor, state: EmptyState, valid_len: Tensor) -> MemoryOutput:
        y, query, _ = self.attend(x, weights=False)
        # Raw rows, before the layer norm, as the published GPT-2 code passes them to its long-term memory.
        return MemoryOutput(y, state, {}, query, evict_all(x, valid_len))

    def attend(self, x: Tensor, *, weights: bool) -> AttentionOutput:
        """Attend to the segment."""
        attended: AttentionOutput = self.attention(self.norm(x), *empty_context(x), weights=weights)
        return attended

    def attend_heads(self, x: Tensor, *, weights: bool) -> HeadRows:
        """Attend as `attend`, without the output projection."""
        return self.attention.attend_heads(self.norm(x), *empty_context(x), weights=weights)

    def open_segment(self, state: EmptyState, rows: Tensor) -> Opened:
        return self.attention.open(
            self.norm(rows), rows.new_ones(rows.shape[:2], dtype=torch.bool), seg_len=self.spec.seg_len
        )

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.attention.step_rows(self.norm(x), opened, places)

    def step_heads(self, x: Tensor, opened: Opened, places: Places) -> StepHeads:
        """Attend as `step_rows`, without the output projection; not with relative positions."""
        assert not isinstance(self.attention, RelativeAttention)
        return self.attention.step_heads(self.norm(x), opened, places)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: EmptyState, valid_len: Tensor, trace: None = None) -> Inspection:
        return Inspection({"segment": segment_rows(self.attend(x, weights=True).shares(), valid_len)})

    def forget(self, state: EmptyState, begin: Tensor, end: Tensor, trace: None = None) -> EmptyState:
        return state


def empty_context(x: Tensor) -> tuple[Tensor, Visible]:
    """Return the context of a segment (B, T, D) by itself, and what is visible there."""
    no_context = x.new_empty(x.shape[0], 0, x.shape[2])
    nothing = no_context.new_empty(x.shape[0], 0, dtype=torch.bool)
    return no_context, visible_keys(nothing, x.shape[1], same_length=False)


def attention_below(over: Memory | None, options: Any, spec: LayerSpec, *, kind: str) -> NoMemory | None:
    """Return the memory whose queries, keys and values a memory of this kind reads with; None: it has its own.

    Args:
        options: of that memory, with `over` and `kernel`.

    Raises:
        ValueError: it has none in a Llama, or one that cannot be below it.
    """
    if over is None:
        if spec.llama is not None:
            raise ValueError(
                f"memory.kind is {kind}, whose own attention has no grouped heads and other positions than a Llama's: "
                "set memory.over.kind=none, which is the Llama's attention, or model.kind to transformer"
            )
        return None
    if not isinstance(over, NoMemory) or isinstance(over.attention, RelativeAttention):
        raise ValueError(
            f"memory.over.kind is {options.over['kind']}, but a memory of kind {kind} reads beside attention within "
            "the segment that has no relative positions: set memory.over.kind=causal, or memory.over to null"
        )
    if options.kernel is not None:
        raise ValueError(
            f"memory.kernel is {options.kernel}, which is of an own attention, but memory.over has another one: set "
            "memory.over.kernel, and memory.kernel to null"
        )
    return over
