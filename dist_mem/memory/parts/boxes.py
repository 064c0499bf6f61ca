"""Boxes as basis functions of a signal on [0, 1], and the Gibbs density of a query over them.

Box j is 1 for j / N <= t < (j + 1) / N and 0 elsewhere, so the signal and a query's score z(t) = q . K(t) / sqrt(K) are
steps, and the density p(t) = exp z(t) / integral of exp z has one value in each box. Its mass in a box is that of a
softmax over N slots: there is no mean, no variance and no integral to approximate. Source: Santos et al. 2025,
"infinity-Video", and the authors' code.

`closed`: t = 1 lies in the last box, and integrals are exact. `published`: t = 1 lies in no box, so every update loses
its newest row, and the sample there is 0; integrals are the trapezoid rule on 1,000 points with both ends, by which
boxes weigh as many points as they hold. Shape letters: B lanes, T segment, N boxes, H heads, K head dim, R bins.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_POINTS = 1_000  # of the published trapezoid rule
_ROUNDING = 1e-9  # of a box; so that m / S and tau + (1 - tau) i / E are in the box that exact arithmetic gives


def evaluate_boxes(positions: Tensor, *, num_basis: int, boxes: str) -> Tensor:
    """Return psi at positions (...), float64 for exact borders: (..., N) of their dtype, 0 outside [0, 1]."""
    scaled = positions.to(torch.float64) * num_basis
    index = (scaled + _ROUNDING).floor()
    if boxes == "closed":
        index = torch.where((scaled - num_basis).abs() <= _ROUNDING, num_basis - 1.0, index)
    return (index[..., None] == torch.arange(num_basis, device=positions.device)).to(positions.dtype)


def box_masses(query: Tensor, keys: Tensor, *, boxes: str) -> Tensor:
    """Return the mass of each query's Gibbs density in each box, (H, B, T, N).

    `published` leaves a little of it to the last point, which no box holds; score and value are 0 there.

    Args:
        query: (H, B, T, K).  keys: (H, B, N, K), of the coefficients.
    """
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if boxes == "closed":
        return scores.softmax(dim=-1)  # the published code subtracts no maximum, and overflows beyond 88
    return (F.pad(scores, (0, 1)) + point_shares(scores.shape[-1], scores).log()).softmax(dim=-1)[..., :-1]


def point_shares(num_basis: int, like: Tensor) -> Tensor:
    """Return the trapezoid rule's weight of each box, and of t = 1, which lies in none: (N + 1,), of sum 1."""
    steps = NUM_POINTS - 1
    border = torch.arange(num_basis + 1, device=like.device)
    first = -(-border * steps).div(num_basis, rounding_mode="floor")  # index of the first point at or after a border
    counts = F.pad(first.diff().to(like.dtype), (0, 1), value=0.5)
    return torch.where(border == 0, counts - 0.5, counts) / steps


def bin_mass(mass: Tensor, num_bins: int) -> Tensor:
    """Spread the mass of each box (..., N) evenly over the box, and return that of R equal bins, (..., R)."""
    num_basis = mass.shape[-1]
    below = F.pad(mass.cumsum(dim=-1), (1, 0))
    edge = torch.arange(num_bins + 1, device=mass.device) * num_basis  # in units of 1 / (N R)
    box = edge.div(num_bins, rounding_mode="floor").clamp(max=num_basis - 1)
    inside = (edge - box * num_bins).to(mass.dtype) / num_bins
    return torch.lerp(below[..., box], below[..., box + 1], inside).diff(dim=-1)


def box_histogram(mass: Tensor, real: Tensor, *, num_bins: int) -> Tensor:
    """Return what all heads and real queries read in each of `num_bins` equal bins of [0, 1]: (B, num_bins).

    The published code differs: it integrates by the trapezoid rule on the edges of 128 bins, loses the first, so that
    each of the 127 others has its neighbour's mass, and gives all lanes the samples of the first, unsorted.

    Args:
        mass: (H, B, T, N), of `box_masses`.  real: (B, T) bool, which queries count.
    """
    return bin_mass(torch.where(real[:, :, None], mass, 0.0).sum(dim=(0, 2)), num_bins)


def box_moments(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the position under densities with these masses (..., N), both (...)."""
    num_basis = mass.shape[-1]
    centres = (torch.arange(num_basis, device=mass.device, dtype=mass.dtype) + 0.5) / num_basis
    share = mass / mass.sum(dim=-1, keepdim=True)
    mu = (share * centres).sum(dim=-1)
    return mu, (share * (centres - mu[..., None]).square()).sum(dim=-1) + 1.0 / (12 * num_basis**2)
