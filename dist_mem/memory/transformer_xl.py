"""Transformer-XL (Dai et al. 2019, sec. 3.2): the last M inputs of every block are kept and attended to.

The cache holds block inputs, not keys and values: each step projects them with the current weights. Rows are
right-aligned and a count gives how many are valid: a lane's memory starts empty and no zero row is ever attended to, as
in the authors' code. The convolution of `memory.kernel` sees memory and segment as one text, before which it sees
zeros. So that a row is the same however its text is cut into segments, kernel - 1 rows before the M are kept, which
only the convolution reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.config.keys import TOKENS, key
from dist_mem.memory.base import (
    Count,
    Evicted,
    Inspectable,
    LayerSpec,
    Memory,
    MemoryOutput,
    Opened,
    Places,
    StepOutput,
    exactly,
    whole_segments,
)
from dist_mem.memory.parts.inspection import Inspection, overlaps, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.row_mask import Shown, append_shown, take_out, valid_rows, zero_hidden
from dist_mem.nn.layers import AttentionOutput, visible_keys
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import input_norm
from dist_mem.nn.rotary_attention import attention_of


class TransformerXLState(NamedTuple):
    # (B, M, D), the block's last inputs, newest last; rows not yet filled are 0. With a convolution M + kernel - 1
    hidden: Tensor
    length: Tensor  # (B,) int64, how many of the newest rows are valid
    shown: Shown = ()


def empty_state(
    num_lanes: int, num_rows: int, d_model: int, *, device: torch.device | str, dtype: torch.dtype
) -> TransformerXLState:
    """Return a memory of `num_rows` rows, none of them valid."""
    hidden = torch.zeros(num_lanes, num_rows, d_model, device=device, dtype=dtype)
    return TransformerXLState(hidden, torch.zeros(num_lanes, device=device, dtype=torch.int64))


def counts_of(state: TransformerXLState, num_rows: int) -> dict[str, Count]:
    """Return the counts of a state, as `Memory.counts`, after so many rows have been pushed."""
    return {"length": exactly(state.length, num_rows, most=state.hidden.shape[1])}


def push(state: TransformerXLState, rows: Tensor, are_shown: Shown = ()) -> TransformerXLState:
    """Append rows (B, T, D), all real, and keep the newest M; `are_shown` (B, T) bool, (): all are."""
    mem_len, num_rows = state.hidden.shape[1], rows.shape[1]
    newest = rows.detach()[:, -mem_len:].to(state.hidden.dtype)
    hidden = torch.cat([state.hidden[:, num_rows:], newest], dim=1)
    shown = append_shown(state.shown, are_shown, num_rows)
    return TransformerXLState(hidden, (state.length + num_rows).clamp(max=mem_len), shown)


def check_mem_len(mem_len: int) -> None:
    """Raise ValueError for a memory without rows."""
    if mem_len < 1:
        raise ValueError(f"memory.mem_len is {mem_len}, but must be at least 1; for no memory set memory.kind=none")


class TransformerXL(Inspectable):
    """Attention to the segment and the block's last M inputs, with relative or rotary positions."""

    title = "Transformer-XL"
    min_seg_len = 1
    can_step = True
    model_keys: Collection[str] = ("clamp_len", "same_length", "sliding_window")

    @dataclass
    class Options:
        mem_len: int = key(128, at_most=TOKENS)  # M, tokens
        # relative: as published | rotary: faster, and without parameters of its own; None: relative, in a Llama rotary
        positions: str | None = key(None, choices=("relative", "rotary"))
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        check_mem_len(options.mem_len)
        self.norm = input_norm(spec)
        self.attention = attention_of(spec, options.positions, kernel=options.kernel)
        self.num_before = (options.kernel or 1) - 1  # rows before the M that only the convolution reads

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"mem_len": 2 * seg_len - 1}

    @property
    def kept_len(self) -> int:
        return int(self.options.mem_len)

    @property
    def evicted_len(self) -> int:
        return whole_segments(self.options.mem_len, seg_len=self.spec.seg_len)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, TransformerXL)
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> TransformerXLState:
        num_rows = self.num_before + self.options.mem_len
        return empty_state(len(document_ids), num_rows, self.spec.d_model, device=device, dtype=dtype)

    def counts(self, state: TransformerXLState, num_segments: int) -> dict[str, Count]:
        return counts_of(state, num_segments * self.spec.seg_len)

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        y, query, _ = self.attend(x, state, weights=False)
        begin, shown = self.num_before, state.shown
        shown = shown[:, begin:] if isinstance(shown, Tensor) else ()
        rows = zero_hidden(state.hidden[:, begin : begin + x.shape[1]], shown).to(x.dtype)
        return MemoryOutput(y, push(state, x), {}, query, Evicted(rows, state.length >= self.options.mem_len))

    def attend(self, x: Tensor, state: TransformerXLState, *, weights: bool) -> AttentionOutput:
        """Attend to the memory and the segment."""
        is_row, valid = self.are_rows(state)
        is_tail = not isinstance(state.shown, Tensor)
        visible = visible_keys(valid, x.shape[1], same_length=self.spec.same_length, is_tail=is_tail)
        rows, context = self.norm(x), self.norm(state.hidden.to(x.dtype))
        attended: AttentionOutput = self.attention(rows, context, visible, weights=weights, is_row=is_row)
        return attended

    def are_rows(self, state: TransformerXLState) -> tuple[Tensor, Tensor]:
        """Return which rows of the state the convolution may see, and which of the M are attended to, (B, M) bool."""
        valid = valid_rows(state.length, state.hidden.shape[1], state.shown)
        return valid, valid[:, self.num_before :]

    def open_segment(self, state: TransformerXLState, rows: Tensor) -> Opened:
        is_row, valid = self.are_rows(state)
        context = self.norm(state.hidden.to(rows.dtype))
        return self.attention.open(context, valid, seg_len=self.spec.seg_len, is_row=is_row)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.attention.step_rows(self.norm(x), opened, places, same_length=self.spec.same_length)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: TransformerXLState, valid_len: Tensor, trace: None = None) -> Inspection:
        memory, segment = self.attend(x, state, weights=True).shares().tensor_split([self.options.mem_len], dim=-1)
        spans = token_spans(state.length, self.options.mem_len)
        return Inspection({"memory": rows_of(memory, spans), "segment": segment_rows(segment, valid_len)})

    def forget(self, state: TransformerXLState, begin: Tensor, end: Tensor, trace: None = None) -> TransformerXLState:
        spans = token_spans(state.length, state.hidden.shape[1])
        return replace(state, shown=take_out(state.shown, overlaps(spans, begin, end)))
