"""What the compiler makes one kernel of, between the products of neural_backward.py, which has the names.

Each is counted as one kernel (`one_kernel`), and computes element by element, with sums over the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.kernel_shapes import one_kernel

Tensors = tuple[Tensor, ...]


def of_weights(state: Tensor) -> Tensor:
    """Return the weights of states (., I, 2 O)."""
    return state[..., : state.shape[-1] // 2]


def of_momentum(state: Tensor) -> Tensor:
    """Return the momentum of states (., I, 2 O)."""
    return state[..., state.shape[-1] // 2 :]


def slope(sums: Tensor) -> Tensor:
    """Return the derivative of SiLU."""
    share = sums.sigmoid()
    return share * (1.0 + sums * (1.0 - share))


def curvature(sums: Tensor) -> Tensor:
    """Return the second derivative of SiLU."""
    share = sums.sigmoid()
    return share * (1.0 - share) * (2.0 + sums * (1.0 - 2.0 * share))


def limit_norms(inputs: Sequence[Tensor], gradients: Sequence[Tensor], max_gradient: float) -> Tensor:
    """Return the squared norms of tokens' gradients, of all layers together: (., C), the maximum at least."""
    pairs = zip(inputs, gradients, strict=True)
    squared = sum(4.0 * one.square().sum(-1) * other.square().sum(-1) for one, other in pairs)
    assert isinstance(squared, Tensor)
    return squared.clamp(min=max_gradient**2)


@one_kernel
def activate(sums: Tensor) -> Tensors:
    """Return x_(i+1) of h_i."""
    return (F.silu(sums),)


@one_kernel
def difference(one: Tensor, other: Tensor) -> Tensors:
    """Return one minus the other."""
    return (one - other,)


@one_kernel
def add(one: Tensor, other: Tensor) -> Tensors:
    """Return the sum."""
    return (one + other,)


@one_kernel
def inner_gradient(sums: Tensor, asked: Tensor) -> Tensors:
    """Return g_i of h_i and p_i."""
    return (slope(sums) * asked,)


@one_kernel
def squares(rows: Tensor) -> Tensors:
    """Return squared norms of rows."""
    return (rows.square().sum(-1),)


@one_kernel
def both_factors(hidden: Sequence[Tensor], asked: Sequence[Tensor]) -> Tensors:
    """Return x_i of all layers but the first, and g_i of all but the last."""
    return *map(F.silu, hidden), *(slope(sums) * each for sums, each in zip(hidden, asked, strict=True))


def side_by_side(rows: Tensor, alpha: Tensor, last: Tensor, scale: Tensor) -> Tensor:
    """Return a token's gradient as it changes weights and momentum: g (., C, O) -> (., C, 2 O)."""
    return torch.cat([-(alpha * scale)[..., None] * rows, -(last * scale)[..., None] * rows], dim=-1)


@one_kernel
def push_token(
    step: Tensor,
    alpha: Tensor,
    last: Tensor,
    key: Tensor,
    hidden: Sequence[Tensor],
    asked: Sequence[Tensor],
    missing: Tensor,
    *,
    max_gradient: float | None,
) -> Tensors:
    """Return the factor of a token's gradient, (B, C), and columns of `rank_update` for every layer."""
    inputs = [key, *map(F.silu, hidden)]
    gradients = [*(slope(sums) * each for sums, each in zip(hidden, asked, strict=True)), missing]
    scale = 2.0 * step
    if max_gradient is not None:
        scale = scale * max_gradient * limit_norms(inputs, gradients, max_gradient).rsqrt()
    return scale, *(side_by_side(part, alpha, last, scale) for part in gradients)


@one_kernel
def columns_of(alpha: Tensor, last: Tensor, scale: Tensor, gradients: Sequence[Tensor]) -> Tensors:
    """Return the columns of `push_token` again."""
    return tuple(side_by_side(part, alpha, last, scale) for part in gradients)


@one_kernel
def weigh_shares(pairs: Tensor, shares: Tensor, scale: Tensor) -> Tensors:
    """Return the shares of the chunk's gradients in what tokens read, from q . x (G, C, C)."""
    return (pairs * shares * scale[..., None, :],)


def mixture_of(both: Tensor, left: Tensor, since: Tensor, of_chunk: Tensor) -> Tensor:
    """Return what is read of the state before the chunk (., C, 2 O), by shares (., C), and of the chunk."""
    return left[..., None] * of_weights(both) + since[..., None] * of_momentum(both) - of_chunk


@one_kernel
def mix(both: Tensor, left: Tensor, since: Tensor, of_chunk: Tensor) -> Tensors:
    """Return `mixture_of`."""
    return (mixture_of(both, left, since, of_chunk),)


@one_kernel
def mix_and_activate(both: Tensor, left: Tensor, since: Tensor, of_chunk: Tensor) -> Tensors:
    """Return `mixture_of`, before and after SiLU."""
    total = mixture_of(both, left, since, of_chunk)
    return total, F.silu(total)


@one_kernel
def sides(rows: Tensor, left: Tensor, since: Tensor) -> Tensors:
    """Return rows by the shares of weights and momentum, side by side (G, C, 2 O)."""
    return (torch.cat([left[..., None] * rows, since[..., None] * rows], dim=-1),)


@one_kernel
def pair_gradients(pairs: Tensor, given: Tensor, shares: Tensor, scale: Tensor, of_shares: Tensor) -> Tensors:
    """Return what `weigh_shares` returned, negative, and the gradients of pairs, and of shares so far (G, C, C).

    `given` is the gradient of what `weigh_shares` returned, negative.
    """
    by_column = scale[..., None, :]
    return -pairs * shares * by_column, -given * shares * by_column, of_shares - given * pairs * by_column


@one_kernel
def scale_gradient(pairs: Tensor, given: Tensor, shares: Tensor, of_scale: Tensor) -> Tensors:
    """Return the gradient of the scale so far; all but the last are transposed, so that the sum is over queries."""
    return (of_scale - (pairs * given * shares).sum(-1),)


@one_kernel
def row_gradients(
    by_weights: Tensor,
    by_momentum: Tensor,
    by_pairs: Tensor,
    left: Tensor,
    since: Tensor,
    rows: Tensor,
    of_left: Tensor,
    of_since: Tensor,
    sums: Sequence[Tensor],
) -> Tensors:
    """Return the gradient of the rows that read, or of the sums that they were made from, and of both shares so far."""
    found = left[..., None] * by_weights + since[..., None] * by_momentum + by_pairs
    for part in sums:
        found = found * slope(part)
    return found, of_left + (by_weights * rows).sum(-1), of_since + (by_momentum * rows).sum(-1)


@one_kernel
def push_gradients(
    step: Tensor,
    alpha: Tensor,
    last: Tensor,
    scale: Tensor,
    of_scale: Tensor,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    by_rows: Sequence[Tensor],
    by_columns: Sequence[Tensor],
    of_inputs: Sequence[Tensor],
    of_gradients: Sequence[Tensor],
    *,
    max_gradient: float | None,
) -> Tensors:
    """Return the gradients of `push_token` and of what was read with it: of step, alpha, last, x_i and g_i."""
    of_alpha = of_last = torch.zeros_like(step)
    for gradient, both in zip(gradients, by_rows, strict=True):
        of_alpha = of_alpha - (gradient * of_weights(both)).sum(-1)
        of_last = of_last - (gradient * of_momentum(both)).sum(-1)
    of_scale = of_scale + alpha * of_alpha + last * of_last
    of_squares, share = torch.zeros_like(step), torch.ones_like(step)
    if max_gradient is not None:
        squared = limit_norms(inputs, gradients, max_gradient)
        share = max_gradient * squared.rsqrt()
        of_squares = torch.where(squared > max_gradient**2, -0.5 * scale * of_scale / squared, 0.0)
    to_inputs, to_gradients = [], []
    for place, (one, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        by_input = (8.0 * of_squares * gradient.square().sum(-1))[..., None]
        by_gradient = (8.0 * of_squares * one.square().sum(-1))[..., None]
        to_inputs.append(of_inputs[place] + by_columns[place] + by_input * one)
        pushing = (scale * alpha)[..., None] * of_weights(by_rows[place])
        pushing = pushing + (scale * last)[..., None] * of_momentum(by_rows[place])
        to_gradients.append(of_gradients[place] - pushing + by_gradient * gradient)
    return 2.0 * share * of_scale, scale * of_alpha, scale * of_last, *to_inputs, *to_gradients


@one_kernel
def asked_gradients(sums: Tensor, asked: Tensor, of_gradient: Tensor) -> Tensors:
    """Return the gradients of p_i, and of h_i so far, from that of g_i."""
    return slope(sums) * of_gradient, curvature(sums) * asked * of_gradient


@one_kernel
def pass_back(of_sums: Tensor, sums: Tensor, of_input: Tensor, passing: Tensor) -> Tensors:
    """Return the gradient of h_i, from what it is so far and from that of x_(i+1), in two parts."""
    return (of_sums + slope(sums) * (of_input + passing),)


@one_kernel
def key_and_value(one: Tensor, other: Tensor, of_missing: Tensor) -> Tensors:
    """Return the gradients of keys, of two parts, and of values."""
    return one + other, -of_missing
