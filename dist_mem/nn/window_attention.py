"""Attention to a window of keys by the flash kernels that torch has for GPUs, as operators that compile.

A lane is one sequence that sees its keys from the lower right corner on: its last query sees its last key. Rows of the
context that are not valid are a sequence of their own without queries, so that no mask is needed, no invisible tile is
computed, and the host does not wait for the lengths. The backward sums in a fixed order, where torch's own call of
these kernels does not, so a resumed run has equal bits. Shape letters: B lanes, T queries, J keys, M context rows, H
heads, K head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.nn.attention_inputs import Inputs, Visible
from dist_mem.nn.kernel_shapes import device_type_of

_WIDEST = 256  # K of the kernels, which take multiples of 8


def is_window(visible: Visible) -> bool:
    """Return whether each query sees the valid keys up to its own, perhaps only its newest ones."""
    is_tail = visible.is_tail or visible.valid.shape[1] == 0
    return is_tail and visible.sees is None and visible.upto == visible.num_keys - visible.num_queries


def has_window_kernel(inputs: Inputs) -> bool:
    """Return whether the kernels compute this attention; they have no scores besides those of queries and keys."""
    query = inputs.query
    width = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= _WIDEST
    is_plain = inputs.relative is None and inputs.bias is None
    return device_type_of(query) == "cuda" and fits and is_plain and is_window(inputs.visible)


def window_attention(inputs: Inputs) -> Tensor:
    """Return the rows (H, B, T, K) that queries read of their windows, with a gradient."""
    query, key, value, visible, *_ = inputs
    above, upto = visible.above, visible.num_keys - visible.num_queries
    first_key = (~visible.valid).sum(dim=1, dtype=torch.int32) if visible.valid.shape[1] else None
    # Keys before a query's own that it sees, as the kernels count them; -1: all.
    before = -1 if above is None else upto - above - 1
    rows: Tensor = _WindowAttention.apply(query, key, value, first_key, before)
    return rows


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, first_key: Tensor | None, before: int) -> Tensor:
        rows, log_sum = torch.ops.dist_mem.window_attention(query, key, value, first_key, before)
        ctx.save_for_backward(rows, log_sum, query, key, value, first_key)
        ctx.before = before
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.dist_mem.window_attention_backward(gradients[0], *ctx.saved_tensors, ctx.before)
        return *found, None, None


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? first_key, int before"
_OPS.define(f"window_attention({_INPUTS}) -> (Tensor, Tensor)")
_OPS.define(
    f"window_attention_backward(Tensor of_rows, Tensor rows, Tensor log_sum, {_INPUTS}) -> (Tensor, Tensor, Tensor)"
)


class _Sequences(NamedTuple):
    """Where sequences begin and end, and the longest ones; without context rows the tensors have a lane axis instead.

    The first of two sequences of a lane has its invalid context rows and no query.
    """

    queries: Tensor | None  # (2 B + 1,) int32
    keys: Tensor | None  # (2 B + 1,) int32
    most_queries: int
    most_keys: int

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows (H, B, R, K) as the kernels read them: (B R, H, K), or (B, R, H, K)."""
        by_lane = rows.permute(1, 2, 0, 3)
        by_lane = by_lane if by_lane.stride(-1) == 1 else by_lane.contiguous()
        return by_lane if self.queries is None else by_lane.flatten(0, 1)


def _sequences(query: Tensor, key: Tensor, first_key: Tensor | None) -> _Sequences:
    lanes, num_queries, num_keys = query.shape[1], query.shape[2], key.shape[2]
    if first_key is None:
        return _Sequences(None, None, num_queries, num_keys)
    end = torch.arange(1, lanes + 1, dtype=torch.int32, device=query.device)
    begin = end - 1
    of_queries = torch.stack([begin * num_queries, end * num_queries], dim=1)
    of_keys = torch.stack([begin * num_keys + first_key, end * num_keys], dim=1)
    ends = (torch.cat([begin.new_zeros(1), each.flatten()]) for each in (of_queries, of_keys))
    return _Sequences(next(ends), next(ends), num_queries, num_keys)


def _unpack(rows: Tensor, like: Tensor) -> Tensor:
    """Return packed rows as (H, B, R, K)."""
    lanes, count = like.shape[1:3]
    return rows.view(lanes, count, *rows.shape[-2:]).permute(2, 0, 1, 3)


def _forward(query: Tensor, key: Tensor, value: Tensor, first_key: Tensor | None, before: int) -> tuple[Tensor, Tensor]:
    of = _sequences(query, key, first_key)
    rows, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *map(of.pack, (query, key, value)), *of, 0.0, before < 0, False, **_window_constants(before)
    )
    return _unpack(rows, query), log_sum


def _backward(
    of_rows: Tensor,
    rows: Tensor,
    log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor | None,
    before: int,
) -> tuple[Tensor, ...]:
    of = _sequences(query, key, first_key)
    packed = [of.pack(part) for part in (of_rows, query, key, value, rows)]
    seeds = query.new_zeros(2, dtype=torch.uint64), query.new_zeros((), dtype=torch.uint64)  # of a dropout that is 0
    with _in_a_fixed_order():
        found = torch.ops.aten._flash_attention_backward(
            *packed, log_sum, *of, 0.0, before < 0, *seeds, **_window_constants(before)
        )
    return tuple(_unpack(gradient, like) for gradient, like in zip(found, (query, key, value), strict=True))


def _window_constants(before: int) -> dict[str, Any]:
    return {"scale": 1.0, "window_size_left": before, "window_size_right": 0}


@contextmanager
def _in_a_fixed_order() -> Iterator[None]:
    """Let kernels that add up gradients do so in the same order in every run.

    Not torch.use_deterministic_algorithms, which also imports and configures the compiler.
    """
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its type is set when it is imported
    filled = memory.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    memory.fill_uninitialized_memory = False  # it costs a pass over every new tensor
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was, warn_only=warned)
        memory.fill_uninitialized_memory = filled


def _like(rows: Tensor, of: _Sequences) -> Tensor:
    """Return an empty tensor in the order in which the kernels return what belongs to these rows."""
    return _unpack(torch.empty_like(of.pack(rows)), rows)


def _meta(query: Tensor, key: Tensor, value: Tensor, first_key: Tensor | None, before: int) -> tuple[Tensor, Tensor]:
    heads, lanes, num_queries, _ = query.shape
    sums = (lanes, heads, num_queries) if first_key is None else (heads, lanes * num_queries)
    return _like(query, _sequences(query, key, first_key)), query.new_empty(sums, dtype=torch.float32)


def _meta_backward(
    of_rows: Tensor, rows: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    of = _sequences(query, key, rest[0])
    return tuple(_like(part, of) for part in (query, key, value))


_OPS.impl("window_attention", _forward, "CUDA")
_OPS.impl("window_attention_backward", _backward, "CUDA")
_OPS.impl("window_attention", _meta, "Meta")
_OPS.impl("window_attention_backward", _meta_backward, "Meta")
