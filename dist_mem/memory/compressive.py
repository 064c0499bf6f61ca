"""Compressive Transformer (Rae et al. 2020): rows that leave the short-term memory are compressed and kept longer.

Every block attends to [compressed memory; memory; segment] with Transformer-XL's relative positions, where a compressed
row counts as one position. A lane whose memory is full passes its T oldest rows through the compression, which reduces
them to floor(T / c). The compression learns only from the compression loss, the model only from the task loss (sec.
3.2).

Deviations: memories start empty, where the paper starts with rows of zeros that take attention; model and compression
share one optimizer with one clip of the joint gradient norm. A pretrained GPT-2 keeps its attention, whose positions do
not reach beyond the segment: for it `positions` is alibi (Martins et al. 2022, sec. 4.2), or none, which diverges
according to their footnote 8.

The convolution of `memory.kernel` sees compressed memory, memory and segment as one text, before which it sees zeros:
the oldest kernel - 1 compressed rows see fewer. The compression loss compares old and new rows each after zeros. Shape
letters: B lanes, T segment, M memory, C compressed memory, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    StepOutput,
    prefix_counts,
    select_lanes,
)
from dist_mem.memory.parts.compression import COMPRESSIONS, MostUsed
from dist_mem.memory.parts.inspection import Inspection, Spans, overlaps, row_spans, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.row_mask import Shown, take_out, valid_rows, zero_hidden
from dist_mem.nn.layers import AttentionLayer, AttentionOutput, RelativeAttention, newest_rows, visible_keys
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import input_norm
from dist_mem.nn.plain_attention import BIASES, PlainAttention
from dist_mem.nn.rotary_attention import RotaryAttention, attention_of, repeat_heads


class CompressiveState(NamedTuple):
    memory: transformer_xl.TransformerXLState  # M rows, as of Transformer-XL
    compressed: transformer_xl.TransformerXLState  # C rows, older than those


def content_attention(attention: AttentionLayer, query: Tensor, rows: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(K)) v without positions or mask (Algorithm 2), with a gradient for `rows` only.

    Args:
        query: (H, B, T, K).  rows: (B, J, D), normalized.

    Returns:
        (H, B, T, K), one context per query.
    """
    key, value = (repeat_heads(part, len(query)) for part in attention.frozen_pairs(rows))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(value.dtype) @ value


def distance(one: Tensor, other: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the Euclidean norm of the difference over `dims`, in float32 or wider; its gradient at 0 is 0."""
    working = torch.promote_types(one.dtype, torch.float32)
    return ((one.to(working) - other.to(working)).square().sum(dims) + 1e-12).sqrt()


class Compressive(Inspectable):
    """Attention to the segment, a short-term memory and a compressed memory."""

    title = "Compressive Transformer"
    can_step = True

    @dataclass
    class Options:
        mem_len: int = key(128, at_most=TOKENS)  # M, tokens; a multiple of train.seg_len
        cmem_len: int = key(128, at_most=TOKENS)  # C, compressed rows
        compression_rate: int = key(4, at_most=TOKENS)  # c, tokens a compressed row
        compression: str = key("conv", choices=tuple(COMPRESSIONS))  # how c tokens become a row
        # what conv and dilated learn from
        compression_loss: str = key("attention", choices=("attention", "autoencoder"))
        loss_weight: float = key(1.0, at_least=0)  # of that loss
        # relative; GPT-2's attention: alibi | alibi_memory: only beyond the segment | none
        positions: str = key("relative", choices=("relative", *BIASES))
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        check_options(options, seg_len=spec.seg_len)
        self.norm = input_norm(spec)
        if spec.llama is not None and options.positions != "relative":
            raise ValueError(
                f"memory.positions is {options.positions}, which is for GPT-2's attention: in a Llama, set "
                "memory.positions to relative, which means rotary positions there"
            )
        is_relative = options.positions == "relative"
        self.attention: RelativeAttention | RotaryAttention | PlainAttention
        if is_relative:
            self.attention = attention_of(spec, kernel=options.kernel)
        else:
            self.attention = PlainAttention(spec, bias=options.positions, kernel=options.kernel)
        rate = options.compression_rate
        self.compression = COMPRESSIONS[options.compression](spec.d_model, rate=rate)
        self.attention.shows_weights = self.compression.needs_usage
        check_window(options, spec)
        self.evicts_parts = not isinstance(self.compression, MostUsed)
        self.learns = any(True for _ in self.compression.parameters())
        if self.learns and options.compression_loss == "autoencoder":
            self.decoder = nn.ConvTranspose1d(spec.d_model, spec.d_model, rate, stride=rate)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"mem_len": seg_len, "cmem_len": seg_len, "compression_rate": 2}

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        decoder = getattr(self, "decoder", None)
        return [*self.compression.parameters(), *(decoder.parameters() if decoder else ())]

    @property
    def kept_len(self) -> int:
        rows = self.spec.seg_len // self.options.compression_rate
        return int(self.options.mem_len + self.options.cmem_len // rows * self.spec.seg_len)

    @property
    def model_keys(self) -> Collection[str]:
        """ALiBi's distances are not clamped."""
        return transformer_xl.TransformerXL.model_keys if self.options.positions == "relative" else ("same_length",)

    @property
    def min_seg_len(self) -> int:
        return int(self.options.compression_rate)  # the rows pushed out are compressed even if the result is discarded

    @property
    def evicted_len(self) -> int:
        rows = self.spec.seg_len // self.options.compression_rate
        if self.options.cmem_len % rows:
            raise ValueError(
                f"memory.cmem_len is {self.options.cmem_len}, but a memory over this one needs a multiple of the "
                f"{rows} rows that train.seg_len / memory.compression_rate gives"
            )
        return rows

    @property
    def tokens_per_row(self) -> int:
        return int(self.options.compression_rate)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, Compressive)
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> CompressiveState:
        def empty_rows(num_rows: int) -> transformer_xl.TransformerXLState:
            return transformer_xl.empty_state(
                len(document_ids), num_rows, self.spec.d_model, device=device, dtype=dtype
            )

        return CompressiveState(empty_rows(self.options.mem_len), empty_rows(self.options.cmem_len))

    def counts(self, state: CompressiveState, num_segments: int) -> dict[str, Count]:
        seg_len, options = self.spec.seg_len, self.options
        num_compressed = max(0, num_segments - math.ceil(options.mem_len / seg_len)) * (
            seg_len // options.compression_rate
        )
        return {
            **prefix_counts("memory", transformer_xl.counts_of(state.memory, num_segments * seg_len)),
            **prefix_counts("compressed", transformer_xl.counts_of(state.compressed, num_compressed)),
        }

    def forward(self, x: Tensor, state: CompressiveState, valid_len: Tensor) -> MemoryOutput:
        memory, compressed = state
        seg_len, cmem_len, mem_len = x.shape[1], self.options.cmem_len, self.options.mem_len
        attended = self.attend(x, state, weights=self.compression.needs_usage)
        y, query, _ = attended
        old = memory.hidden[:, :seg_len].to(x.dtype)
        usage = self.usage(attended, seg_len)
        new = self.compression(old, usage)
        is_full = memory.length == mem_len
        pushed = transformer_xl.push(compressed, new, self.shown_new(memory, seg_len, usage))
        kept = select_lanes(is_full, pushed, compressed)
        oldest = zero_hidden(compressed.hidden[:, : new.shape[1]], compressed.shown).to(x.dtype)
        evicted = Evicted(oldest, is_full & (compressed.length == cmem_len))
        aux = {}
        if self.learns and torch.is_grad_enabled():
            loss = self.compression_loss(query.detach(), old, new)
            aux["compression"] = torch.where(is_full & (valid_len == seg_len), self.options.loss_weight * loss, 0.0)
        return MemoryOutput(y, CompressiveState(transformer_xl.push(memory, x), kept), aux, query, evicted)

    def attend(self, x: Tensor, state: CompressiveState, *, weights: bool) -> AttentionOutput:
        """Attend to the compressed memory, the memory and the segment, in this order."""
        context, valid = self.context(state, x.dtype)
        visible = visible_keys(valid, x.shape[1], same_length=self.spec.same_length)
        attended: AttentionOutput = self.attention(self.norm(x), context, visible, weights=weights)
        return attended

    def context(self, state: CompressiveState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the normalized rows that the segment attends to, (B, C + M, D), and which are valid, (B, C + M)."""
        parts = state.compressed, state.memory
        valid = [valid_rows(part.length, part.hidden.shape[1], part.shown) for part in parts]
        rows = torch.cat([part.hidden for part in parts], dim=1).to(dtype)
        return self.norm(rows), torch.cat(valid, dim=1)

    def open_segment(self, state: CompressiveState, rows: Tensor) -> Opened:
        return self.attention.open(*self.context(state, rows.dtype), seg_len=self.spec.seg_len)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.attention.step_rows(self.norm(x), opened, places, same_length=self.spec.same_length)

    def shown_new(self, memory: transformer_xl.TransformerXLState, seg_len: int, usage: Tensor | None) -> Shown:
        """Return which rows compressed from the oldest T are shown: those of which nothing was taken out."""
        if not isinstance(memory.shown, Tensor):
            return ()
        if isinstance(self.compression, MostUsed):
            assert usage is not None
            return memory.shown.gather(1, self.compression.choose_rows(usage))
        rate = self.options.compression_rate
        return memory.shown[:, : seg_len // rate * rate].unflatten(1, (-1, rate)).all(dim=2)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: CompressiveState, valid_len: Tensor, trace: Tensor | None = None) -> Inspection:
        """Its value `compression_loss` (B,) is that of the rows that leave the memory now; nan where none do.

        The trace of `most_used` is the token of every compressed row, (B, C) int64, counted from the first token after
        this segment; other compressions have none.
        """
        cmem_len, mem_len, seg_len = self.options.cmem_len, self.options.mem_len, x.shape[1]
        attended = self.attend(x, state, weights=True)
        compressed, memory, segment = attended.shares().tensor_split([cmem_len, cmem_len + mem_len], dim=-1)
        rows = {
            "compressed": rows_of(compressed, self.compressed_spans(state, trace)),
            "memory": rows_of(memory, token_spans(state.memory.length, mem_len)),
            "segment": segment_rows(segment, valid_len),
        }
        leaves = (state.memory.length == mem_len) & (valid_len == seg_len)
        usage = self.usage(attended, seg_len)
        if isinstance(self.compression, MostUsed):
            assert usage is not None
            tokens = rows["compressed"].spans.begin
            pushed = torch.cat([tokens, self.compression.choose_rows(usage) - mem_len], dim=1)[:, -cmem_len:]
            return Inspection(rows, trace=torch.where(leaves[:, None], pushed, tokens) - seg_len)
        if not self.learns:
            return Inspection(rows)
        old = state.memory.hidden[:, :seg_len].to(x.dtype)
        loss = self.compression_loss(attended.query, old, self.compression(old, usage))
        return Inspection(rows, {"compression_loss": torch.where(leaves, loss, torch.nan)})

    def usage(self, attended: AttentionOutput, seg_len: int) -> Tensor | None:
        """Return the mean attention to the oldest T rows of the memory, (B, T), if the compression needs it."""
        first = self.options.cmem_len
        if not self.compression.needs_usage:
            return None
        return attended.shares().detach()[..., first : first + seg_len].float().mean((0, 2))

    def compressed_spans(self, state: CompressiveState, trace: Tensor | None) -> Spans:
        """Return the tokens of the C compressed rows.

        Raises:
            ValueError: `most_used` holds rows, and there is no trace of which tokens they are.
        """
        is_held = newest_rows(state.compressed.length, self.options.cmem_len)
        if isinstance(self.compression, MostUsed):
            if trace is None and is_held.any():
                raise ValueError(
                    "the compressed memory holds rows of tokens that are not known: inspect from the document's start"
                )
            begin = torch.zeros_like(is_held, dtype=torch.int64) if trace is None else trace
            return Spans(begin, begin + is_held)
        sizes = {"kept_len": self.options.mem_len, "seg_len": self.spec.seg_len, "rate": self.tokens_per_row}
        spans = row_spans(self.options.cmem_len, **sizes, per_update=self.spec.seg_len // self.tokens_per_row)
        begin = spans.begin.to(is_held.device).expand_as(is_held)
        return Spans(begin, begin + self.tokens_per_row * is_held)

    def forget(
        self, state: CompressiveState, begin: Tensor, end: Tensor, trace: Tensor | None = None
    ) -> CompressiveState:
        memory, compressed = state
        spans = token_spans(memory.length, self.options.mem_len), self.compressed_spans(state, trace)
        taken = [overlaps(part, begin, end) for part in spans]
        return CompressiveState(
            replace(memory, shown=take_out(memory.shown, taken[0])),
            replace(compressed, shown=take_out(compressed.shown, taken[1])),
        )

    def compression_loss(self, query: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the loss of compressing `old` (B, T, D) to `new` (B, T // c, D): (B,), a norm, not squared (paper).

        attention: norm of the difference between what the segment's queries (H, B, T, K) read from `old` and `new`.
        autoencoder: norm of the difference between `old` and the rows decoded from `new`.
        """
        if self.options.compression_loss == "autoencoder":
            decoded = self.decoder(new.mT).mT
            return distance(decoded, old[:, : decoded.shape[1]], (1, 2))
        with torch.no_grad():
            target = content_attention(self.attention, query, self.norm(old))
        normalized = self.norm(new, frozen=True) if self.spec.norm == "pre" else new
        return distance(content_attention(self.attention, query, normalized), target, (0, 2, 3))


def check_window(options: Compressive.Options, spec: LayerSpec) -> None:
    """Raise ValueError if a Llama's sliding window would hide rows that this memory keeps."""
    window = None if spec.llama is None else spec.llama.sliding_window
    num_keys = options.cmem_len + options.mem_len + spec.seg_len
    if window is not None and num_keys > window:
        raise ValueError(
            f"model.sliding_window is {window}, which hides rows that memory.kind = compressive keeps: give "
            f"memory.cmem_len, memory.mem_len and train.seg_len, now {num_keys} together, at most {window} together, "
            "or set memory.kind to transformer_xl"
        )


def check_options(options: Compressive.Options, *, seg_len: int) -> None:
    """Raise ValueError for lengths that do not fit each other."""
    if options.mem_len < seg_len or options.mem_len % seg_len:
        raise ValueError(
            f"memory.mem_len is {options.mem_len}, but must be a multiple of train.seg_len = {seg_len}: "
            "whole segments leave it for the compressed memory"
        )
    if not 1 <= options.compression_rate <= seg_len:
        raise ValueError(
            f"memory.compression_rate is {options.compression_rate}, but must be 1 to train.seg_len = {seg_len}"
        )
    if options.cmem_len < 1:
        raise ValueError(
            f"memory.cmem_len is {options.cmem_len}, but must be at least 1; without it set memory.kind=transformer_xl"
        )
