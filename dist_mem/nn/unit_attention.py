"""Attention with queries and keys of length 1, a scale per head and positions by T5's buckets.

Source: the released code of Memorizing Transformers (Wu et al. 2022; google-research/meliad); Henry et al. 2020,
"Query-Key Normalization"; Raffel et al. 2020, "T5", sec. 2.1. The scale also multiplies the positions, as there. Shape
letters: B lanes, T segment, W cached rows, J = W + T keys, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.attention_inputs import Inputs, Relative, Visible
from dist_mem.nn.convolution import Tail, short_convolution
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import AttentionLayer, Dropout, Projection, key_distances, split_heads
from dist_mem.nn.stepping import DistanceQuery, KeptPairs, Opened, Places, attend, keep_pairs

NUM_BUCKETS, FARTHEST = 32, 128  # T5's: half of the buckets are of one distance, the last begins below 128 tokens


class ProjectedRows(NamedTuple):
    """What the rows of a segment project to."""

    raw: Tensor  # (H, B, T, K), queries
    query: Tensor  # (H, B, T, K) float32 at least, of length 1
    key: Tensor  # (H, B, T, K) float32 at least, of length 1
    value: Tensor  # (H, B, T, K)
    before: Tail = ()  # as in Heads


class UnitHeads(NamedTuple):
    """Rows of all heads, as projected."""

    query: Tensor  # (H, B, T, K)
    key: Tensor  # (H, B, T, K)
    value: Tensor  # (H, B, T, K)
    before: Tail = ()  # (B, kernel - 1 + T, W), projected rows before a convolution, with the tail before them


class CachedRows(NamedTuple):
    """Rows before the segment, newest last."""

    key: Tensor  # (B, H, W, K)
    value: Tensor  # (B, H, W, K)
    visible: Tensor  # (B, W) bool


def unit(rows: Tensor) -> Tensor:
    """Divide rows (..., K) by their length, in float32 or wider."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def scale_heads(query: Tensor, scale: Tensor) -> Tensor:
    """Return queries (H, B, T, K) times the absolute value of their head's scale, (H,)."""
    return query * scale.to(query.dtype).abs()[:, None, None, None]


def buckets(distances: Tensor) -> Tensor:
    """Return T5's bucket of each distance, (J,) int64: 16 of one distance each, and 16 that widen up to 128 tokens.

    In float32, as published.
    """
    exact = NUM_BUCKETS // 2
    far = torch.log(distances.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (NUM_BUCKETS - exact)
    return torch.where(distances < exact, distances, (exact + far.floor().long()).clamp(max=NUM_BUCKETS - 1))


class UnitAttention(AttentionLayer):
    """The projections, and attention to cached rows and the segment."""

    has_numbers = True

    def __init__(self, spec: LayerSpec, *, positions: bool, sees_itself: bool, kernel: int | None = None) -> None:
        """Make the layer.

        Args:
            positions: whether scores depend on the distance.
            sees_itself: false: a token sees only the tokens before it, as in the released code.
        """
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        if not sees_itself and spec.back_end not in ("auto", "simple"):
            raise ValueError(
                f"model.attention is {spec.back_end}, but memory.sees_itself is false, whose mask only simple has: set "
                "model.attention to auto or simple, or memory.sees_itself to true"
            )
        width = spec.num_heads * spec.d_head
        self.num_heads, self.sees_itself = spec.num_heads, sees_itself
        self.above = (0 if sees_itself else -1) if spec.same_length else None  # as in Visible
        self.relative_width = spec.d_head if positions else None
        self.query, self.key_value = Projection(spec.d_model, width), Projection(spec.d_model, 2 * width)
        self.output = Projection(width, spec.d_model)
        self.convolution = short_convolution([width, 2 * width], kernel)
        self.dropout = Dropout(spec.dropout)
        self.scale = nn.Parameter(torch.ones(spec.num_heads))  # its absolute value counts
        self.position = nn.Parameter(torch.zeros(spec.num_heads, NUM_BUCKETS)) if positions else None

    def choose(self, device_type: str, num_queries: int) -> BackEndChoice:
        if self.sees_itself:
            return super().choose(device_type, num_queries)
        return BackEndChoice("simple", "memory.sees_itself is false, whose mask only it has")

    def heads(self, rows: Tensor, tail: Tail = ()) -> UnitHeads:
        """Project rows (B, T, D); `tail`: what a convolution sees before them."""
        return self.split(*self.after_tail(rows, tail))

    def split(self, query: Tensor, pairs: Tensor, before: Tail = ()) -> UnitHeads:
        """Split queries (B, T, H K), and keys and values (B, T, 2 H K), into heads."""
        key, value = split_heads(pairs, 2 * self.num_heads).chunk(2)
        return UnitHeads(split_heads(query, self.num_heads), key, value, before)

    def project(self, rows: Tensor, tail: Tail = ()) -> ProjectedRows:
        """Project rows (B, T, D), and divide queries and keys by their length."""
        return self.units(self.heads(rows, tail))

    def units(self, heads: UnitHeads) -> ProjectedRows:
        """Divide queries and keys by their length."""
        return ProjectedRows(heads.query, unit(heads.query), unit(heads.key), heads.value, heads.before)

    def scale_query(self, query: Tensor) -> Tensor:
        """Return queries (H, B, T, K) times the scale of their head."""
        return scale_heads(query, self.scale)

    def attend(self, rows: ProjectedRows, cached: CachedRows, *, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return what queries read of cache and segment, (H, B, T, K), and if asked for the weights (H, B, T, J)."""
        dtype = rows.value.dtype
        heads = UnitHeads(self.scale_query(rows.query).to(dtype), rows.key.to(dtype), rows.value)
        return self.attend_from(heads, cached, weights=weights)

    def attend_from(self, heads: UnitHeads, cached: CachedRows, *, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend as `attend`, with keys of length 1, and queries of the length of their scale."""
        query, dtype = heads.query, heads.value.dtype
        key = torch.cat([cached.key.to(dtype).transpose(0, 1), heads.key], dim=2)
        value = torch.cat([cached.value.to(dtype).transpose(0, 1), heads.value], dim=2)
        visible: Any = self.visible_keys(cached.visible, query.shape[2])
        relative = self.by_distance(query, key)
        if self.sees_itself:
            return self.read(Inputs(query, key, value, visible, relative), weights=weights)
        # The first token of a document sees nothing, and reads 0: a mask that shows it everything keeps 0/0 away.
        mask = visible.mask()
        sees = mask.any(dim=-1, keepdim=True)
        visible = mask | ~sees
        found, shares = self.read(Inputs(query, key, value, visible, relative), weights=weights)
        return found * sees, None if shares is None else shares * sees

    def open(self, cached: CachedRows, *, seg_len: int, tail: Tail = ()) -> Opened:
        """Return what `step_rows` attends to at first."""
        pairs = torch.cat([cached.key, cached.value], dim=1)
        num_keys = pairs.shape[2] + seg_len
        table = None
        if self.position is not None:
            table = self.distance_table(self.position, num_keys)[:, None] * self.scale.abs()[:, None, None]
        return Opened(keep_pairs(pairs, cached.visible, seg_len=seg_len, tail=tail), table)

    def step_rows(self, rows: ProjectedRows, to: KeptPairs, table: Tensor | None, places: Places) -> Tensor:
        """Return what further rows read of cache and segment, (H, B, R, K), as `attend`."""
        query = self.scale_query(rows.query).transpose(0, 1)
        by_distance = None if table is None else DistanceQuery(torch.ones_like(query[..., :1]), table.to(query.dtype))
        pairs = torch.cat([rows.key, rows.value]).transpose(0, 1)
        found = attend(
            query * math.sqrt(query.shape[-1]),  # by which `attend` divides
            pairs,
            to,
            places,
            above=self.above,
            sees_itself=self.sees_itself,
            by_distance=by_distance,
        )
        return split_heads(found, self.num_heads).to(rows.value.dtype)

    def visible_keys(self, cached: Tensor, num_queries: int) -> Visible:
        """Return which keys queries see: `layers.visible_keys`, one key earlier if tokens do not see themselves."""
        cache_len = cached.shape[1]
        upto = cache_len - (0 if self.sees_itself else 1)
        return Visible(cached, num_queries, cache_len + num_queries, above=self.above, upto=upto)

    def by_distance(self, query: Tensor, key: Tensor) -> Relative | None:
        """Return the scores by distance: a number per head and bucket, times the head's scale."""
        if self.position is None:
            return None
        table = self.distance_table(self.position, key.shape[2]).to(query.dtype)
        scale = self.scale_query(torch.ones_like(query[..., :1]))
        return Relative(scale, table[:, None], query.shape[2] - 1)

    @staticmethod
    def distance_table(position: Tensor, num_keys: int) -> Tensor:
        """Return the numbers of distances J - 1 down to 0 and of a dummy, (H, J + 1), from those of buckets."""
        distances = key_distances(num_keys, clamp_len=None, device=position.device)
        # A product instead of an index: its gradient is the same bits in every run, also on GPUs.
        chosen = buckets(distances) == torch.arange(NUM_BUCKETS, device=position.device)[:, None]
        return position @ chosen.to(position.dtype)
