"""Memorizing Transformer (Wu et al. 2022): a query reads the k nearest of the keys and values of all earlier segments.

Source: ICLR 2022, arXiv 2203.08913, sec. 3, and the authors' code (google-research/meliad). Each head keeps the newest
M keys and values of its document, of which a query reads the k with the largest products, and a gate per head mixes
this with attention to the segment and the W tokens before it. Rows are written after the segment is read, and never
change: they keep the weights of the day, and get no gradient. Deviations from the code, which options undo: the search
is exact (theirs finds most of the nearest rows), rows not written yet are not read, local attention has positions, and
a token sees itself. The convolution of `memory.kernel` goes on from segment to segment; what it makes of a row is what
is kept.

With `memory.over` queries, keys, values and local attention are those of the memory there, as of a pretrained model,
without a cache; stored are keys before their rotation, of length 1 as otherwise, for each head of keys. `memory.gate:
tanh` makes the share of a head tanh(b), which is 0 at 0: the model begins as without the memory, to the last bit, and b
has a gradient. The paper, which adds a memory to a pretrained model too (sec. 4.6), has the sigmoid. Shape letters: B
lanes, T segment, W cached rows, M rows, k rows that a query reads, D model, H heads, G heads of keys, K head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, key
from dist_mem.memory.base import (
    Count,
    LayerSpec,
    Memory,
    MemoryOutput,
    Opened,
    OverMemory,
    Places,
    StepOutput,
    evict_all,
    exactly,
)
from dist_mem.memory.none import EmptyState, NoMemory, attention_below
from dist_mem.memory.parts.fused_rows import CHUNK, MOST, mix_rows, read_nearest, unit_rows
from dist_mem.memory.parts.inspection import Inspection, Spans, of_tokens, overlaps, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.kernel_choice import by_kernels, choose
from dist_mem.memory.parts.row_mask import Shown, append_shown, take_out, valid_rows
from dist_mem.memory.parts.stored_rows import Store, nearest, read_rows, readable_rows, spans_of, weigh, write
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.convolution import Tail
from dist_mem.nn.layers import DTYPES, Dropout, split_heads
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import input_norm
from dist_mem.nn.unit_attention import CachedRows, UnitAttention, UnitHeads, scale_heads, unit


class MemorizingState(NamedTuple):
    cached_keys: Tensor  # (B, G, W, K), of length 1, of the last W tokens, newest last; 0 where not yet filled
    cached_values: Tensor  # (B, G, W, K)
    store: Store
    cache_shown: Shown = ()
    tail: Tail = ()


class MemorizingOpenLanes(NamedTuple):
    local: Any  # `KeptPairs`, of its own attention or that below
    store: Store


class RetrievedRows(NamedTuple):
    """What queries read of the stored rows."""

    rows: Tensor  # (H, B, T, K)
    share: Tensor  # (H, 1, 1, 1) or (H, B, 1, 1), in a head's output
    nearest: Tensor  # (B, H, T, k) int64, the stored rows that are read
    weights: Tensor  # (B, H, T, k)


class Weights(NamedTuple):
    """How much each query reads of each row; 1 in all, or less where the gate meets an empty memory.

    A negative share of the stored rows, of `gate: tanh`, counts by its size, so that there is more than 1 in all.
    """

    cached: Tensor  # (H, B, T, W)
    segment: Tensor  # (H, B, T, T)
    stored: Tensor  # (H, B, T, M)


class GatedAttentionOutput(NamedTuple):
    y: Tensor  # (B, T, D), before the residual
    rows: UnitHeads  # queries as projected, keys float32 at least, of length 1
    share: Tensor  # (H, 1, 1, 1) or (H, B, 1, 1), of the stored rows in a head's output
    weights: Weights | None


class StoredReading:
    """Reads the stored rows, for a module with these attributes."""

    options: Memorizing.Options
    gate: nn.Parameter  # (H,), b
    scale: nn.Parameter  # (H,)
    attention_dropout: Dropout

    @property
    def number(self) -> int:
        """Number of rows that a query reads, k."""
        return min(self.options.neighbors, self.options.mem_len)

    def retrieve(self, units: Tensor, store: Store, dtype: torch.dtype) -> RetrievedRows:
        """Read the stored rows with queries of length 1, (H, B, T, K); the heads that share keys are further rows."""
        options, (num_heads, _, num_rows, _) = self.options, units.shape
        shared = num_heads // store.keys.shape[1]

        def group(rows: Tensor) -> Tensor:
            return rows.transpose(0, 1).unflatten(1, (-1, shared)).flatten(2, 3)

        def by_head(rows: Tensor) -> Tensor:
            return rows.unflatten(2, (shared, num_rows)).flatten(1, 2)

        index = nearest(
            group(units),
            store,
            number=self.number,
            search=options.search,
            chunk_len=options.chunk_len,
            empty=options.empty_rows,
        )
        weights = weigh(group(scale_heads(units, self.scale)), store, index, empty=options.empty_rows)
        found = by_head(read_rows(self.attention_dropout(weights), store, index)).transpose(0, 1).to(dtype)
        return RetrievedRows(found, self.share(store), by_head(index), by_head(weights))

    def share(self, store: Store) -> Tensor:
        """Return the share of the stored rows in every head's output, (H, 1, 1, 1), or of every head and lane."""
        share = (self.gate.tanh() if self.options.gate == "tanh" else self.gate.sigmoid())[:, None, None, None]
        if self.options.gate_empty:
            return share
        sees = readable_rows(store, empty=False).any(dim=1)
        return torch.where(sees[:, None, None], share, 0.0)

    def all_weights(self, local: Tensor, found: RetrievedRows, *, cache_len: int) -> Weights:
        """Return what queries read of all rows, of the weights of local attention (H, B, T, W + T)."""
        empty = found.weights.new_zeros(*found.weights.shape[:3], self.options.mem_len)
        stored = empty.scatter(3, found.nearest, found.weights).transpose(0, 1)
        gate = found.share.to(local.dtype)
        cached, segment = ((1.0 - gate) * local).tensor_split([cache_len], dim=-1)
        return Weights(cached, segment, gate.abs() * stored)


def mix(local: Tensor, found: RetrievedRows) -> Tensor:
    """Return the rows of heads, (H, B, T, K), of what was read of cache and segment, and of stored rows."""
    gate = found.share.to(local.dtype)
    return gate * found.rows + (1.0 - gate) * local


class OverAttention(nn.Module, StoredReading):
    """The attention of another memory, mixed with what is read of the stored rows."""

    def __init__(self, spec: LayerSpec, options: Memorizing.Options) -> None:
        super().__init__()
        self.options = options
        self.gate = nn.Parameter(torch.zeros(spec.num_heads))
        self.scale = nn.Parameter(torch.ones(spec.num_heads))
        self.attention_dropout = Dropout(spec.attention_dropout)

    def forward(
        self, x: Tensor, state: MemorizingState, over: NoMemory, *, weights: bool = False
    ) -> GatedAttentionOutput:
        """Attend from the segment, x (B, T, D), the input of the block."""
        heads = over.attend_heads(x, weights=weights)
        found = self.retrieve(unit(heads.query), state.store, heads.rows.dtype)
        y = over.attention.merge_output(mix(heads.rows, found))
        rows = UnitHeads(heads.query, unit(heads.key), heads.value)
        shares = None if heads.weights is None else self.all_weights(heads.weights, found, cache_len=0)
        return GatedAttentionOutput(y, rows, found.share, shares)


class GatedAttention(StoredReading, UnitAttention):
    """Attention to cache and segment, mixed with what is read of the stored rows."""

    computes = "stored rows"

    def __init__(self, spec: LayerSpec, options: Memorizing.Options, *, cache_len: int) -> None:
        super().__init__(
            spec, positions=options.positions == "t5", sees_itself=options.sees_itself, kernel=options.kernel
        )
        self.options, self.cache_len = options, cache_len
        self.gate = nn.Parameter(torch.zeros(spec.num_heads))

    def forward(self, x: Tensor, state: MemorizingState, *, weights: bool = False) -> GatedAttentionOutput:
        """Attend from the segment's normed rows, x (B, T, D)."""
        if not weights and by_kernels(self, x, x.shape[1]):
            return self.forward_by_kernels(x, state)
        rows = self.project(x, state.tail)
        local, local_weights = self.attend(rows, self.cached_rows(state), weights=weights)
        found = self.retrieve(rows.query, state.store, rows.value.dtype)
        heads = UnitHeads(rows.raw, rows.key, rows.value, rows.before)
        shares = None if local_weights is None else self.all_weights(local_weights, found, cache_len=self.cache_len)
        return GatedAttentionOutput(self.merge_output(mix(local, found)), heads, found.share, shares)

    def forward_by_kernels(self, x: Tensor, state: MemorizingState) -> GatedAttentionOutput:
        """Attend as `forward`, without rows in float32 or a search in memory."""
        heads, gain = self.heads(x, state.tail), self.scale.float().abs()
        units = UnitHeads(unit_rows(heads.query, gain), unit_rows(heads.key), heads.value)
        local, _ = self.attend_from(units, self.cached_rows(state), weights=False)
        options, share = self.options, self.share(state.store)
        found = read_nearest(
            heads.query, gain, state.store, number=self.number, search=options.search, empty=options.empty_rows
        )
        y = self.merge_output(mix_rows(found, local, share[:, :, 0, 0].float().expand(found.shape[:2])))
        rows = UnitHeads(heads.query, unit_rows(heads.key, is_wide=True), heads.value, heads.before)
        return GatedAttentionOutput(y, rows, share, None)

    def choose_kernels(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return whether our kernels search and read the stored rows, or torch's operators."""
        refused = None
        if self.drops:
            refused = "model.attention_dropout is of weights, which our kernels do not have"
        elif self.options.search == "exact" and self.options.mem_len > CHUNK and self.number > MOST:
            refused = f"our kernels find up to {MOST} nearest rows, memory.neighbors is {self.number}"
        return choose(
            self.back_end,
            device_type,
            num_queries,
            width=self.output.in_features // self.num_heads,
            refused=refused,
            reason="our kernels keep scores and rows in registers",
        )

    def cached_rows(self, state: MemorizingState) -> CachedRows:
        """Return the rows before the segment."""
        valid = valid_rows(state.store.num_written.clamp(max=self.cache_len), self.cache_len, state.cache_shown)
        if self.options.empty_rows:
            valid = torch.ones_like(valid)
            valid = valid & state.cache_shown if isinstance(state.cache_shown, Tensor) else valid
        return CachedRows(state.cached_keys, state.cached_values, valid)


class Memorizing(OverMemory):
    """Attention to the segment and its cache, mixed with the nearest of many stored keys and values."""

    title = "Memorizing Transformer"
    over: NoMemory | None
    is_store = True
    min_seg_len = 1
    can_step = True

    @dataclass
    class Options:
        # the memory whose attention it reads beside, none or causal; null: an attention of its own
        over: Any = None
        mem_len: int = key(8192, at_least=1, at_most=TOKENS)  # M, tokens
        neighbors: int = key(32, at_least=1, at_most=TOKENS)  # k, rows that a query reads
        # the k nearest, or of M / k rows each, r = j modulo k for j < k, the nearest, as in the released code
        search: str = key("exact", choices=("exact", "buckets"))
        cache_len: int | None = key(None, at_least=0, at_most=TOKENS)  # W, tokens seen before the segment; None: T
        positions: str = key("t5", choices=("t5", "none"))  # of local attention; none: as the released configuration
        gate_init: float = key(0.0)  # b
        # the share of the stored rows in a head's output: sigmoid(b), as in the paper | tanh(b), which is 0 at 0
        gate: str = key("sigmoid", choices=("sigmoid", "tanh"))
        # mix in the reading of an empty memory, 0, as in the released code; false: the first segment has no gate
        gate_empty: bool = True
        scale_init: float = key(1.0)  # of scores, whose queries and keys have length 1
        rows_dtype: str = key("fp32", choices=tuple(DTYPES))  # of stored keys and values; fp16 holds values up to 65504
        chunk_len: int = key(128, at_least=1, at_most=TOKENS)  # queries that are compared at once; changes no result
        empty_rows: bool = False  # read rows not written yet, as the released code: keys and values of 0
        sees_itself: bool = True  # false: a token sees only those before it, as in the released code
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options, over: Memory | None = None) -> None:
        super().__init__(spec, options, attention_below(over, options, spec, kind="memorizing"))
        own = (("cache_len", "null", (None, 0)), ("positions", "t5", ("t5",)), ("sees_itself", "true", (True,)))
        for name, unused, values in own:
            if self.over is not None and (given := getattr(options, name)) not in values:
                raise ValueError(
                    f"memory.{name} is {given!r}, which is of an own attention, but memory.over has another one: set "
                    f"memory.{name} to {unused}"
                )
        self.cache_len = spec.seg_len if options.cache_len is None else options.cache_len
        self.key_heads = spec.num_heads
        if options.search == "buckets" and options.mem_len % options.neighbors:
            raise ValueError(
                f"memory.mem_len is {options.mem_len}, but with memory.search = buckets it must be a multiple of "
                f"memory.neighbors = {options.neighbors}"
            )
        if spec.same_length and self.cache_len == 0:
            raise ValueError("model.same_length needs a cache: set it to false, or memory.cache_len to more than 0")
        self.attention: GatedAttention | OverAttention
        if self.over is None:
            self.norm = input_norm(spec)
            self.attention = GatedAttention(spec, options, cache_len=self.cache_len)
        else:
            self.cache_len, self.key_heads = 0, spec.kv_width // spec.d_head
            self.attention = OverAttention(spec, options)

    @classmethod
    def fix_lengths(cls, options: Options, seg_len: int) -> Options:
        has_cache = options.over is None and options.cache_len is None
        return dataclasses.replace(options, cache_len=seg_len) if has_cache else options

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        neighbors = max(2, seg_len // 2)
        mem_len = neighbors * max(1, (2 * seg_len - 1) // neighbors)
        return {"mem_len": mem_len, "neighbors": neighbors, "chunk_len": max(1, seg_len - 1)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.attention.gate.is_meta:
            self.attention.gate.fill_(self.options.gate_init)
            self.attention.scale.fill_(self.options.scale_init)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> MemorizingState:
        num_lanes, heads, width = len(document_ids), self.key_heads, self.spec.d_head
        stored = DTYPES[self.options.rows_dtype]
        if stored == torch.float32:
            stored = torch.promote_types(dtype, stored)

        def empty_rows(num_rows: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_lanes, heads, num_rows, width, device=device, dtype=dtype)

        none_written = torch.zeros(num_lanes, device=device, dtype=torch.int64)
        store = Store(empty_rows(self.options.mem_len, stored), empty_rows(self.options.mem_len, stored), none_written)
        own = self.attention if isinstance(self.attention, GatedAttention) else None
        tail = own.empty_tail(num_lanes, device, dtype) if own else ()
        return MemorizingState(empty_rows(self.cache_len, dtype), empty_rows(self.cache_len, dtype), store, tail=tail)

    def counts(self, state: MemorizingState, num_segments: int) -> dict[str, Count]:
        return {"store.num_written": exactly(state.store.num_written, num_segments * self.spec.seg_len)}

    @property
    def model_keys(self) -> Collection[str]:
        return ("same_length",) if self.over is None else self.over.model_keys

    @classmethod
    def title_of(cls, options: Options) -> str:
        return f"{cls.title} over attention" if options.over else cls.title

    def attend(self, x: Tensor, state: MemorizingState, *, weights: bool = False) -> GatedAttentionOutput:
        """Attend from the segment."""
        found: GatedAttentionOutput
        if self.over is None:
            found = self.attention(self.norm(x), state, weights=weights)
        else:
            found = self.attention(x, state, self.over, weights=weights)
        return found

    def forward(self, x: Tensor, state: MemorizingState, valid_len: Tensor) -> MemoryOutput:
        y, heads, share, _ = self.attend(x, state)
        logs = {
            "share": share.detach().float().mean(dim=(0, 2, 3)),
            "fill": state.store.num_written.clamp(max=self.options.mem_len) / self.options.mem_len,
        }
        return MemoryOutput(y, self.write_rows(state, heads), {}, heads.query, evict_all(x, valid_len), logs)

    def open_segment(self, state: MemorizingState, rows: Tensor) -> Opened:
        if self.over is not None:
            below = self.over.open_segment(EmptyState(), rows)
            return Opened(MemorizingOpenLanes(below.lanes, state.store), below.shared)
        assert isinstance(self.attention, GatedAttention)
        tail = state.tail.clone() if isinstance(state.tail, Tensor) else ()
        local = self.attention.open(self.attention.cached_rows(state), seg_len=self.spec.seg_len, tail=tail)
        return Opened(MemorizingOpenLanes(local.lanes, state.store), local.shared)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        lanes = opened.lanes
        if self.over is not None:
            read, query = self.over.step_heads(x, Opened(lanes.local, opened.shared), places)
            found = self.attention.retrieve(unit(query), lanes.store, read.dtype)
            mixed = mix(split_heads(read, self.spec.num_heads), found)
            return StepOutput(self.over.attention.merge_output(mixed), query, opened)
        assert isinstance(self.attention, GatedAttention)
        further = self.attention.further(self.norm(x), lanes.local, places)
        rows = self.attention.units(self.attention.split(*further))
        local = self.attention.step_rows(rows, lanes.local, opened.shared, places)
        found = self.attention.retrieve(rows.query, lanes.store, rows.value.dtype)
        return StepOutput(self.attention.merge_output(mix(local, found)), rows.raw, opened)

    @torch.no_grad()
    def write_rows(self, state: MemorizingState, heads: UnitHeads) -> MemorizingState:
        """Return the memory after the segment."""
        keys, values = heads.key.transpose(0, 1), heads.value.transpose(0, 1)
        cached_keys = self.push_rows(state.cached_keys, keys)
        shown = append_shown(state.cache_shown, (), keys.shape[2]) if self.cache_len else state.cache_shown
        tail = state.tail
        if isinstance(tail, Tensor) and isinstance(heads.before, Tensor):
            tail = heads.before[:, keys.shape[2] :].to(tail.dtype, copy=True)
        cached_values = self.push_rows(state.cached_values, values)
        return MemorizingState(cached_keys, cached_values, write(state.store, keys, values), shown, tail)

    def push_rows(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the newest W of cached rows (B, H, W, K) and a segment's (B, H, T, K)."""
        skipped = max(0, new.shape[2] - self.cache_len)
        return torch.cat([old[:, :, new.shape[2] :], new[:, :, skipped:].to(old.dtype)], dim=2)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: MemorizingState, valid_len: Tensor, trace: None = None) -> Inspection:
        """Return shares of what is read, which sum to 1; the last W tokens have two rows each."""
        weights = self.attend(x, state, weights=True).weights
        assert weights is not None
        memory = rows_of(torch.cat([weights.cached, weights.stored], dim=-1), self.spans(state))
        return Inspection(of_tokens({"memory": memory, "segment": segment_rows(weights.segment, valid_len)}))

    def spans(self, state: MemorizingState) -> Spans:
        """Return the tokens of the cached rows, then those of the stored ones."""
        cached, stored = token_spans(state.store.num_written, self.cache_len), spans_of(state.store)
        return Spans(*(torch.cat(parts, dim=1) for parts in zip(cached, stored, strict=True)))

    def forget(self, state: MemorizingState, begin: Tensor, end: Tensor, trace: None = None) -> MemorizingState:
        cached, stored = overlaps(self.spans(state), begin, end).tensor_split([self.cache_len], dim=1)
        store, tail = replace(state.store, shown=take_out(state.store.shown, stored)), state.tail
        if isinstance(tail, Tensor):
            newest = token_spans(state.store.num_written, tail.shape[1])
            tail = torch.where(overlaps(newest, begin, end)[..., None], 0.0, tail)
        return replace(state, store=store, cache_shown=take_out(state.cache_shown, cached), tail=tail)
