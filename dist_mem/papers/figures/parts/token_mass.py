"""Attention as mass on tokens, whatever the rows are: a row's mass is shared evenly by the tokens that it came from.

Tokens are counted from the segment's first input, so query t reads token t and older ones, and predicts token t + 1.
Shape letters: T segment, R rows, H heads, L tokens, D distances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.parts.inspection import Rows


class TokenMass(NamedTuple):
    """The mass of every query on each of the tokens first, ..., first + L - 1."""

    mass: Tensor  # (H, T, L) float64
    first: int


def token_mass(rows: Rows, num_queries: int) -> TokenMass:
    """Return the mass of a lane's first queries on each token."""
    weights = rows.weights[:, 0, :num_queries].double().cpu()
    begin, end = rows.spans.begin[0].cpu(), rows.spans.end[0].cpu()
    held = begin < end
    if not held.any():
        return TokenMass(weights.new_zeros(*weights.shape[:2], 0), 0)
    weights, begin, end = weights[..., held], begin[held], end[held]
    first, length = int(begin.min()), int(end.max() - begin.min())
    spread = torch.zeros(len(begin), length, dtype=torch.float64)
    token = first + torch.arange(length)
    inside = (token >= begin[:, None]) & (token < end[:, None])
    spread[inside] = 1.0
    return TokenMass(weights @ (spread / (end - begin)[:, None]), first)


def mass_by_distance(found: TokenMass, num_distances: int) -> Tensor:
    """Return the mass at distances 1, ..., D back from the predicted token, (H, T, D); 1 is the newest input."""
    num_heads, num_queries, length = found.mass.shape
    token = torch.arange(num_queries)[:, None] + 1 - torch.arange(1, num_distances + 1)  # (T, D)
    column = token - found.first + 1
    padded = F.pad(found.mass, (1, 1))  # whatever is not read is column 0 or L + 1
    column = column.clamp(min=0, max=length + 1).expand(num_heads, -1, -1)
    return padded.gather(2, column)
