"""Attention over chunks of queries: the scores of one chunk exist at a time, in the forward and in the backward.

The forward keeps queries, keys, values and the table of distances; the backward computes a chunk's probabilities again
from them. So memory grows with the number of keys, not with queries times keys, and keys that no query of a chunk may
see are skipped. Source: Dao et al. 2022, "FlashAttention", sec. 3.1 and appendix B; here with scores by distance, whole
rows of the softmax, and torch's operations instead of a kernel, so it runs on every device and in float64.

Shape letters: B lanes, T queries, J keys, H heads, K head width, Q queries of a chunk, L keys that they may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.attention_inputs import AttentionRead, Inputs, Relative, Visible
from dist_mem.nn.kernel_shapes import fused_shapes
from dist_mem.nn.named_tuples import replace

CHUNK = 128  # queries
_COUNTED = 64  # chunks; on tensors without values, more count as one operation


def chunks(visible: Visible) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each chunk, and the keys that any of them may see."""
    for begin in range(0, visible.num_queries, CHUNK):
        queries = slice(begin, min(begin + CHUNK, visible.num_queries))
        yield queries, visible.reach(queries)


def pad_table(inputs: Inputs) -> Inputs:
    """Add CHUNK columns on both sides of the table, for invisible pairs that belong to a chunk."""
    if inputs.relative is None:
        return inputs
    query, table, first = inputs.relative
    return replace(inputs, relative=Relative(query, F.pad(table, (CHUNK, CHUNK)), first + CHUNK))


def columns(relative: Relative, queries: slice, keys: slice) -> slice:
    """Return the L + Q - 1 columns of the table at which queries and keys meet."""
    begin = relative.first - (queries.stop - 1) + keys.start
    return slice(begin, begin + keys.stop - keys.start + queries.stop - queries.start - 1)


def align_keys(by_column: Tensor, num_keys: int) -> Tensor:
    """Return the view (H, B, Q, L) of (H, B, Q, L + Q - 1) in which key j of query i is column Q - 1 - i + j."""
    heads, lanes, rows, count = by_column.shape
    strides = (lanes * rows * count, rows * count, count - 1, 1)
    return by_column.as_strided((heads, lanes, rows, num_keys), strides, rows - 1)


def chunk_weights(inputs: Inputs, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Return scores and softmax of a chunk, (H, B, Q, L) float32 or wider; weights are 0 where a query sees no key."""
    scores = inputs.query[:, :, queries] @ inputs.key[:, :, keys].mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if inputs.relative is not None:
        relative = inputs.relative
        block = relative.table[:, :, columns(relative, queries, keys)]
        by_column = Relative(relative.query[:, :, queries], block, 0).by_column()
        scores += align_keys(by_column, scores.shape[-1])
    if inputs.bias is not None:
        scores += inputs.bias[:, :, queries, keys]
    mask = inputs.visible.mask(queries, keys)
    scores += torch.where(mask, 0.0, -torch.inf)
    weights = scores.softmax(dim=-1)
    if inputs.visible.sees is not None:
        weights.masked_fill_(~mask.any(dim=-1, keepdim=True), 0.0)
    return scores, weights


def log_sum_exp(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the log of the sum of exponentials over the last axis, from the scores and their softmax, no gradient.

    It is the largest score minus the log of its weight: two maxima instead of a second pass of exponentials. Rows of
    -inf, whose weights are 0, give -inf.
    """
    largest = scores.detach().amax(dim=-1)
    return torch.where(largest == -torch.inf, largest, largest - weights.detach().amax(dim=-1).log())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add products of matrices (H, B, ...) or (H, ...) to `total`, in its dtype."""
    if total.dtype == left.dtype:
        total.view(-1, *total.shape[-2:]).baddbmm_(left.flatten(0, -3), right.flatten(0, -3))
    else:
        total += left @ right


def zeros(like: Tensor) -> Tensor:
    """Return zeros to sum over chunks, in float32 or wider."""
    return like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))


def gradients(inputs: Inputs, of_rows: Tensor, of_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value, and of query and table of `relative`, from those of the outputs."""
    inputs = pad_table(inputs)
    query, key, value, _, relative, _ = inputs
    to_query, to_key, to_value = torch.empty_like(query), zeros(key), zeros(value)
    to_asking = None if relative is None else torch.empty_like(relative.query)
    to_table = None if relative is None else zeros(relative.table)
    for queries, keys in chunks(inputs.visible):
        weights, given = chunk_weights(inputs, queries, keys)[1], of_rows[:, :, queries]
        add_product(to_value[:, :, keys], weights.to(value.dtype).mT, given)
        to_weights = (given @ value[:, :, keys].mT).to(weights.dtype)
        to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        if of_log_sum is not None:
            to_scores += weights * of_log_sum[:, :, queries, None]
        to_scores = to_scores.to(query.dtype)
        to_query[:, :, queries] = to_scores @ key[:, :, keys]
        add_product(to_key[:, :, keys], to_scores.mT, query[:, :, queries])
        if relative is not None and to_asking is not None and to_table is not None:
            asking, block = relative.query[:, :, queries], columns(relative, queries, keys)
            by_column = to_scores.new_zeros(*to_scores.shape[:3], block.stop - block.start)
            align_keys(by_column, to_scores.shape[-1]).copy_(to_scores)
            flat = by_column.flatten(1, 2)
            to_asking[:, :, queries] = (flat @ relative.table[:, :, block].mT).view(asking.shape)
            add_product(to_table[:, :, block], asking.flatten(1, 2).mT, flat)
    to_table = None if to_table is None else to_table[..., CHUNK:-CHUNK].to(query.dtype)
    return to_query, to_key.to(query.dtype), to_value.to(query.dtype), to_asking, to_table


def chunked_rows(inputs: Inputs, *, log_sum: bool) -> AttentionRead:
    """Compute attention chunk by chunk, without gradient."""
    query, value = inputs.query, inputs.value
    num_heads, num_lanes, num_queries, d_head = query.shape
    rows = query.new_empty(num_lanes, num_queries, num_heads, d_head).permute(2, 0, 1, 3)  # `merge_heads` gets a view
    sums = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)) if log_sum else None
    inputs = pad_table(inputs)
    for queries, keys in chunks(inputs.visible):
        scores, weights = chunk_weights(inputs, queries, keys)
        rows[:, :, queries] = weights.to(value.dtype) @ value[:, :, keys]
        if sums is not None:
            sums[:, :, queries] = log_sum_exp(scores, weights)
    return AttentionRead(rows, sums)


def learned_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the tensors that get a gradient."""
    return *inputs[:3], *(() if inputs.relative is None else inputs.relative[:2])


def with_learned(inputs: Inputs, query: Tensor, key: Tensor, value: Tensor, *relative: Tensor) -> Inputs:
    """Return the inputs with other tensors in place of `learned_tensors`."""
    inputs = replace(inputs, query=query, key=key, value=value)
    if inputs.relative is None:
        return inputs
    asking, table = relative
    return replace(inputs, relative=Relative(asking, table, inputs.relative.first))


class _ChunkedAttention(torch.autograd.Function):
    """Attention of `inputs` by `chunked_rows`, with the gradient of `gradients` for `learned_tensors`."""

    @staticmethod
    def forward(ctx: Any, inputs: Inputs, log_sum: bool, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*tensors, inputs.bias)
        ctx.visible, ctx.first = inputs.visible, inputs.relative and inputs.relative.first
        ctx.set_materialize_grads(False)
        return chunked_rows(with_learned(inputs, *(part.detach() for part in tensors)), log_sum=log_sum)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *rest, bias = ctx.saved_tensors
        relative = Relative(rest[0], rest[1], ctx.first) if rest else None
        of_rows = torch.zeros_like(query) if given[0] is None else given[0]
        found = gradients(Inputs(query, key, value, ctx.visible, relative, bias), of_rows, given[1])
        return None, None, *found[: 3 + len(rest)]


def attend_in_chunks(inputs: Inputs, *, log_sum: bool) -> AttentionRead:
    """Compute attention and its gradient chunk by chunk."""
    if inputs.query.is_meta and inputs.visible.num_queries > _COUNTED * CHUNK:
        return AttentionRead(*fused_shapes(inputs.query, inputs.key, inputs.value, None))
    return AttentionRead(*_ChunkedAttention.apply(inputs, log_sum, *learned_tensors(inputs)))
