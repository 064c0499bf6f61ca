"""Attention with rotary positions; in a Llama, several heads of queries may share one of keys and values.

Positions count from the segment's first token: its tokens are 0, ..., T - 1, and context rows are -M, ..., -1. Context
rows are kept as inputs of the block, never as rotated keys: in every segment they are projected with the present
weights and rotated at their place in the window. A score depends on the distance alone, so a row kept for many
segments reads as it would in one long text. Source: Su et al. 2021, "RoFormer", sec. 3.4.2, in the layout of Hugging
Face's Llama (halves of a head, not neighbours, are turned together); Ainslie et al. 2023, "GQA". Shape letters: B
lanes, T segment, M context rows, J = M + T keys, D model, H heads, G heads of keys, K head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dist_mem.nn.attention_inputs import Inputs, Visible
from dist_mem.nn.convolution import short_convolution
from dist_mem.nn.layer_spec import LayerSpec, LlamaSpec
from dist_mem.nn.layers import (
    ContextAttention,
    Dropout,
    Projection,
    RelativeAttention,
)
from dist_mem.nn.plain_attention import BiasedProjection
from dist_mem.nn.stepping import Opened, Places, StepOutput, above_of, attend, kept, lane_heads

Turns = tuple[Tensor, Tensor]  # cosine and sine of the angles, (..., R, K // 2) float32 or wider


def rotate(rows: Tensor, *, first: int, theta: float) -> Tensor:
    """Turn rows (H, B, R, K) at positions first, ..., first + R - 1."""
    return turned(rows, turns(rows, first=first, num_rows=rows.shape[2], theta=theta))


def turns(like: Tensor, *, first: int, num_rows: int, theta: float) -> Turns:
    """Return cosine and sine of the angles position * theta^(-2 k / K) at positions first, ..., first + R - 1.

    In float32 or wider: in half precision, distances above 256 would collapse.

    Args:
        like: (..., K), its dtype and device.
    """
    working, width = torch.promote_types(like.dtype, torch.float32), like.shape[-1]
    position = torch.arange(first, first + num_rows, device=like.device).to(working)
    exponent = torch.arange(0, width // 2 * 2, 2, device=like.device, dtype=working) / width
    angle = position[:, None] * torch.pow(theta, -exponent)
    return angle.cos(), angle.sin()


def turned(rows: Tensor, by: Turns) -> Tensor:
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
        self.num_heads, self.theta = spec.num_heads, llama.rope_theta
        self.num_kv_heads: int = llama.num_kv_heads
        project = BiasedProjection if llama.qkv_bias else Projection
        self.query = project(spec.d_model, width)
        self.key_value = project(spec.d_model, 2 * spec.kv_width)
        self.output = Projection(width, spec.d_model)
        self.convolution = short_convolution([width, 2 * spec.kv_width], kernel)
        self.dropout = Dropout(spec.dropout)

    def share_biases(self, first: object) -> None:
        """Share nothing: this attention has no u and v."""

    def inputs(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Inputs:
        asking = rotate(query, first=0, theta=self.theta) / math.sqrt(query.shape[-1])
        turned_key = rotate(key, first=x.shape[1] - key.shape[2], theta=self.theta)
        return Inputs(asking, repeat_heads(turned_key, self.num_heads), repeat_heads(value, self.num_heads), visible)

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int, is_row: Tensor | None = None) -> Opened:
        """Return what `step` attends to, as `layers.RelativeAttention` does."""
        pairs, tail = self.open_pairs(context, valid, is_row)
        context_len = pairs.shape[1]
        key, value = lane_heads(pairs, 2 * self.num_kv_heads).chunk(2, dim=1)
        table = turns(key, first=-context_len, num_rows=context_len + seg_len, theta=self.theta)
        key = turned(key, (table[0][:context_len], table[1][:context_len]))
        return Opened(kept(torch.cat([key, value], dim=1), valid, seg_len=seg_len, tail=tail), table)

    def step(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepOutput:
        """Attend as `layers.RelativeAttention` does."""
        cos, sin = opened.shared
        row = places.row + len(cos) - places.seg_len
        by = cos[row][:, None], sin[row][:, None]
        heads = self.num_heads, self.num_kv_heads
        rows = lane_heads(torch.cat(self.further(x, opened.lanes, places), dim=-1), heads[0] + 2 * heads[1])
        turning, value = rows.tensor_split([sum(heads)], dim=1)
        query, key = turned(turning, by).split(heads, dim=1)  # turned at once: fewer operations
        pairs = torch.cat([key, value], dim=1)
        read = attend(query, pairs, opened.lanes, places, above=above_of(same_length))
        return StepOutput(self.output(read), turning[:, : heads[0]].transpose(0, 1), opened)


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
