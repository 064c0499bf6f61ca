"""Transformer layers without memory: relative attention, feed-forward, masks.

A memory layer (dist_mem/memory/) decides which rows are attended to; this module attends. Source: Dai et al. 2019,
"Transformer-XL", sec. 3.3, and the authors' PyTorch code. Shape letters: B lanes, T segment, M context rows, J = M + T
keys, D model, H heads, K head width.

Inside attention the head axis comes first, (H, B, T, K). The position scores of all lanes are then one product per head
with a table that the lanes share, and the table is never expanded over the lanes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # train.precision


def sinusoid_table(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Return R_t = [sin(t w), cos(t w)], w_j = 10000^(-2j/D), as two halves, not interleaved: (J,) -> (J, D).

    Angles are computed in float32 or wider and cast at the end: in half precision, distances above 256 would collapse.
    """
    working = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=working) / d_model
    angles = distances.to(working)[:, None] * torch.pow(10000.0, -exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :d_model].to(dtype)


def key_distances(num_keys: int, *, clamp_len: int | None, device: torch.device) -> Tensor:
    """Return distances J - 1 down to 0, clamped at clamp_len, then a dummy for `align_distances`: (J + 1,) int64."""
    distances = torch.arange(num_keys - 1, -2, -1, device=device)
    return distances.clamp(min=0, max=clamp_len)


def align_distances(scores: Tensor) -> Tensor:
    """Turn columns of distances J - 1, ..., 0, dummy into keys 0, ..., J - 1: (..., T, J + 1) -> (..., T, J).

    Query i is at key J - T + i, so key j is at distance J - T + i - j, which is column T - 1 - i + j. That is entry
    (T - 1) + i J + j of the flat (T, J + 1) block: a contiguous window, so this returns a view where the published code
    pads and copies. Only keys up to the query's position are meaningful; the rest must be masked.
    """
    num_queries, num_columns = scores.shape[-2:]
    num_keys = num_columns - 1
    window = scores.flatten(-2).narrow(-1, num_queries - 1, num_queries * num_keys)
    return window.unflatten(-1, (num_queries, num_keys))


def visible_keys(context_valid: Tensor, num_queries: int, *, same_length: bool) -> Tensor:
    """Return which keys each query may see: (B, M) bool valid context rows -> (B, T, M + T) bool.

    Query i sees the valid context and the segment up to itself; with `same_length` only keys j > i, so exactly M of
    them once the context is full. A query always sees itself, so no row is empty and the softmax never computes 0/0,
    even in idle lanes.
    """
    context_len = context_valid.shape[1]
    query = torch.arange(num_queries, device=context_valid.device)[:, None]
    key = torch.arange(context_len + num_queries, device=context_valid.device)
    reachable = key <= context_len + query
    if same_length:
        reachable = reachable & (key > query)
    return reachable & F.pad(context_valid, (0, num_queries), value=True)[:, None]


def newest_rows(length: Tensor, num_rows: int) -> Tensor:
    """Return the mask of the `length` newest of right-aligned rows: (B,) int64 -> (B, num_rows) bool."""
    return torch.arange(num_rows, device=length.device) >= num_rows - length[:, None]


def split_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Split the last axis into heads: (B, T, H * K) -> (H, B, T, K), a view."""
    return rows.unflatten(-1, (num_heads, -1)).permute(2, 0, 1, 3)


def merge_heads(context: Tensor) -> Tensor:
    """Concatenate the heads: (H, B, T, K) -> (B, T, H * K)."""
    return context.permute(1, 2, 0, 3).flatten(-2)


def relative_scores(
    query: Tensor, key: Tensor, position: Tensor, *, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """Compute score(i, j) = [(q_i + u) . k_j + (q_i + v) . r_(i-j)] / sqrt(K) in float32 or wider.

    Args:
        query: (H, B, T, K).  key: (H, B, J, K).  position: (H, K, J + 1), W_r R_t at `key_distances`.
        content_bias, position_bias: u and v, (H, K).

    Returns:
        (H, B, T, J). Entries of keys after the query are meaningless.
    """
    num_heads, num_lanes, num_queries, d_head = query.shape
    scale = 1.0 / math.sqrt(d_head)
    content_query = (query + content_bias[:, None, None]) * scale
    position_query = (query + position_bias[:, None, None]) * scale
    by_distance = torch.bmm(position_query.reshape(num_heads, num_lanes * num_queries, d_head), position)
    by_position = align_distances(by_distance.unflatten(1, (num_lanes, num_queries)))
    by_content = content_query @ key.transpose(-1, -2)
    # Half-precision terms are added in float32: the two can be large and of opposite sign.
    return by_content.to(torch.promote_types(by_content.dtype, torch.float32)) + by_position


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over the visible keys: scores (H, B, T, J) float32 or float64, visible (B, T, J) bool."""
    # Add the mask: masked_fill costs four times as much, and again in the backward, where its gradient is 0 anyway.
    return (scores + torch.where(visible, 0.0, -math.inf)).softmax(dim=-1)


class Dropout(nn.Module):
    """Dropout that draws 16 random bits an element on CPUs: 1.5 (fp32) to 2.3 times (bf16) as fast as torch's."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.keep = round((1.0 - probability) * 2**16)  # of 2^16; the scale below is exact for the rounded probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 2**16:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, 1.0 - self.keep / 2**16)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.int16)[: x.numel()].view(x.shape) < self.keep - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / self.keep)


class _FrozenProduct(torch.autograd.Function):
    """x W^T with a gradient for x only. Saves the parameter itself, which ZeRO-3 gathers again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight, None


class Projection(nn.Linear):
    """A linear map without bias; if called with `frozen`, the input gets a gradient and the weight does not."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        return _FrozenProduct.apply(x, self.weight) if frozen else super().forward(x)


class Norm(nn.LayerNorm):
    """Layer norm; if called with `frozen`, the input gets a gradient, and gain and bias do not."""

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        gain, bias = (self.weight.detach(), self.bias.detach()) if frozen else (self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class Attended(NamedTuple):
    y: Tensor  # (B, T, D), before the residual
    query: Tensor  # (H, B, T, K), before biases
    weights: Tensor  # (H, B, T, M + T), attention probabilities before dropout


class RelativeProjections(nn.Module):
    """The parameters of attention with relative positions."""

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        d_head: int,
        dropout: float,
        attention_dropout: float,
        clamp_len: int | None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.clamp_len = clamp_len
        width = num_heads * d_head
        self.query = Projection(d_model, width)
        self.key_value = Projection(d_model, 2 * width)
        self.position = nn.Linear(d_model, width, bias=False)
        self.output = nn.Linear(width, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, d_head))  # u, see share_biases
        self.position_bias = nn.Parameter(torch.zeros(num_heads, d_head))  # v
        self.dropout = Dropout(dropout)
        self.attention_dropout = Dropout(attention_dropout)

    def share_biases(self, first: nn.Module) -> None:
        """Use u and v of another layer; both register them, because ZeRO-3 gathers what a module itself registers."""
        assert isinstance(first, RelativeProjections)
        self.content_bias = first.content_bias
        self.position_bias = first.position_bias

    def position_keys(self, x: Tensor, *, num_keys: int) -> Tensor:
        """Return W_r R_t at every distance: (H, K, J + 1).

        Deviation: the published code applies dropout to R once per forward, for all layers; here each layer draws a
        separate mask.
        """
        distances = key_distances(num_keys, clamp_len=self.clamp_len, device=x.device)
        table = self.dropout(sinusoid_table(distances, x.shape[-1], x.dtype))
        return self.position(table).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)


class RelativeAttention(RelativeProjections):
    """Multi-head attention with relative positions over context rows and the segment itself."""

    def forward(self, x: Tensor, context: Tensor, visible: Tensor) -> Attended:
        """Attend from the segment to the context and the segment.

        Args:
            x: (B, T, D).  context: (B, M, D), M may be 0.  visible: (B, T, M + T) bool, see `visible_keys`.
        """
        query = split_heads(self.query(x), self.num_heads)
        # Project them separately, so that no gradient is computed for context rows that need none.
        parts = [rows for rows in (context, x) if rows.shape[1]]
        pairs = [split_heads(self.key_value(rows), 2 * self.num_heads) for rows in parts]
        key, value = torch.cat(pairs, dim=2).chunk(2)
        scores = relative_scores(
            query,
            key,
            self.position_keys(x, num_keys=key.shape[2]),
            content_bias=self.content_bias,
            position_bias=self.position_bias,
        )
        weights = masked_softmax(scores, visible).to(value.dtype)
        context_rows = self.attention_dropout(weights) @ value
        return Attended(self.dropout(self.output(merge_heads(context_rows))), query, weights)


class FeedForward(nn.Module):
    """Feed-forward layer: D -> d_inner, ReLU, dropout, -> D, dropout."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, d_inner)
        self.contract = nn.Linear(d_inner, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.contract(self.dropout(F.relu(self.expand(x), inplace=True))))


@torch.no_grad()
def initialize(module: nn.Module, *, std: float) -> None:
    """Draw matrices from N(0, std^2), set biases to 0 and layer norms to the identity.

    Deviation: the published code draws layer norm gains from N(1, 0.02) and embedding projections from N(0, 0.01).
    """
    for child in module.modules():
        norm = isinstance(child, nn.LayerNorm)
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.is_meta:
                continue  # it has no values; drawing them would import torch._dynamo, which costs a --check one second
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.constant_(parameter, 1.0 if norm and name == "weight" else 0.0)
