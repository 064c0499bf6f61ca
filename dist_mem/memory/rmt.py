"""Recurrent Memory Transformer (Bulatov et al. 2022): M memory tokens around the segment carry what it should keep.

Source: arXiv 2207.06881, sec. 3.2, and the authors' code for Transformer-XL (booydar/LM-RMT). The same M rows stand
before the segment, where tokens read them, and after it, where they are written: what the last block makes of the
latter are the rows of the next segment. So the state is M rows for the whole model, and it goes from the top of the
model back to its input. Gradients flow through it in a window (`train.bptt_segments`: depth 0 of the paper is 1); the
first rows are learned. `mem_len` adds Transformer-XL's cache, which holds the newest rows of all kinds as constants.

Deviations: the learned first rows learn in every update in which a document begins (published: in the first update of
an epoch, because the carried rows are cut there), and documents begin with them (published: once an epoch). With
pre-norm and `model.final_norm`, the new rows are those after the final norm, as in the authors' code for pretrained
models. A window is read once; the published replay, K extra forwards for depth K, begins with newer rows than intended.
The last segment of a text is padded to T rows, as in generation, where the published code has shorter ones: with M > 2
its scores between memory tokens are those of T rows (parts/memory_tokens.py).
The convolution of `memory.kernel` sees cache and rows in their order, memory tokens among them, and zeros before.
Shape letters: B lanes, T segment, M memory tokens, R = T + 2 M rows, D model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.config.keys import TOKENS, key
from dist_mem.memory import transformer_xl
from dist_mem.memory.base import (
    Count,
    Inspectable,
    LayerSpec,
    Memory,
    MemoryOutput,
    Opened,
    Places,
    Stem,
    StepOutput,
    evict_all,
    prefix_counts,
)
from dist_mem.memory.parts.inspection import (
    Inspection,
    Rows,
    Spans,
    of_tokens,
    rows_of,
    segment_rows,
    summary_rows,
    tokens_read,
)
from dist_mem.memory.parts.learned_start import LearnedStart
from dist_mem.memory.parts.memory_tokens import MemoryTokenAttention, MemoryTokenOutput
from dist_mem.nn.attention_inputs import newest_rows
from dist_mem.nn.layers import Dropout
from dist_mem.nn.norms import input_norm


class RecurrentMemoryState(NamedTuple):
    # Newest of all rows that the block read; (): memory.mem_len is 0.
    cache: transformer_xl.TransformerXLState | tuple[()]


class TokensState(NamedTuple):
    rows: Tensor  # (B, M, D), memory tokens that the next segment reads
    is_fresh: Tensor  # (B,) bool: nothing is written yet, and the learned rows stand in for `rows`


class MemoryTokens(Stem):
    """Puts the memory tokens before the segment and after it."""

    def __init__(self, *, num_tokens: int, d_model: int, dropout: float, at_end: bool) -> None:
        super().__init__()
        self.num_tokens, self.d_model, self.at_end = num_tokens, d_model, at_end
        self.first = LearnedStart(num_tokens, d_model)
        self.dropout = Dropout(dropout)  # as that of the embedding

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw one row from N(0, 1) and repeat it, as published: only their positions tell the rows apart."""
        if not (start := self.first.start).is_meta:
            start.copy_(start[:1].clone().normal_().expand_as(start))

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> TokensState:
        num_lanes = len(document_ids)
        rows = torch.zeros(num_lanes, self.num_tokens, self.d_model, device=device, dtype=dtype)
        return TokensState(rows, torch.ones(num_lanes, device=device, dtype=torch.bool))

    def forward(self, x: Tensor, state: TokensState) -> tuple[Tensor, TokensState]:
        rows = self.first(state.rows, state.is_fresh).to(x.dtype)
        after = [self.dropout(rows)] if self.at_end else []
        return torch.cat([self.dropout(rows), x, *after], dim=1), state

    def read_top(self, rows: Tensor, state: TokensState, *, seg_len: int) -> tuple[Tensor, TokensState]:
        before, segment, after = rows.tensor_split([self.num_tokens, self.num_tokens + seg_len], dim=1)
        written = (after if self.at_end else before).to(state.rows.dtype)
        return segment, TokensState(written, torch.zeros_like(state.is_fresh))


def check_options(options: RecurrentMemory.Options) -> None:
    """Raise ValueError for options without a meaning."""
    if options.read_cache and not options.mem_len:
        raise ValueError("memory.read_cache is true, but there is no cache: set memory.mem_len, or leave it at false")
    if not options.at_end and not options.read_cache:
        raise ValueError(
            "memory.at_end is false and memory.read_cache too: memory tokens before the segment see none of it, so "
            "they would carry nothing; leave memory.at_end at true, or set memory.mem_len and memory.read_cache"
        )


class RecurrentMemory(Inspectable):
    """Attention of a segment with memory tokens around it, and to a cache if there is one."""

    title = "Recurrent Memory Transformer"
    carries_gradient = True
    can_step = True
    model_keys = ("clamp_len",)

    # The cache's rows could be taken out, but the memory tokens would still tell of them.
    no_forget: ClassVar[str] = "its memory tokens summarise all earlier segments, and none of them is a passage's own"

    @dataclass
    class Options:
        num_tokens: int = key(10, at_least=1, at_most=TOKENS)  # M, memory tokens
        mem_len: int = key(0, at_least=0, at_most=TOKENS)  # rows of Transformer-XL's cache, of all kinds; 0: no cache
        read_cache: bool = False  # memory tokens see the cache too; published runs: false
        at_end: bool = True  # write at the end of the segment; false: what stands before it is carried on
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        check_options(options)
        if spec.llama is not None:
            raise ValueError(
                "memory.kind is rmt, whose memory tokens have Transformer-XL's scores of distances, which a Llama does "
                "not have: set memory.kind to rmt_rows, or model.kind to transformer"
            )
        if spec.same_length:
            raise ValueError(
                "model.same_length hides keys by their number, memory tokens among them: set it to false, or "
                "memory.kind to another than rmt"
            )
        self.norm = input_norm(spec)
        self.attention = MemoryTokenAttention(
            num_tokens=options.num_tokens,
            at_end=options.at_end,
            read_cache=options.read_cache,
            kernel=options.kernel,
            **spec.attention,
        )
        self.num_after = self.attention.num_after

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_tokens": 3}

    @property
    def min_seg_len(self) -> int:
        return self.spec.seg_len if self.attention.counts_rows else 1

    @property
    def evicted_len(self) -> int:
        if self.options.mem_len:
            raise ValueError(
                f"memory.mem_len is {self.options.mem_len}, and memory tokens leave that cache among the tokens: a "
                "memory over rmt gets the rows of segments; set memory.mem_len to 0"
            )
        return super().evicted_len

    @property
    def num_rows(self) -> int:
        return self.options.num_tokens + self.spec.seg_len + self.num_after

    def stem(self) -> MemoryTokens:
        sizes = {"num_tokens": self.options.num_tokens, "d_model": self.spec.d_model}
        return MemoryTokens(**sizes, dropout=self.spec.dropout, at_end=self.options.at_end)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, RecurrentMemory)
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> RecurrentMemoryState:
        if not self.options.mem_len:
            return RecurrentMemoryState(())
        sizes = len(document_ids), self.options.mem_len, self.spec.d_model
        return RecurrentMemoryState(transformer_xl.empty_state(*sizes, device=device, dtype=dtype))

    def counts(self, state: RecurrentMemoryState, num_segments: int) -> dict[str, Count]:
        if not isinstance(state.cache, transformer_xl.TransformerXLState):
            return {}
        return prefix_counts("cache", transformer_xl.counts_of(state.cache, num_segments * self.num_rows))

    def forward(self, x: Tensor, state: RecurrentMemoryState, valid_len: Tensor) -> MemoryOutput:
        attended = self.attend(x, state, valid_len, weights=False)
        if isinstance(state.cache, transformer_xl.TransformerXLState):
            state = RecurrentMemoryState(transformer_xl.push(state.cache, x))
        segment = x[:, self.options.num_tokens : x.shape[1] - self.num_after].detach()
        logs = {} if attended.written is None else {"written": attended.written}
        return MemoryOutput(attended.y, state, {}, attended.query, evict_all(segment, valid_len), logs)

    def attend(self, x: Tensor, state: RecurrentMemoryState, valid_len: Tensor, *, weights: bool) -> MemoryTokenOutput:
        """Attend to the cache, if there is one, and to all rows of x."""
        cache, valid = cache_rows(state, x)
        attended: MemoryTokenOutput = self.attention(self.norm(x), self.norm(cache), valid, valid_len, weights=weights)
        return attended

    def open_segment(self, state: RecurrentMemoryState, rows: Tensor) -> Opened:
        cache, valid = cache_rows(state, rows)
        context, valid = torch.cat([cache, rows], dim=1), F.pad(valid, (0, rows.shape[1]), value=True)
        return self.attention.open(self.norm(context), valid, seg_len=self.spec.seg_len)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.attention.step_rows(self.norm(x), opened, places)

    @torch.no_grad()
    def inspect(
        self, x: Tensor, state: RecurrentMemoryState, valid_len: Tensor, trace: Tensor | None = None
    ) -> Inspection:
        """Return what the segment's tokens read; what they read of the learned first rows is left out.

        Memory tokens, also those in the cache, are rows of `summary`.
        """
        weights = self.attend(x, state, valid_len, weights=True).weights
        assert weights is not None
        num_tokens = tokens_read(trace, valid_len)
        sizes = [self.options.mem_len, self.options.num_tokens]
        cached, read, segment = weights.tensor_split([sizes[0], sum(sizes)], dim=-1)
        rows = {"summary": summary_rows(read, num_tokens), "segment": segment_rows(segment, valid_len)}
        if isinstance(state.cache, transformer_xl.TransformerXLState):
            spans, of_token = self.cache_spans(state.cache.length, num_tokens)
            memory, others = (
                rows_of(cached[..., kind], Spans(*(part[:, kind] for part in spans))) for kind in (of_token, ~of_token)
            )
            rows["summary"] = join_rows(others, rows["summary"])
            if of_token.any():  # a short cache has rows of memory tokens only
                rows["memory"] = memory
        return Inspection(of_tokens(rows), trace=num_tokens + valid_len)

    def cache_spans(self, length: Tensor, num_tokens: Tensor) -> tuple[Spans, Tensor]:
        """Return the tokens of the cache's rows, and which rows are of one token, (mem_len,) bool.

        Args:
            length: (B,) int64, valid rows.  num_tokens: (B,) int64, tokens before the segment.
        """
        seg_len, num_before = self.spec.seg_len, self.options.num_tokens
        age = torch.arange(self.options.mem_len - 1, -1, -1, device=length.device)  # 0: the newest row
        start = -seg_len * (age.div(self.num_rows, rounding_mode="floor") + 1)  # first token of the row's segment
        place = self.num_rows - 1 - age % self.num_rows - num_before  # token of its segment
        of_token = (place >= 0) & (place < seg_len)
        # A memory token before its segment summarises what precedes it, and one after it the segment too.
        end = start + torch.where(of_token, place + 1, seg_len * (place >= seg_len))
        begin = torch.where(of_token, start + place, -num_tokens[:, None])
        return Spans(torch.where(age < length[:, None], begin, end), end.expand_as(begin)), of_token


def cache_rows(state: RecurrentMemoryState, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the cache, (B, mem_len, D), and which are valid, (B, mem_len) bool; without a cache none.

    Args:
        like: (B, R, D), its dtype and device.
    """
    if isinstance(state.cache, transformer_xl.TransformerXLState):
        rows = state.cache.hidden.to(like.dtype)
        return rows, newest_rows(state.cache.length, rows.shape[1])
    return like.new_empty(len(like), 0, like.shape[2]), like.new_empty(len(like), 0, dtype=torch.bool)


def join_rows(first: Rows, second: Rows) -> Rows:
    """Return the rows of both."""
    spans = Spans(*(torch.cat(parts, dim=1) for parts in zip(first.spans, second.spans, strict=True)))
    return Rows(torch.cat([first.weights, second.weights], dim=-1), spans)
