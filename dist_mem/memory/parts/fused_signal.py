"""A continuous signal read by our own kernels on GPUs (signal_kernels.py), as operators that compile.

They compute what `basis.expected_basis` times values and `densities.moments` do, but for rounding, without a number for
every pair of a query and a basis function, or a sample, in memory. Shape letters: B lanes, H heads, T queries, N basis
functions, S samples, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.memory.parts.basis import Fit
from dist_mem.nn.constants import constant
from dist_mem.nn.distance_attention import like_projected, make_dense, padded_width, precision, strides

# Queries, and centres or samples, of a tile, and warps: by bytes of a number and largest K. On sm_90 none spills more
# than 64 bytes or takes more than 113 KB of shared memory (tests/memory/test_memory_kernels.py).
TILES = {(2, 64): (64, 8), (2, 128): (64, 8), (4, 64): (32, 4), (4, 128): (16, 4)}


class AppendLaunch(NamedTuple):
    """Sizes of the kernels of a regression."""

    size: int = 64  # rows and columns of a tile
    step: int = 32  # numbers that are multiplied at once
    warps: int = 4


APPENDED = AppendLaunch()


def tile_of(itemsize: int, width: int) -> tuple[int, int]:
    """Return size and warps of the kernels."""
    return next(found for (size, largest), found in TILES.items() if itemsize == size and width <= largest)


def read_signal(mean: Tensor, variance: Tensor, values: Tensor, *, widths: tuple[float, ...], num_basis: int) -> Tensor:
    """Return what queries read under normal densities, (H, B, T, K) in the dtype of the values.

    Args:
        mean, variance: (H, B, T) float32.  values: (H, B, N, K).
    """
    device = values.device
    centres = torch.linspace(0.0, 1.0, num_basis // len(widths), device=device)
    squares = constant(tuple(width**2 for width in widths), device=device, dtype=torch.float32)
    rows: Tensor = _ReadSignal.apply(values, mean[..., None], variance[..., None], centres, squares)
    return rows


def moments(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of what a softmax over evenly spread samples reads, both (H, B, T) float32.

    Args:
        query: (H, B, T, K).  keys: (H, B, S, K), of samples at (j + 1/2) / S, in the dtype of the queries.
    """
    mean, variance, _ = _Moments.apply(query, keys)
    return mean, variance


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.dist_mem.signal_moments(query, keys)
        ctx.save_for_backward(query, keys, *found)
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.dist_mem.signal_moments_backward(*ctx.saved_tensors, *given[:2])
        return found


def append_rows(fit: Fit, rows: Tensor, old: Tensor, *, has_new: Tensor, is_first: Tensor) -> Tensor:
    """Return the coefficients (B, N, D) float32 after new rows (B, E, D), contracted as sampling is linear.

    Products are of float32, as errors would add up over a document.

    Args:
        old: (B, N, D) float32, without a gradient.  has_new: (B,) bool; others keep the old ones.
        is_first: (B,) bool, whether there is no past, in which case `old` is not read.
    """
    mode = torch.where(is_first, 1, 2) * has_new
    signal: Tensor = _AppendRows.apply(rows, fit.first, fit.new, fit.linear, old, mode.to(torch.int32))
    return signal


class _AppendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, first: Tensor, new: Tensor, linear: Tensor, old: Tensor, mode: Tensor
    ) -> Tensor:
        ctx.save_for_backward(first, new, mode)
        ctx.dtype = rows.dtype
        signal: Tensor = torch.ops.dist_mem.append_rows(linear, old, first, new, rows, mode)
        return signal

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        first, new, mode = ctx.saved_tensors
        to_rows = torch.ops.dist_mem.append_rows_backward(first, given[0], new, mode, ctx.dtype)
        return to_rows, None, None, None, None, None


class _ReadSignal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given)
        rows: Tensor = torch.ops.dist_mem.read_signal(*given)
        return rows

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        to_values, to_mean, to_variance = torch.ops.dist_mem.read_signal_backward(given[0], *ctx.saved_tensors)
        return to_values, to_mean, to_variance, None, None


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_READ = "Tensor values, Tensor mean, Tensor variance, Tensor centres, Tensor squares"
_OPS.define(f"read_signal({_READ}) -> Tensor")
_OPS.define(f"read_signal_backward(Tensor given, {_READ}) -> (Tensor, Tensor, Tensor)")
_OPS.define("append_rows(Tensor linear, Tensor old, Tensor first, Tensor new, Tensor rows, Tensor mode) -> Tensor")
_OPS.define("append_rows_backward(Tensor first, Tensor given, Tensor new, Tensor mode, ScalarType dtype) -> Tensor")
_OPS.define("signal_moments(Tensor query, Tensor keys) -> (Tensor, Tensor, Tensor)")
_OPS.define(
    "signal_moments_backward(Tensor query, Tensor keys, Tensor mean, Tensor variance, Tensor log_sum, Tensor of_mean, "
    "Tensor of_variance) -> (Tensor, Tensor)"
)


def _sizes(values: Tensor, mean: Tensor, centres: Tensor, squares: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return sizes and constants of the kernels that read."""
    return (*mean.shape[1:3], len(centres), len(squares)), _constants(values, num_stages=2)


def _constants(rows: Tensor, *, num_stages: int) -> dict[str, Any]:
    """Return the constants of kernels that take tiles of rows, (..., K)."""
    width = rows.shape[-1]
    size, warps = tile_of(rows.element_size(), width)
    constants = {"WIDTH": width, "PADDED": padded_width(width), "SIZE": size, "PRECISION": precision()}
    return constants | {"num_warps": warps, "num_stages": num_stages}


def _read_signal(values: Tensor, mean: Tensor, variance: Tensor, centres: Tensor, squares: Tensor) -> Tensor:
    from dist_mem.memory.parts import signal_kernels as kernels

    values, mean, variance = make_dense(values), mean.contiguous(), variance.contiguous()
    rows = _empty_output(values, mean)
    sizes, constants = _sizes(values, mean, centres, squares)
    grid = -(-mean.shape[2] // constants["SIZE"]), mean.shape[0] * mean.shape[1]
    kernels.read_signal[grid](
        mean, variance, values, centres, squares, rows, *strides(values, rows), *sizes, **constants
    )
    return rows


def _read_signal_backward(
    given: Tensor, values: Tensor, mean: Tensor, variance: Tensor, centres: Tensor, squares: Tensor
) -> tuple[Tensor, ...]:
    from dist_mem.memory.parts import signal_kernels as kernels

    given, values, mean, variance = make_dense(given), make_dense(values), mean.contiguous(), variance.contiguous()
    to_values, to_mean, to_variance = _gradients(values, mean)
    sizes, constants = _sizes(values, mean, centres, squares)
    num_pairs = mean.shape[0] * mean.shape[1]
    kernels.backward_densities[-(-mean.shape[2] // constants["SIZE"]), num_pairs](
        *(mean, variance, values, centres, squares, given, to_mean, to_variance),
        *(*strides(values, given), *sizes),
        **constants,
    )
    kernels.backward_values[-(-len(centres) // constants["SIZE"]), num_pairs, len(squares)](
        *(mean, variance, centres, squares, given, to_values, *strides(given, to_values), *sizes), **constants
    )
    return to_values, to_mean, to_variance


def _empty_output(values: Tensor, mean: Tensor) -> Tensor:
    """Return an empty tensor of what is read, (H, B, T, K)."""
    return like_projected(values.new_empty(1).expand(*mean.shape[:3], values.shape[3]))


def _gradients(values: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like_projected(values), torch.empty_like(mean), torch.empty_like(mean)


def _append_rows(linear: Tensor, old: Tensor, first: Tensor, new: Tensor, rows: Tensor, mode: Tensor) -> Tensor:
    from dist_mem.memory.parts import signal_kernels as kernels

    signal = torch.empty_like(old, memory_format=torch.contiguous_format)
    matrices = first.contiguous(), new.contiguous(), linear.contiguous(), rows.contiguous(), old.contiguous()
    sizes = old.shape[1], rows.shape[1], old.shape[2]
    grid = -(-sizes[0] // APPENDED.size), -(-sizes[2] // APPENDED.size), len(old)
    kernels.append_rows[grid](*matrices, mode, signal, *sizes, **_append_constants())
    return signal


def _append_rows_backward(first: Tensor, given: Tensor, new: Tensor, mode: Tensor, dtype: torch.dtype) -> Tensor:
    from dist_mem.memory.parts import signal_kernels as kernels

    first, new, given = first.contiguous(), new.contiguous(), given.contiguous()
    to_rows = _to_rows(first, given, dtype)
    sizes = given.shape[1], to_rows.shape[1], given.shape[2]
    grid = -(-sizes[1] // APPENDED.size), -(-sizes[2] // APPENDED.size), len(given)
    kernels.append_backward[grid](first, new, given, mode, to_rows, *sizes, **_append_constants())
    return to_rows


def _append_constants() -> dict[str, Any]:
    """Return the constants of the kernels of a regression."""
    constants = {"SIZE": APPENDED.size, "STEP": APPENDED.step, "PRECISION": "tf32x3"}
    return constants | {"num_warps": APPENDED.warps, "num_stages": 2}


def _to_rows(first: Tensor, given: Tensor, dtype: torch.dtype) -> Tensor:
    return given.new_empty(len(given), first.shape[1], given.shape[2], dtype=dtype)


def _moments(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from dist_mem.memory.parts import signal_kernels as kernels

    query, keys = make_dense(query), make_dense(keys)
    found, (sizes, constants) = _moment_outputs(query), _moment_constants(query, keys)
    grid = -(-query.shape[2] // constants["SIZE"]), query.shape[0] * query.shape[1]
    kernels.moments[grid](query, keys, *found, *strides(query, keys), *sizes, **constants)
    return found


def _moments_backward(query: Tensor, keys: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    from dist_mem.memory.parts import signal_kernels as kernels

    query, keys, given = make_dense(query), make_dense(keys), tuple(part.contiguous() for part in given)
    (to_query, to_keys), (sizes, constants) = _moment_gradients(query, keys), _moment_constants(query, keys)
    num_pairs, size = query.shape[0] * query.shape[1], constants["SIZE"]
    kernels.backward_asking[-(-query.shape[2] // size), num_pairs](
        query, keys, *given, to_query, *strides(query, keys, to_query), *sizes, **constants
    )
    kernels.backward_samples[-(-keys.shape[2] // size), num_pairs](
        query, keys, *given, to_keys, *strides(query, keys, to_keys), *sizes, **constants
    )
    return to_query, to_keys


def _moment_constants(query: Tensor, keys: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return sizes and constants of the kernels of moments."""
    return (*query.shape[1:3], keys.shape[2], query.shape[-1] ** -0.5), _constants(query, num_stages=1)


def _moment_outputs(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, log_sum = (query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(3))
    return mean, variance, log_sum


def _moment_gradients(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    return like_projected(query), like_projected(keys)


for _name, _function, _shapes in (
    ("signal_moments", _moments, lambda query, keys: _moment_outputs(query)),
    ("signal_moments_backward", _moments_backward, lambda query, keys, *rest: _moment_gradients(query, keys)),
    ("append_rows", _append_rows, lambda linear, old, *rest: torch.empty_like(old)),
    (
        "append_rows_backward",
        _append_rows_backward,
        lambda first, given, new, mode, dtype: _to_rows(first, given, dtype),
    ),
    ("read_signal", _read_signal, lambda values, mean, *rest: _empty_output(values, mean)),
    ("read_signal_backward", _read_signal_backward, lambda given, values, mean, *rest: _gradients(values, mean)),
):
    for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
        _OPS.impl(_name, _function, _device)
    _OPS.impl(_name, _shapes, "Meta")
