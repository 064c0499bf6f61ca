"""Stored rows searched and read by our own kernels on GPUs (row_kernels.py), as operators that compile.

They find what stored_rows.py finds, but for rounding: the search multiplies the projected queries, whose length changes
no order, and of equal scores takes the row of the lowest number. Neither scores nor the rows that are read stand in
memory. Shape letters: B lanes, H heads, T queries, M rows, k rows that a query reads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.memory.parts.stored_rows import Store, is_written
from dist_mem.nn.distance_attention import like_projected, make_dense, padded_width, precision, strides

CHUNK = 512  # rows or candidates whose scores a program keeps in registers
MOST = CHUNK // 2  # k; the finds of parts would not become fewer with more


class Search(NamedTuple):
    """Sizes of the search's kernels."""

    queries: int = 16  # of a program, the least of a product on tensor cores
    step: int = 16  # numbers of a head that are multiplied at once
    warps: int = 8


# On sm_90 no kernel spills more than 64 bytes or takes more than 113 KB of shared memory
# (tests/memory/test_memory_kernels.py).
SEARCH = Search()
CANDIDATES = 2**25  # of parts, and their scores, that exist at one time: 256 MiB
READ_ROWS = 32  # rows that a query's program loads at once
UNIT_ROWS = 32  # rows that a program divides by their length, or mixes
UNWRITTEN, WRITTEN = 1, 2  # marks of rows; 0: nobody may read it


def marks_of(store: Store) -> Tensor:
    """Return the marks of rows, (B, M) uint8."""
    marks = torch.where(is_written(store), WRITTEN, UNWRITTEN)
    if isinstance(store.shown, Tensor):
        marks = marks * store.shown
    return marks.to(torch.uint8)


def read_nearest(query: Tensor, gain: Tensor, store: Store, *, number: int, search: str, empty: bool) -> Tensor:
    """Return what queries read of the nearest stored rows, (H, B, T, K) in their dtype.

    Args:
        query: (H, B, T, K), as projected: its length does not matter.  gain: (H,) float32, the scale of scores.
        search, empty: as in `stored_rows.nearest`.
    """
    marks = marks_of(store)
    index = nearest_rows(query.detach(), store.keys, marks, number=number, search=search)
    rows: Tensor = _ReadRows.apply(query, gain, store.keys, store.values, marks, index, UNWRITTEN if empty else WRITTEN)
    return rows


@torch.no_grad()
def nearest_rows(query: Tensor, keys: Tensor, marks: Tensor, *, number: int, search: str) -> Tensor:
    """Return the rows with the largest products, (H, B, T, k) int32, as `stored_rows.nearest`; marked ones last."""
    if search == "buckets":
        found: Tensor = torch.ops.dist_mem.nearest_of_buckets(query, keys, marks, number)
        return found
    parts = -(-keys.shape[2] // CHUNK)
    at_once = max(SEARCH.queries, CANDIDATES // (query.shape[0] * query.shape[1] * parts * number))
    if parts == 1 or query.shape[2] <= at_once:
        return _search(query, keys, marks, number, parts)
    return torch.cat([_search(some, keys, marks, number, parts) for some in query.split(at_once, dim=2)], dim=2)


def _search(query: Tensor, keys: Tensor, marks: Tensor, number: int, parts: int) -> Tensor:
    found: Tensor
    found, orders = torch.ops.dist_mem.nearest_rows(query, keys, marks, number, parts)
    while parts > 1:  # candidates of every part
        parts = -(-parts * number // CHUNK)
        found, orders = torch.ops.dist_mem.nearest_of_parts(found, orders, number, parts)
    return found


def unit_rows(rows: Tensor, gain: Tensor | None = None, *, is_wide: bool = False) -> Tensor:
    """Divide rows (H, B, T, K) by their length, and multiply them with the scale of their head, (H,) float32.

    Args:
        is_wide: return float32, without a gradient.
    """
    if is_wide:
        made: Tensor = torch.ops.dist_mem.unit_rows(rows.detach(), gain, True)
    else:
        made = _UnitRows.apply(rows, gain)
    return made


def mix_rows(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """Return share * one + (1 - share) * other, of rows (H, B, T, K) and a share (H, B) float32, added in float32."""
    mixed: Tensor = _MixRows.apply(one, other, share.contiguous())
    return mixed


class _ReadRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, gain: Tensor, keys: Tensor, values: Tensor, marks: Tensor, index: Tensor, least: int
    ) -> Tensor:
        tensors = query, gain, keys, values, marks, index
        rows, log_sum = torch.ops.dist_mem.read_rows(*tensors, least)
        ctx.save_for_backward(log_sum, *tensors)
        ctx.least = least
        found: Tensor = rows
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        to_query, to_gain = torch.ops.dist_mem.read_rows_backward(given[0], *ctx.saved_tensors, ctx.least)
        return to_query, to_gain.sum(dim=(1, 2)), None, None, None, None, None


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gain: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, gain)
        made: Tensor = torch.ops.dist_mem.unit_rows(rows, gain, False)
        return made

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        rows, gain = ctx.saved_tensors
        to_rows, to_gain = torch.ops.dist_mem.unit_rows_backward(given[0], rows, gain)
        return to_rows, None if gain is None else to_gain.sum(dim=(1, 2))


class _MixRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(one, other, share)
        mixed: Tensor = torch.ops.dist_mem.mix_rows(one, other, share)
        return mixed

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        to_one, to_other, to_share = torch.ops.dist_mem.mix_rows_backward(given[0], *ctx.saved_tensors)
        return to_one, to_other, to_share.sum(dim=2)


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_OPS.define("nearest_of_buckets(Tensor query, Tensor keys, Tensor marks, int number) -> Tensor")
_OPS.define("nearest_rows(Tensor query, Tensor keys, Tensor marks, int number, int parts) -> (Tensor, Tensor)")
_OPS.define("nearest_of_parts(Tensor candidates, Tensor orders, int number, int parts) -> (Tensor, Tensor)")
_READ = "Tensor query, Tensor gain, Tensor keys, Tensor values, Tensor marks, Tensor index"
_OPS.define(f"read_rows({_READ}, int least) -> (Tensor, Tensor)")
_OPS.define(f"read_rows_backward(Tensor given, Tensor log_sum, {_READ}, int least) -> (Tensor, Tensor)")
_OPS.define("unit_rows(Tensor rows, Tensor? gain, bool is_wide) -> Tensor")
_OPS.define("unit_rows_backward(Tensor given, Tensor rows, Tensor? gain) -> (Tensor, Tensor)")
_OPS.define("mix_rows(Tensor one, Tensor other, Tensor share) -> Tensor")
_OPS.define("mix_rows_backward(Tensor given, Tensor one, Tensor other, Tensor share) -> (Tensor, Tensor, Tensor)")


def _searches(query: Tensor, keys: Tensor, number: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return sizes and constants of the kernels that search."""
    constants = {"WIDTH": query.shape[3], "STEP": SEARCH.step, "QUERIES": SEARCH.queries, "PRECISION": precision()}
    sizes = (*query.shape[1:3], keys.shape[2], number)
    return (*strides(query), *strides(keys.transpose(0, 1)), *sizes), constants


def _nearest_of_buckets(query: Tensor, keys: Tensor, marks: Tensor, number: int) -> Tensor:
    from dist_mem.memory.parts import row_kernels as kernels

    query, keys = make_dense(query), make_dense(keys)
    by, constants = _searches(query, keys, number)
    found, chunk = _empty_indices(query, number), min(64, padded_width(number))
    grid = -(-query.shape[2] // SEARCH.queries), query.shape[0] * query.shape[1], -(-number // chunk)
    kernels.nearest_of_buckets[grid](query, keys, marks, found, *by, CHUNK=chunk, **constants)
    return found


def _nearest_rows(query: Tensor, keys: Tensor, marks: Tensor, number: int, parts: int) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    query, keys = make_dense(query), make_dense(keys)
    by, constants = _searches(query, keys, number)
    found, orders = _candidates(query, number, parts)
    grid = -(-query.shape[2] // SEARCH.queries), query.shape[0] * query.shape[1], parts
    constants |= {"CHUNK": min(CHUNK, padded_width(keys.shape[2])), "num_warps": SEARCH.warps}
    kernels.nearest[grid](query, keys, marks, found, orders, *by, parts, **constants)
    return found, orders


def _nearest_of_parts(candidates: Tensor, orders: Tensor, number: int, parts: int) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    found, found_orders = _candidates(candidates, number, parts)
    num_all, count = candidates.shape[:3].numel(), candidates.shape[3]
    kernels.nearest_of_parts[-(-num_all // SEARCH.queries), parts](
        *(candidates, orders, found, found_orders, num_all, count, number, parts),
        **{"QUERIES": SEARCH.queries, "CHUNK": min(CHUNK, padded_width(count)), "num_warps": SEARCH.warps},
    )
    return found, found_orders


def _empty_indices(like: Tensor, number: int) -> Tensor:
    """Return an empty tensor with `number` integers a query, (H, B, T, number) int32."""
    return like.new_empty(*like.shape[:3], number, dtype=torch.int32)


def _candidates(like: Tensor, number: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the finds of all parts, and of their scores, which one part does not need."""
    return _empty_indices(like, parts * number), _empty_indices(like, parts * number if parts > 1 else 0)


def read_warps(width: int) -> int:
    """Return the warps of a program that reads."""
    return 1 if width <= 64 else 2


def _reads(query: Tensor, keys: Tensor, index: Tensor, least: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return grid and constants of the kernels that read."""
    heads, lanes, num_queries, width = query.shape
    constants = {"WIDTH": width, "PADDED": padded_width(width), "LEAST": least, "num_warps": read_warps(width)}
    return (num_queries, heads * lanes), constants | {"ROWS": min(READ_ROWS, padded_width(index.shape[-1]))}


def _read_rows(*given: Any) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    query, gain, keys, values, marks, index, least = given
    query, keys, values = make_dense(query), keys.contiguous(), values.contiguous()  # one set of strides for both
    rows, log_sum = _read_outputs(query)
    grid, constants = _reads(query, keys, index, least)
    by = (*strides(query, keys.transpose(0, 1), rows), *query.shape[1:3], keys.shape[2], index.shape[3])
    kernels.read_rows[grid](query, keys, values, gain, marks, index, rows, log_sum, *by, **constants)
    return rows, log_sum


def _read_rows_backward(*given: Any) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    of_rows, log_sum, query, gain, keys, values, marks, index, least = given
    of_rows, query, keys, values = make_dense(of_rows), make_dense(query), keys.contiguous(), values.contiguous()
    to_query, to_gain = _read_outputs(query)
    grid, constants = _reads(query, keys, index, least)
    by = strides(query, keys.transpose(0, 1), of_rows, to_query)
    kernels.read_backward[grid](
        *(query, keys, values, gain, marks, index, log_sum, of_rows, to_query, to_gain),
        *(*by, *query.shape[1:3], keys.shape[2], index.shape[3]),
        **constants,
    )
    return to_query, to_gain


def _read_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty tensor of rows, in the order of a projection's output, and one of a number each."""
    return like_projected(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _unit_output(rows: Tensor, is_wide: bool) -> Tensor:
    return like_projected(rows, torch.float32 if is_wide else None)


def _unit_rows(rows: Tensor, gain: Tensor | None, is_wide: bool) -> Tensor:
    from dist_mem.memory.parts import row_kernels as kernels

    rows = make_dense(rows)
    made = _unit_output(rows, is_wide)
    grid, constants = _units(rows, gain)
    by = (*strides(rows, made), *rows.shape[1:3])
    kernels.unit_rows[grid](rows, gain, made, *by, **constants)
    return made


def _unit_rows_backward(given: Tensor, rows: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    given, rows = make_dense(given), make_dense(rows)
    to_rows, to_gain = _unit_outputs(rows, gain)
    grid, constants = _units(rows, gain)
    by = (*strides(rows, given, to_rows), *rows.shape[1:3])
    kernels.unit_rows_backward[grid](rows, gain, given, to_rows, to_gain, *by, **constants)
    return to_rows, to_gain


def _unit_outputs(rows: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (0,) if gain is None else rows.shape[:-1]
    return like_projected(rows), rows.new_empty(shape, dtype=torch.float32)


def _units(rows: Tensor, gain: Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    grid, constants = _tile_constants(rows)
    return grid, constants | {"GAIN": gain is not None}


def _tile_constants(rows: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and constants of kernels that take blocks of rows."""
    heads, lanes, num_rows, width = rows.shape
    constants = {"WIDTH": width, "PADDED": padded_width(width), "SIZE": UNIT_ROWS}
    return (-(-num_rows // UNIT_ROWS), heads * lanes), constants


def _mix_rows(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    from dist_mem.memory.parts import row_kernels as kernels

    one, other = make_dense(one), make_dense(other)
    mixed = like_projected(other)
    grid, constants = _tile_constants(one)
    kernels.mix[grid](one, other, share, mixed, *strides(one, other, mixed), *one.shape[1:3], **constants)
    return mixed


def _mix_rows_backward(given: Tensor, one: Tensor, other: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from dist_mem.memory.parts import row_kernels as kernels

    given, one, other = make_dense(given), make_dense(one), make_dense(other)
    found = _mix_outputs(one, other)
    grid, constants = _tile_constants(one)
    by = strides(one, other, given, found[0])
    kernels.mix_backward[grid](one, other, share, given, *found, *by, *one.shape[1:3], **constants)
    return found


def _mix_outputs(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors: the gradients of both, and of the share of each row."""
    return like_projected(one), like_projected(other), one.new_empty(one.shape[:-1], dtype=torch.float32)


for _name, _function, _shapes in (
    ("nearest_of_buckets", _nearest_of_buckets, lambda query, keys, marks, number: _empty_indices(query, number)),
    ("nearest_rows", _nearest_rows, lambda query, keys, marks, number, parts: _candidates(query, number, parts)),
    ("nearest_of_parts", _nearest_of_parts, lambda found, orders, number, parts: _candidates(found, number, parts)),
    ("read_rows", _read_rows, lambda query, *rest: _read_outputs(query)),
    ("read_rows_backward", _read_rows_backward, lambda given, log_sum, query, *rest: _read_outputs(query)),
    ("unit_rows", _unit_rows, lambda rows, gain, is_wide: _unit_output(rows, is_wide)),
    ("mix_rows", _mix_rows, lambda one, other, share: like_projected(other)),
    ("mix_rows_backward", _mix_rows_backward, lambda given, one, other, share: _mix_outputs(one, other)),
    ("unit_rows_backward", _unit_rows_backward, lambda given, rows, gain: _unit_outputs(rows, gain)),
):
    for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
        _OPS.impl(_name, _function, _device)
    _OPS.impl(_name, _shapes, "Meta")
