"""Sticky memories: a long-term memory is sampled more densely where it was read.

Source: Martins et al. 2022, "infinity-former", sec. 3.3, and the authors' GPT-2 code. Shape letters: B lanes, T
segment, H heads, S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_mem.memory.parts.counter_hash import uniform

_TINY = 1e-300  # avoids 0 / 0
_BEYOND = 1e-6  # how far the outer edges of the outer bins lie outside of [0, 1], as published


def read_histogram(mu: Tensor, variance: Tensor, real: Tensor, *, num_bins: int) -> Tensor:
    """Return the mass of all heads' and queries' densities in each of `num_bins` equal bins of [0, 1].

    Args:
        mu, variance: (H, B, T), of the normal densities.  real: (B, T) bool, which queries count.

    Returns:
        (B, num_bins), not normalised; mass outside [0, 1] is lost.
    """
    mass = bin_masses(mu, variance, num_bins=num_bins, beyond=_BEYOND)
    return torch.where(real[:, :, None], mass, 0.0).sum(dim=(0, 2))


def bin_masses(mu: Tensor, variance: Tensor, *, num_bins: int, beyond: float = 0.0) -> Tensor:
    """Return the mass of normal densities (...) in equal bins of [0, 1], whose ends reach beyond: (..., num_bins)."""
    edges = torch.linspace(0.0, 1.0, num_bins + 1, device=mu.device, dtype=mu.dtype)
    if beyond:
        edges = torch.cat([edges[:1] - beyond, edges[1:-1], edges[-1:] + beyond])
    below = torch.special.ndtr((edges - mu[..., None]) * variance[..., None].rsqrt())
    return below.diff(dim=-1)


def sample_positions(
    histogram: Tensor, sampling: str, *, num_samples: int, counters: tuple[Tensor | int, ...]
) -> Tensor:
    """Draw positions in [0, 1] from a histogram (B, num_bins), sorted: (B, S) float64.

    `sticky` draws bins independently and takes their left edges, as the published code does (its jitter within a bin is
    switched off). `stratified` is systematic sampling: S equal steps of the histogram's distribution function, from one
    random offset; a position has the same distribution, uniform within its bin, with far less noise.
    """
    num_bins = histogram.shape[1]
    total = histogram.to(torch.float64).cumsum(dim=1)
    if sampling == "sticky":
        levels = uniform(num_samples, *counters).sort(dim=1).values
    else:
        steps = torch.arange(num_samples, device=histogram.device)
        levels = (uniform(1, *counters) + steps) / num_samples
    targets = levels * total[:, -1:]
    bins = torch.searchsorted(total, targets, right=True).clamp(max=num_bins - 1)
    if sampling == "sticky":
        return bins.to(torch.float64) / num_bins
    mass = total.diff(dim=1, prepend=torch.zeros_like(total[:, :1])).gather(1, bins).clamp(min=_TINY)
    inside = 1.0 - (total.gather(1, bins) - targets) / mass
    return (bins + inside.clamp(0.0, 1.0)) / num_bins
