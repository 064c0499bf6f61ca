"""Normal densities under which queries read a continuous signal, projections, and the divergence from a prior.

Source: Martins et al. 2022, "infinity-former", sec. 3.1, eq. 8-10, and sec. 3.4, eq. 20-21. Shape letters: B lanes, T
segment, S samples, N basis functions, D model, H heads, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.layers import merge_heads, split_heads


class HeadProjection(nn.Module):
    """Eq. 8: each head maps its own slice of the signal, with a d x d matrix where the head width is d = D / H."""

    def __init__(self, d_model: int, *, num_heads: int, d_head: int) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(
                f"memory.projections is heads, but model.d_model = {d_model} is no multiple of model.num_heads = "
                f"{num_heads}: every head maps its own slice; set memory.projections to full"
            )
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, d_head, d_model // num_heads))

    def forward(self, rows: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, H * K), as the linear map of `projections: full` does."""
        return merge_heads(split_heads(rows, self.num_heads) @ self.weight.mT[:, None])


def make_projection(projections: str, d_model: int, *, num_heads: int, d_head: int) -> nn.Module:
    """Return the layer for keys or values of all heads: (B, N, D) -> (B, N, H * K)."""
    if projections == "heads":
        return HeadProjection(d_model, num_heads=num_heads, d_head=d_head)
    return nn.Linear(d_model, num_heads * d_head, bias=False)


def affine_densities(query: Tensor, keys: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean (eq. 9) and variance (eq. 10), both (H, B, T).

    The networks are linear in the scores, w . (K q) = (K^T w) . q with K = signal W_K, so no score is ever formed.

    Args:
        query: (H, B, T, K).  keys: (H, B, 2, K), K^T w of mean and variance.  bias: (2,) or None.
    """
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    mu, variance = scores.unbind(-1)
    return mu.sigmoid(), F.softplus(variance)


def moments(query: Tensor, keys: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the position that a softmax over samples of the signal reads, both (H, B, T).

    As in continuous attention (Martins et al. 2020, "Sparse and continuous attention mechanisms", sec. 4): a query
    finds similar rows, whereas the affine networks must learn the positions of rows.

    Args:
        query: (H, B, T, K).  keys: (H, B, S, K), of samples of the signal.  places: (S,) in [0, 1], of the samples.
    """
    scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
    attention = scores.softmax(dim=-1)
    mu = (attention * places).sum(dim=-1)
    return mu, (attention * (places - mu[..., None]).square()).sum(dim=-1)  # E[t^2] - mu^2 would cancel in fp32


def divergence(mu: Tensor, variance: Tensor, *, prior_std: float, prior_mean: float | None) -> Tensor:
    """Return KL(N(mu, variance) || N(mu_0, sigma_0^2)) of every density, (H, B, T).

    Without `prior_mean` the term of the means is left out, as in eq. 20; the logarithm of eq. 21 lacks the square.
    """
    ratio = variance / prior_std**2
    kl = 0.5 * (ratio - ratio.log() - 1.0)
    if prior_mean is not None:
        kl = kl + 0.5 * ((mu - prior_mean) / prior_std).square()
    return kl
