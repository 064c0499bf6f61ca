"""A memory that begins each document with learned rows instead of zeros.

The state holds what was written, and a lane that begins a document reads the parameters instead. So they are used in
the forward only (rule 7: at ZeRO stage 3 their values are there at no other time), and they learn from every document
that begins inside an update. Shape letters: B lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedStart(nn.Module):
    """The content of an empty memory, one for all lanes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.empty(shape))

    def forward(self, held: Tensor, is_fresh: Tensor) -> Tensor:
        """Return the start in the lanes that are fresh, (B,) bool, and what is held, (B, *shape), in the others."""
        fresh = is_fresh.view(-1, *[1] * self.start.dim())
        return torch.where(fresh, self.start.to(held.dtype), held)
