"""LaMemo (Ji et al. 2022): a memory that looks ahead and is refreshed at every segment instead of frozen.

A block stores no hidden rows, only the attention results of its memory rows, C and s (parts/look_ahead.py). In every
segment the stem prepends the embeddings of the last M tokens, which pass through the blocks with the segment. Each
block lets the memory rows look ahead, at the newest rows that they have not seen, and passes the refreshed rows to the
next block. Only the embeddings, C and s are constants; all weights learn from the look-ahead too.

The last block refreshes nothing, because no loss would depend on it: it is Transformer-XL's, over the refreshed rows.
The published code computes that refresh nevertheless.

The convolution of `memory.kernel` sees memory rows and segment as one text, before which it sees zeros: the oldest
kernel - 1 of the M rows see fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.config.keys import TOKENS, key
from dist_mem.memory import transformer_xl
from dist_mem.memory.base import (
    Count,
    Evicted,
    Inspectable,
    LayerSpec,
    Memory,
    MemoryOutput,
    Opened,
    Places,
    Stem,
    StepOutput,
    exactly,
    whole_segments,
)
from dist_mem.memory.parts.inspection import Inspection, overlaps, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.look_ahead import LookAheadAttention, Past, RefreshedPast, visible_ahead
from dist_mem.memory.parts.row_mask import Shown, append_shown, take_out, valid_rows, zero_hidden
from dist_mem.nn.layers import AttentionOutput, RelativeAttention, visible_keys
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import input_norm


class LaMemoState(NamedTuple):
    past: Past | tuple[()]  # of the M memory rows, newest last, 0 where not yet filled; () in the last block
    length: Tensor  # (B,) int64, how many of the newest rows are valid
    shown: Shown = ()


class EmbeddingStem(Stem):
    """Prepends the embeddings of the last M tokens, after dropout, to those of the segment."""

    def __init__(self, *, seg_len: int, mem_len: int, d_model: int) -> None:
        super().__init__()
        self.seg_len = seg_len
        self.mem_len = mem_len
        self.d_model = d_model

    def init_state(
        self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype
    ) -> transformer_xl.TransformerXLState:
        return transformer_xl.empty_state(len(document_ids), self.mem_len, self.d_model, device=device, dtype=dtype)

    def counts(self, state: transformer_xl.TransformerXLState, num_segments: int) -> dict[str, Count]:
        return transformer_xl.counts_of(state, num_segments * self.seg_len)

    def forward(
        self, x: Tensor, state: transformer_xl.TransformerXLState
    ) -> tuple[Tensor, transformer_xl.TransformerXLState]:
        return torch.cat([state.hidden.to(x.dtype), x], dim=1), transformer_xl.push(state, x)


def check_options(options: LaMemo.Options) -> None:
    """Raise ValueError for an option, or a pair of options, without a meaning."""
    transformer_xl.check_mem_len(options.mem_len)
    if not options.look_ahead and not options.interpolation:
        raise ValueError(
            "memory.interpolation is false and memory.look_ahead too: without look-ahead there is nothing to "
            "interpolate with; leave memory.interpolation at true"
        )


class LaMemo(Inspectable):
    """Attention to the segment and to memory rows, which look ahead in all blocks but the last."""

    title = "LaMemo"
    min_seg_len = 1
    rows_dim = 1  # of (B, M, H, K)

    @dataclass
    class Options:
        mem_len: int = key(128, at_most=TOKENS)  # M, tokens
        look_ahead: bool = True  # false: memory rows go up with the contexts they once attended
        interpolation: bool = True  # false: what was attended ahead replaces the old context
        # disentangled: v for keys to the left, another to the right | shared: XL-RPE
        positions: str = key("disentangled", choices=("disentangled", "shared"))
        # previous | segment: whose number of tokens bounds how far rows look ahead. The published rule takes the
        # present segment: after a short one, or in generation, memory rows never see some of the tokens between
        window: str = key("previous", choices=("previous", "segment"))
        # of alpha, eq. 11, relative to the larger sum; the released code: 1e-6
        epsilon: float = key(0.0, at_least=0, below=1)
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        check_options(options)
        if spec.llama is not None:
            raise ValueError(
                "memory.kind is lamemo, whose look-ahead is defined by Transformer-XL's scores of distances, which a "
                "Llama does not have: set memory.kind to transformer_xl, or model.kind to transformer"
            )
        self.norm = input_norm(spec)
        self.window = min(spec.seg_len, options.mem_len)
        self.refreshes = spec.layer_index < spec.num_layers - 1
        self.attention: RelativeAttention | LookAheadAttention
        if not self.refreshes:
            self.attention = RelativeAttention(**spec.attention, kernel=options.kernel)
        else:
            self.attention = LookAheadAttention(
                mem_len=options.mem_len,
                window=self.window,
                look_ahead=options.look_ahead,
                interpolation=options.interpolation,
                disentangled=options.positions == "disentangled",
                epsilon=options.epsilon,
                kernel=options.kernel,
                **spec.attention,
            )

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"mem_len": 2 * seg_len}

    @property
    def can_step(self) -> bool:
        """Not with the published window: with every further token, memory rows see one key more."""
        return bool(self.options.window == "previous")

    @property
    def kept_len(self) -> int:
        return int(self.options.mem_len)

    @property
    def evicted_len(self) -> int:
        return whole_segments(self.options.mem_len, seg_len=self.spec.seg_len)

    def stem(self) -> EmbeddingStem:
        return EmbeddingStem(seg_len=self.spec.seg_len, mem_len=self.options.mem_len, d_model=self.spec.d_model)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, LaMemo)
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> LaMemoState:
        num_lanes = document_ids.shape[0]
        length = torch.zeros(num_lanes, device=device, dtype=torch.int64)
        if not self.refreshes:
            return LaMemoState((), length)
        shape = (num_lanes, self.options.mem_len, self.spec.num_heads)
        log_sum = torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return LaMemoState(Past(torch.zeros(*shape, self.spec.d_head, device=device, dtype=dtype), log_sum), length)

    def counts(self, state: LaMemoState, num_segments: int) -> dict[str, Count]:
        return {"length": exactly(state.length, num_segments * self.spec.seg_len, most=self.options.mem_len)}

    @property
    def num_rows(self) -> int:
        return self.spec.seg_len + (self.options.mem_len if self.refreshes else 0)

    def forward(self, x: Tensor, state: LaMemoState, valid_len: Tensor) -> MemoryOutput:
        mem_len = self.options.mem_len
        num_tokens = x.shape[1] - mem_len
        shown = append_shown(state.shown, (), num_tokens)
        length = (state.length + num_tokens).clamp(max=mem_len)
        evicted = Evicted(zero_hidden(x[:, : self.spec.seg_len].detach(), state.shown), state.length == mem_len)
        attended, refreshed = self.attend(x, state, valid_len, weights=False)
        past = refreshed.past if refreshed else ()
        return MemoryOutput(attended.y, LaMemoState(past, length, shown), {}, attended.query, evicted)

    def attend(
        self, x: Tensor, state: LaMemoState, valid_len: Tensor, *, weights: bool
    ) -> tuple[AttentionOutput, RefreshedPast | None]:
        """Attend to memory rows and segment; in all blocks but the last, memory rows look ahead."""
        mem_len = self.options.mem_len
        valid = valid_rows(state.length, mem_len, state.shown)
        visible = visible_keys(valid, x.shape[1] - mem_len, same_length=self.spec.same_length)
        rows = self.norm(x)
        if not self.refreshes:
            return self.attention(rows[:, mem_len:], rows[:, :mem_len], visible, weights=weights), None
        window_len = state.length.clamp(max=self.spec.seg_len)
        if self.options.window == "segment":
            window_len = torch.minimum(state.length, valid_len)
        ahead = visible_ahead(valid, window_len, self.window)
        if isinstance(state.shown, Tensor):
            newest = state.shown[:, mem_len - self.window + 1 :]
            # The last key is the segment's first token.
            ahead = replace(ahead, valid=ahead.valid & F.pad(newest, (0, 1), value=True))
        read: tuple[AttentionOutput, RefreshedPast] = self.attention(rows, state.past, visible, ahead, weights=weights)
        return read

    def open_segment(self, state: LaMemoState, rows: Tensor) -> Opened:
        valid = valid_rows(state.length, self.options.mem_len, state.shown)
        return self.attention.open(self.norm(rows), valid, seg_len=self.spec.seg_len)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.attention.step_rows(self.norm(x), opened, places, same_length=self.spec.same_length)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: LaMemoState, valid_len: Tensor, trace: None = None) -> Inspection:
        attended, refreshed = self.attend(x, state, valid_len, weights=True)
        memory, segment = attended.shares().tensor_split([self.options.mem_len], dim=-1)
        spans = token_spans(state.length, self.options.mem_len)
        rows = {"memory": rows_of(memory, spans), "segment": segment_rows(segment, valid_len)}
        values = {"alpha": refreshed.alpha.permute(1, 0, 2)} if refreshed else {}
        return Inspection(rows, values)

    def forget(self, state: LaMemoState, begin: Tensor, end: Tensor, trace: None = None) -> LaMemoState:
        spans = token_spans(state.length, self.options.mem_len)
        return replace(state, shown=take_out(state.shown, overlaps(spans, begin, end)))
