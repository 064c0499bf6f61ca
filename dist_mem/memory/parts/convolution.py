"""A causal convolution of every channel by itself. Shape letters: B lanes, T segment, W channels."""

from __future__ import annotations

import torch
from torch import Tensor


def convolved(rows: Tensor, taps: Tensor) -> Tensor:
    """Return the sum of each row and those before it, weighted by `taps` (W, kernel): (B, T + kernel - 1, W) -> T."""
    seg_len = rows.shape[1] - taps.shape[1] + 1
    total = rows[:, :seg_len] * taps[:, 0]
    for place in range(1, taps.shape[1]):
        total = torch.addcmul(total, rows[:, place : place + seg_len], taps[:, place])
    return total
