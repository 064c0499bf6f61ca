"""Content scores plus position scores, which are computed by distance and read by key; with a backward of its own.

The position scores of R queries stand in a table of C columns, one a distance. Query r and key j have column
offset + j - r, so they are entry offset + r (C - 1) + j of the flat (R, C) table: a contiguous window of it, and a view
where the published code pads and copies. Shape letters: H heads, B lanes, R queries, J keys, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def align_to_keys(table: Tensor, *, offset: int, num_keys: int) -> Tensor:
    """Return the scores of keys 0, ..., J - 1 from those by distance, a view: (..., R, C) -> (..., R, J).

    Query i of R finds key j in column `offset` - i + j, which is entry `offset` + i (C - 1) + j of the flat (R, C)
    block: a contiguous window, so this returns a view where the published code of Transformer-XL pads and copies.
    """
    num_queries, num_columns = table.shape[-2:]
    rows = table.flatten(-2).narrow(-1, offset, num_queries * (num_columns - 1))
    return rows.unflatten(-1, (num_queries, num_columns - 1))[..., :num_keys]


def _sum(content: Tensor, offsets: Sequence[int], tables: Sequence[Tensor]) -> Tensor:
    num_keys = content.shape[-1]
    parts = [
        align_to_keys(table, offset=offset, num_keys=num_keys) for table, offset in zip(tables, offsets, strict=True)
    ]
    by_position = torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
    # Half-precision terms are added in float32: the two can be large and of opposite sign.
    return content.to(torch.promote_types(content.dtype, torch.float32)) + by_position


class _AddByDistance(torch.autograd.Function):
    """The sum of both scores. autograd's own backward fills each table with zeros and casts the gradient twice."""

    @staticmethod
    def forward(ctx: Any, content: Tensor, offsets: tuple[int, ...], *tables: Tensor) -> Tensor:
        ctx.offsets, ctx.dtype, ctx.shapes = offsets, content.dtype, [table.shape for table in tables]
        return _sum(content, offsets, tables)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].to(ctx.dtype)
        parts = gradient.split([shape[-2] for shape in ctx.shapes], dim=-2)
        tables = [
            _table_gradient(part, shape, offset)
            for part, shape, offset in zip(parts, ctx.shapes, ctx.offsets, strict=True)
        ]
        return gradient, None, *tables


def _table_gradient(gradient: Tensor, shape: torch.Size, offset: int) -> Tensor:
    """Return the gradient of a table from that of its window; only what lies outside of the window is filled with 0."""
    num_queries, num_columns = shape[-2:]
    num_keys = gradient.shape[-1]
    table = gradient.new_empty(shape)
    flat = table.flatten(-2)
    flat[..., :offset] = 0.0
    flat[..., offset + num_queries * (num_columns - 1) :] = 0.0
    align_to_keys(table, offset=offset, num_keys=num_columns - 1)[..., num_keys:] = 0.0
    align_to_keys(table, offset=offset, num_keys=num_keys).copy_(gradient)
    return table


def add_by_distance(content: Tensor, tables: list[Tensor], offsets: list[int]) -> Tensor:
    """Add position scores to content scores, in float32 or wider.

    Args:
        content: (H, B, R, J).  tables: (H, B, R_t, C_t) of consecutive queries, all with the dtype of `content`.
        offsets: the column of the first query and key in each table.
    """
    if not torch.is_grad_enabled():  # torch's compiler cannot trace the class then
        return _sum(content, offsets, tables)
    scores: Tensor = _AddByDistance.apply(content, tuple(offsets), *tables)
    return scores
