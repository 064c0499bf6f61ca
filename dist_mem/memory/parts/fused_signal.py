"""A continuous signal read by our own kernels on GPUs (signal_kernels.py), as operators that compile.

They compute what `basis.expected_basis` times values and `densities.moments` do, but for rounding, without a number for
every pair of a query and a basis function, or a sample, in memory. Shape letters: B lanes, H heads, T queries, N basis
functions, S samples, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_mem.nn.constants import constant
from dist_mem.nn.distance_attention import dense, like_projected, padded, precision, strides

# Queries, and centres or samples, of a tile, and warps: by bytes of a number and largest K. On sm_90 none spills more
# than 64 bytes or takes more than 113 KB of shared memory (tests/memory/test_memory_kernels.py).
TILES = {(2, 64): (64, 8), (2, 128): (64, 8), (4, 64): (32, 4), (4, 128): (16, 4)}


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


def _sizes(values: Tensor, mean: Tensor, centres: Tensor, squares: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return sizes and constants of the kernels that read."""
    width = values.shape[-1]
    size, warps = tile_of(values.element_size(), width)
    constants = {"WIDTH": width, "PADDED": padded(width), "SIZE": size, "PRECISION": precision()}
    return (*mean.shape[1:3], len(centres), len(squares)), constants | {"num_warps": warps, "num_stages": 2}


def _read_signal(values: Tensor, mean: Tensor, variance: Tensor, centres: Tensor, squares: Tensor) -> Tensor:
    from dist_mem.memory.parts import signal_kernels as kernels

    values, mean, variance = dense(values), mean.contiguous(), variance.contiguous()
    rows = _rows(values, mean)
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

    given, values, mean, variance = dense(given), dense(values), mean.contiguous(), variance.contiguous()
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


def _rows(values: Tensor, mean: Tensor) -> Tensor:
    """Return an empty tensor of what is read, (H, B, T, K)."""
    return like_projected(values.new_empty(1).expand(*mean.shape[:3], values.shape[3]))


def _gradients(values: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like_projected(values), torch.empty_like(mean), torch.empty_like(mean)


for _name, _function, _shapes in (
    ("read_signal", _read_signal, lambda values, mean, *rest: _rows(values, mean)),
    ("read_signal_backward", _read_signal_backward, lambda given, values, mean, *rest: _gradients(values, mean)),
):
    for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
        _OPS.impl(_name, _function, _device)
    _OPS.impl(_name, _shapes, "Meta")
