"""Compression functions of the Compressive Transformer (Rae et al. 2020, sec. 3.1): T rows become floor(T / c).

Where c does not divide T, the newest T mod c rows are left out. Shape letters: B lanes, T rows, D model, c rate.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Compression(nn.Module):
    """Base class of compressions.

    `forward(rows, usage)` takes rows (B, T, D) and usage (B, T), the attention that each row receives, and returns
    (B, T // c, D). Usage is None unless `needs_usage`.
    """

    needs_usage = False

    def __init__(self, d_model: int, *, rate: int) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        raise NotImplementedError


class MeanPool(Compression):
    """Mean of every c rows."""

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        return F.avg_pool1d(rows.mT, self.rate).mT


class MaxPool(Compression):
    """Maximum of every c rows."""

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        return F.max_pool1d(rows.mT, self.rate).mT


class MostUsed(Compression):
    """Keep the rows that the segment's queries attend to most, in their order."""

    needs_usage = True

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        assert usage is not None
        return rows.gather(1, self.choose_rows(usage)[..., None].expand(-1, -1, rows.shape[2]))

    def choose_rows(self, usage: Tensor) -> Tensor:
        """Return which of T rows are kept, (B, T // c) int64, growing."""
        return usage.topk(usage.shape[1] // self.rate, dim=1).indices.sort(dim=1).values


class Convolution(Compression):
    """One convolution whose width and stride are the rate."""

    def __init__(self, d_model: int, *, rate: int) -> None:
        super().__init__(d_model, rate=rate)
        self.convolution = nn.Conv1d(d_model, d_model, rate, stride=rate)

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        return self.convolution(rows.mT).mT


class DilatedConvolutions(Compression):
    """Three convolutions of width 3 and dilation 1, 2, 4, each added to its input, then one as in `Convolution`.

    The paper names dilated convolutions and says nothing of their number or widths.
    """

    def __init__(self, d_model: int, *, rate: int) -> None:
        super().__init__(d_model, rate=rate)
        self.mixing = nn.ModuleList(
            nn.Conv1d(d_model, d_model, 3, dilation=dilation, padding=dilation) for dilation in (1, 2, 4)
        )
        self.convolution = nn.Conv1d(d_model, d_model, rate, stride=rate)

    def forward(self, rows: Tensor, usage: Tensor | None) -> Tensor:
        columns = rows.mT
        for convolution in self.mixing:
            columns = columns + F.relu(convolution(columns))
        return self.convolution(columns).mT


COMPRESSIONS: dict[str, type[Compression]] = {
    "conv": Convolution,
    "dilated": DilatedConvolutions,
    "max": MaxPool,
    "mean": MeanPool,
    "most_used": MostUsed,
}
