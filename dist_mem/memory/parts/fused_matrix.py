"""A matrix per head read and written by our own kernels on GPUs (matrix_kernels.py), as operators that compile.

They compute what `infini.recall` and `Infini.write_rows` do, but for rounding; only rows in the dtype of the
activations and the memory itself are in memory, and what the gradient of a memory needs within a window. Shape letters:
B lanes, H heads, T tokens, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_mem.nn.distance_attention import like_projected, make_dense, padded_width, precision, strides

# Tokens of a tile, and warps, by largest K. On sm_90 none spills more than 64 bytes or takes more than 113 KB of shared
# memory (tests/memory/test_memory_kernels.py).
TILES = {64: (32, 8), 128: (16, 8)}
COLUMNS = 32  # of a matrix, which one program writes
TURNED = 32  # rows that a program turns


def tile_of(width: int) -> tuple[int, int]:
    """Return size and warps of the kernels that multiply."""
    return next(found for largest, found in TILES.items() if width <= largest)


def recall(query: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    """Return what queries read of the memory, (H, B, T, K) in their dtype.

    Args:
        query: (H, B, T, K), as projected.  matrix: (B, H, K, K) float32.  norm: (B, H, K) float32.
    """
    rows: Tensor = _Recall.apply(query, matrix, norm)
    return rows


def write(
    key: Tensor, value: Tensor, matrix: Tensor, norm: Tensor, num_real: Tensor, *, rule: str
) -> tuple[Tensor, Tensor]:
    """Return the memory after a segment, from the first `num_real` (B,) keys and values (H, B, T, K) of each lane."""
    new: tuple[Tensor, Tensor] = _Write.apply(key, value, matrix, norm, num_real, rule == "delta")
    return new


def turn(rows: Tensor, *, scale: float = 1.0) -> Tensor:
    """Turn rows (H, B, T, K) as `infini.rotate` does, in float32, and multiply them with a scale."""
    width = rows.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, width - 1, 2, device=rows.device, dtype=torch.float32) / width)
    angles = torch.arange(rows.shape[2], device=rows.device, dtype=torch.float32)[:, None] * rates
    made: Tensor = _Turn.apply(rows, angles.cos(), angles.sin(), scale)
    return made


class _Recall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
        ctx.save_for_backward(query, matrix, norm)
        rows: Tensor = torch.ops.dist_mem.recall(query, matrix, norm)
        return rows

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        query, matrix, norm = ctx.saved_tensors
        learns = any(ctx.needs_input_grad[1:])
        to_query, *of = torch.ops.dist_mem.recall_backward(given[0], query, matrix, norm, learns)
        if not learns:
            return to_query, None, None
        num_real = torch.full_like(norm[:, 0, 0], query.shape[2], dtype=torch.int64)
        zeros = torch.zeros_like(matrix), torch.zeros_like(norm)
        return to_query, *torch.ops.dist_mem.recall_of_state(query, num_real, *of, *zeros)


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, matrix: Tensor, norm: Tensor, num_real: Tensor, is_delta: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(key, value, matrix, norm, num_real)
        ctx.is_delta = is_delta
        new: tuple[Tensor, Tensor] = torch.ops.dist_mem.write(key, value, matrix, norm, num_real, is_delta)
        return new

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        key, value, matrix, norm, num_real = ctx.saved_tensors
        reads = ctx.is_delta and any(ctx.needs_input_grad[2:4])
        tensors = (*given, key, value, matrix, norm, num_real)
        to_key, to_value, *of = torch.ops.dist_mem.write_backward(*tensors, ctx.is_delta, reads)
        if reads:
            given = torch.ops.dist_mem.recall_of_state(key, num_real, *of, *given)
        return to_key, to_value, *given, None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cosine: Tensor, sine: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.scale = scale
        made: Tensor = torch.ops.dist_mem.turn_rows(rows, cosine, sine, scale, False)
        return made

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, None, None, None]:
        return torch.ops.dist_mem.turn_rows(given[0], *ctx.saved_tensors, ctx.scale, True), None, None, None


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_OPS.define("recall(Tensor query, Tensor matrix, Tensor norm) -> Tensor")
_OPS.define(
    "recall_backward(Tensor given, Tensor query, Tensor matrix, Tensor norm, bool learns) -> (Tensor, Tensor, Tensor)"
)
_WRITE = "Tensor key, Tensor value, Tensor matrix, Tensor norm, Tensor num_real, bool is_delta"
_OPS.define(f"write({_WRITE}) -> (Tensor, Tensor)")
_OPS.define(
    f"write_backward(Tensor of_matrix, Tensor of_norm, {_WRITE}, bool learns) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OPS.define(
    "recall_of_state(Tensor rows, Tensor num_real, Tensor of_products, Tensor of_sums, Tensor of_matrix, "
    "Tensor of_norm) -> (Tensor, Tensor)"
)
_OPS.define("turn_rows(Tensor rows, Tensor cosine, Tensor sine, float scale, bool back) -> Tensor")


def _constants(rows: Tensor) -> dict[str, Any]:
    width = rows.shape[-1]
    size, warps = tile_of(width)
    constants = {"WIDTH": width, "PADDED": padded_width(width), "SIZE": size, "PRECISION": precision()}
    return constants | {"num_warps": warps, "num_stages": 1}


def _grid(rows: Tensor, size: int) -> tuple[int, int]:
    return -(-rows.shape[2] // size), rows.shape[0] * rows.shape[1]


def _sizes(rows: Tensor) -> tuple[int, int, int]:
    """Return B, H and T."""
    return rows.shape[1], rows.shape[0], rows.shape[2]


def _recall(query: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    from dist_mem.memory.parts import matrix_kernels as kernels

    query, matrix, norm = make_dense(query), matrix.contiguous(), norm.contiguous()
    rows, constants = like_projected(query), _constants(query)
    kernels.recall[_grid(query, constants["SIZE"])](
        query, matrix, norm, rows, *strides(query, rows), *_sizes(query), **constants
    )
    return rows


def _recall_backward(
    given: Tensor, query: Tensor, matrix: Tensor, norm: Tensor, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from dist_mem.memory.parts import matrix_kernels as kernels

    given, query, matrix, norm = make_dense(given), make_dense(query), matrix.contiguous(), norm.contiguous()
    found, constants = (like_projected(query), *_of_readings(query, learns)), _constants(query)
    kernels.recall_backward[_grid(query, constants["SIZE"])](
        *(query, matrix, norm, given, *found, *strides(query, given, found[0]), *_sizes(query)),
        **(constants | {"STATE": learns}),
    )
    return found


def _of_readings(rows: Tensor, learns: bool) -> tuple[Tensor, Tensor]:
    """Return empty tensors: the gradients of products with the matrix, and of sums; of nothing unless it learns."""
    shape = rows.shape if learns else (0, 0, 0, 0)
    return rows.new_empty(shape, dtype=torch.float32), rows.new_empty(shape[:3], dtype=torch.float32)


def _write(
    key: Tensor, value: Tensor, matrix: Tensor, norm: Tensor, num_real: Tensor, is_delta: bool
) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import matrix_kernels as kernels

    key, value, matrix, norm = make_dense(key), make_dense(value), matrix.contiguous(), norm.contiguous()
    new, constants = (torch.empty_like(matrix), torch.empty_like(norm)), _constants(key)
    kernels.write[_grid(key, 1)[1], -(-key.shape[3] // COLUMNS)](
        *(key, value, matrix, norm, num_real, *new, *strides(key, value), *_sizes(key)),
        **(constants | {"COLUMNS": COLUMNS, "DELTA": is_delta}),
    )
    return new


def _write_backward(of_matrix: Tensor, of_norm: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    from dist_mem.memory.parts import matrix_kernels as kernels

    matrix, norm, num_real, is_delta, learns = rest
    key, value = make_dense(key), make_dense(value)
    state = [part.contiguous() for part in (matrix, norm, num_real, of_matrix, of_norm)]
    found, constants = _write_gradients(key, value, learns), _constants(key)
    kernels.write_backward[_grid(key, constants["SIZE"])](
        *(key, value, *state, *found, *strides(key, value, found[0]), *_sizes(key)),
        **(constants | {"DELTA": is_delta, "STATE": learns}),
    )
    return found


def _write_gradients(key: Tensor, value: Tensor, learns: bool) -> tuple[Tensor, ...]:
    return like_projected(key), like_projected(value), *_of_readings(key, learns)


def _of_state(rows: Tensor, num_real: Tensor, of_products: Tensor, of_sums: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    from dist_mem.memory.parts import matrix_kernels as kernels

    rows, constants = make_dense(rows), _constants(rows)
    found = tuple(part.clone(memory_format=torch.contiguous_format) for part in of)
    kernels.of_state[_grid(rows, 1)[1:]](
        rows, num_real, of_products, of_sums, *found, *strides(rows), *_sizes(rows), **constants
    )
    return found


def _turn_rows(rows: Tensor, cosine: Tensor, sine: Tensor, scale: float, back: bool) -> Tensor:
    from dist_mem.memory.parts import matrix_kernels as kernels

    rows = make_dense(rows)
    made = like_projected(rows)
    kernels.turn[_grid(rows, TURNED)](
        *(rows, cosine, sine, made, *strides(rows, made), *rows.shape[1:3], scale, -1.0 if back else 1.0),
        **{"WIDTH": rows.shape[-1], "PADDED": padded_width(rows.shape[-1]), "SIZE": TURNED},
    )
    return made


for _name, _function, _shapes in (
    ("recall", _recall, lambda query, matrix, norm: like_projected(query)),
    (
        "recall_backward",
        _recall_backward,
        lambda given, query, matrix, norm, learns: (like_projected(query), *_of_readings(query, learns)),
    ),
    ("write", _write, lambda key, value, matrix, norm, *rest: (torch.empty_like(matrix), torch.empty_like(norm))),
    (
        "write_backward",
        _write_backward,
        lambda of_matrix, of_norm, key, value, *rest: _write_gradients(key, value, rest[-1]),
    ),
    (
        "recall_of_state",
        _of_state,
        lambda rows, num_real, products, sums, *of: tuple(torch.empty_like(part) for part in of),
    ),
    ("turn_rows", _turn_rows, lambda rows, *rest: like_projected(rows)),
):
    for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
        _OPS.impl(_name, _function, _device)
    _OPS.impl(_name, _shapes, "Meta")
