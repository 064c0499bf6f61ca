"""Attention with rotary positions; in a Llama, several heads of queries may share one of keys and values.

Positions count from the segment's first token: its tokens are 0, ..., T - 1, and context rows are -M, ..., -1. Context
rows are kept as inputs of the block, never as rotated keys: in every segment they are projected with the present
weights and rotated at their place in the window. A score depends on the distance alone, so a row kept for many
segments reads as it would in one long text. With `model.sliding_window`, a query sees only that many rows: a context of
one row less gives what one long text gives. Source: Su et al. 2021, "RoFormer", sec. 3.4.2, in the layout of Hugging
Face's Llama (halves of a head, not neighbours, are turned together); Ainslie et al. 2023, "GQA"; Jiang et al. 2023,
"Mistral 7B", sec. 2; norms of heads as in Qwen3. Shape letters: B lanes, T segment, M context rows, J = M + T keys, D
model, H heads, G heads of keys, K head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dist_mem.config import RopeConfig
from dist_mem.nn.attention_inputs import Inputs, Visible, within
from dist_mem.nn.constants import constant
from dist_mem.nn.convolution import short_convolution
from dist_mem.nn.layer_spec import LayerSpec, LlamaSpec
from dist_mem.nn.layers import ContextAttention, Dropout, Projection, RelativeAttention
from dist_mem.nn.norms import RMSNorm
from dist_mem.nn.plain_attention import BiasedProjection
from dist_mem.nn.rope import attention_factor, frequencies
from dist_mem.nn.stepping import Opened, Places, StepHeads, StepOutput, above_of, attend, keep_pairs, lane_heads

Turns = tuple[Tensor, Tensor]  # cosine and sine of the angles, (..., R, K // 2) float32 or wider


def turns(
    like: Tensor, *, first: int, num_rows: int, theta: float, rope: RopeConfig | None = None, num_keys: int = 0
) -> Turns:
    """Return cosine and sine of the angles position * theta^(-2 k / K) at positions first, ..., first + R - 1.

    In float32 or wider: in half precision, distances above 256 would collapse.

    Args:
        like: (..., K), its dtype and device.
        rope: changes the angles, see `rope.frequencies`, and the length of what is turned.  num_keys: J, for that.
    """
    working, width = torch.promote_types(like.dtype, torch.float32), like.shape[-1]
    position = torch.arange(first, first + num_rows, device=like.device).to(working)
    if rope is not None:
        values = frequencies(rope, width, theta=theta, num_keys=num_keys)
        angle = position[:, None] * constant(values, device=like.device, dtype=working)
        factor = attention_factor(rope)
        return angle.cos() * factor, angle.sin() * factor
    exponent = torch.arange(0, width // 2 * 2, 2, device=like.device, dtype=working) / width
    angle = position[:, None] * torch.pow(theta, -exponent)
    return angle.cos(), angle.sin()


def turn(rows: Tensor, by: Turns) -> Tensor:
    """Turn rows (..., R, K), and cast at the end.

    The last number of an odd width is not turned; a Llama's is even.
    """
    cos, sin = by
    half = cos.shape[-1]
    one, other, rest = rows.tensor_split([half, 2 * half], dim=-1)
    both = [one * cos - other * sin, other * cos + one * sin]
    return torch.cat([*both, rest] if rest.shape[-1] else both, dim=-1).to(rows.dtype)


def repeat_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Repeat each of G heads for the H / G heads of queries that share it: (G, B, J, K) -> (H, B, J, K)."""
    return rows if len(rows) == num_heads else rows.repeat_interleave(num_heads // len(rows), dim=0)


class RotaryAttention(ContextAttention):
    """Attention with rotary positions; the queries that it returns are those before the rotation."""

    def __init__(self, spec: LayerSpec, *, kernel: int | None = None) -> None:
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        llama = spec.llama or LlamaSpec(spec.num_heads, rope_theta=10_000.0, norm_eps=0.0, qkv_bias=False)
        width = spec.num_heads * spec.d_head
        self.num_heads, self.seg_len = spec.num_heads, spec.seg_len
        self.theta, self.rope = llama.rope_theta, llama.rope
        self.num_kv_heads: int = llama.num_kv_heads
        self.sliding_window = llama.sliding_window
        project = BiasedProjection if llama.qkv_bias else Projection
        self.query = project(spec.d_model, width)
        self.key_value = project(spec.d_model, 2 * spec.kv_width)
        self.output = Projection(width, spec.d_model)
        # Of every head, with the same weights.
        self.query_norm = RMSNorm(spec.d_head, eps=llama.norm_eps) if llama.qk_norm else None
        self.key_norm = RMSNorm(spec.d_head, eps=llama.norm_eps) if llama.qk_norm else None
        self.convolution = short_convolution([width, 2 * spec.kv_width], kernel)
        self.dropout = Dropout(spec.dropout)

    def project_heads(
        self, x: Tensor, context: Tensor, visible: Visible | Tensor, is_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as the base class does; queries and keys are normed."""
        query, key, value = super().project_heads(x, context, visible, is_row)
        return self.normed_query(query), self.normed_key(key), value

    def frozen_pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the base class does; keys are normed."""
        key, value = super().frozen_pairs(rows)
        return self.normed_key(key, frozen=True), value

    def normed_query(self, query: Tensor) -> Tensor:
        """Return queries (..., K), normed if the model norms them."""
        return query if self.query_norm is None else self.query_norm(query)

    def normed_key(self, key: Tensor, *, frozen: bool = False) -> Tensor:
        """Return keys (..., K), normed if the model norms them."""
        return key if self.key_norm is None else self.key_norm(key, frozen)

    def table(self, like: Tensor, *, context_len: int, first: int, num_rows: int) -> Turns:
        """Return `turns` of this model, also for a segment of which fewer than T rows are computed."""
        num_keys = context_len + self.seg_len
        return turns(like, first=first, num_rows=num_rows, theta=self.theta, rope=self.rope, num_keys=num_keys)

    def inputs(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Inputs:
        num_rows, num_keys = query.shape[2], key.shape[2]
        context_len = num_keys - num_rows
        by = self.table(query, context_len=context_len, first=0, num_rows=num_rows)
        asking = turn(query, by) / math.sqrt(query.shape[-1])
        by = self.table(key, context_len=context_len, first=-context_len, num_rows=num_keys)
        keys = repeat_heads(turn(key, by), self.num_heads), repeat_heads(value, self.num_heads)
        return Inputs(asking, *keys, within(visible, self.sliding_window))

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int, is_row: Tensor | None = None) -> Opened:
        """Return what `step_rows` attends to, as `layers.RelativeAttention` does."""
        pairs, tail = self.open_pairs(context, valid, is_row)
        context_len = pairs.shape[1]
        key, value = lane_heads(pairs, 2 * self.num_kv_heads).chunk(2, dim=1)
        table = self.table(key, context_len=context_len, first=-context_len, num_rows=context_len + seg_len)
        key = turn(self.normed_key(key), (table[0][:context_len], table[1][:context_len]))
        return Opened(keep_pairs(torch.cat([key, value], dim=1), valid, seg_len=seg_len, tail=tail), table)

    def step_rows(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepOutput:
        """Attend as `layers.RelativeAttention` does."""
        heads = self.step_heads(x, opened, places, same_length=same_length)
        return StepOutput(self.output(heads.rows), heads.query, opened)

    def step_heads(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepHeads:
        """Attend as `step_rows`, without the output projection."""
        cos, sin = opened.shared
        context_len = len(cos) - places.seg_len
        row = places.row + context_len
        by = cos[row][:, None], sin[row][:, None]
        heads = self.num_heads, self.num_kv_heads
        rows = lane_heads(torch.cat(self.further(x, opened.lanes, places), dim=-1), heads[0] + 2 * heads[1])
        turning, value = rows.tensor_split([sum(heads)], dim=1)
        if self.query_norm is not None:
            query, key = turning.split(heads, dim=1)
            turning = torch.cat([self.normed_query(query), self.normed_key(key)], dim=1)
        query, key = turn(turning, by).split(heads, dim=1)  # turned at once: fewer operations
        pairs = torch.cat([key, value], dim=1)
        limits = [above_of(same_length), self.sliding_window and context_len - self.sliding_window]
        above = max((limit for limit in limits if limit is not None), default=None)
        read = attend(query, pairs, opened.lanes, places, above=above)
        return StepHeads(read, turning[:, : heads[0]].transpose(0, 1))


def attention_of(
    spec: LayerSpec, positions: str | None = None, *, kernel: int | None = None
) -> RelativeAttention | RotaryAttention:
    """Return attention with Transformer-XL's positions, or rotary ones.

    Args:
        positions: relative | rotary | None: relative, and in a Llama rotary.
        kernel: tokens that a convolution of queries, keys and values sees; None: there is none.

    Raises:
        ValueError: the model has no such positions.
    """
    own = "relative" if spec.llama is None else "rotary"
    if spec.llama is not None and positions == "relative":
        raise ValueError(
            "memory.positions is relative, but a Llama's are rotary: leave memory.positions out, or set model.kind to "
            "transformer"
        )
    if (positions or own) == "relative":
        return RelativeAttention(**spec.attention, kernel=kernel)
    if spec.clamp_len is not None:
        raise ValueError(
            f"model.clamp_len is {spec.clamp_len}, but with memory.positions = rotary no distance is clamped: set "
            "model.clamp_len to null, or memory.positions to relative"
        )
    return RotaryAttention(spec, kernel=kernel)
