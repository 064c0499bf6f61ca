"""The multiplications and additions of one operator of torch, by the shapes of what it reads and returns.

Two counts. `product_flops` are those of matrix products and of torch's convolutions. `other_flops` are all others:
triangular systems, convolutions, decays and sums that are computed element by element, norms, softmax. Together they
are every multiplication and addition, whichever kernel computes it. A division counts as a multiplication, a
subtraction as an addition; functions of one number (exp, sigmoid), comparisons and copies count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_mem.nn.kernel_shapes import KERNELS

# Of each element of the first tensor that is returned. What torch computes in one kernel counts as if it were written
# out; of a softmax the largest score is no addition.
_PER_ELEMENT = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "reciprocal"), 1),
    **{"addcmul": 2, "addcdiv": 2, "lerp": 3},
    **{"silu": 1, "silu_backward": 5, "sigmoid_backward": 3, "tanh_backward": 3},
    **{"_softmax": 3, "_softmax_backward_data": 4, "_log_softmax": 3, "_log_softmax_backward_data": 3},
    **{"native_layer_norm": 7, "native_layer_norm_backward": 13},
}
_POWERS: dict[float, int] = {2: 1, 3: 2}  # others are functions
_SCALED = ("add", "sub", "rsub")  # what they add may be multiplied first


def product_flops(name: str, args: tuple[Any, ...], output: Any) -> int:
    """Return the FLOPs of a matrix product or a convolution: two for every pair of numbers that meet; else 0.

    Args:
        name: of the operator, without its overload.
    """
    if name in ("mm", "bmm"):
        left, right = args[0], args[1]
    elif name in ("addmm", "baddbmm"):
        left, right = args[1], args[2]
    elif name in KERNELS:
        products, place = KERNELS[name]
        query, key = args[place : place + 2]
        return products * 2 * query.numel() * key.shape[-2]
    elif name == "rank_update":
        return sum(2 * rows.numel() * columns.shape[-1] for rows, columns in zip(args[2], args[3], strict=True))
    elif name == "convolution":
        places = args[0] if args[6] else output  # args[6]: it is transposed
        return 2 * len(places) * places.shape[-1] * args[1].numel()
    elif name == "convolution_backward":
        places, num_gradients = args[1] if args[7] else args[0], sum(args[10][:2])  # of input and weight
        return num_gradients * 2 * len(places) * places.shape[-1] * args[2].numel()
    else:
        return 0
    return 2 * left.numel() * right.shape[-1]


def other_flops(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the multiplications and additions of an operator that `product_flops` counts as 0.

    Args:
        name: of the operator, without its overload; of one that works in place, too.
    """
    result = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if result is None or not result.is_floating_point():
        return 0
    if name == "linalg_solve_triangular":  # of n equations, every row needs the ones before it; then its own factor
        return result.numel() * (args[0].shape[-1] - bool(kwargs.get("unitriangular")))
    name = name.removesuffix("_")
    if name in ("sum", "mean"):
        return args[0].numel() - (result.numel() if name == "sum" else 0)
    if name == "cumsum":
        return result.numel() - result.numel() // max(1, result.shape[args[1]])
    if name == "pow":
        return result.numel() * (0 if isinstance(args[1], Tensor) else _POWERS.get(args[1], 0))
    if name == "embedding_dense_backward":
        return int(args[0].numel())
    if name in ("index_add", "scatter_add"):
        return int(args[3].numel())
    is_scaled = name in _SCALED and kwargs.get("alpha", 1) != 1
    return result.numel() * (_PER_ELEMENT.get(name, 0) + is_scaled)
