"""A causal convolution of every channel by itself, over a token and those before it.

Linear memories and Titans have one, with SiLU after it; attention has the same where `memory.kernel` is set, on
queries, keys and values after their projections, before heads and positions. Sources: So et al. 2021, "Primer" (kernel
3, no activation); Allen-Zhu 2025, "Canon layers"; Yang et al. 2024, DeltaNet (kernel 4, SiLU), whose operation and
first weights these are. Shape letters: B lanes, T segment, W channels, C context rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tail: TypeAlias = Tensor | tuple[()]  # (B, kernel - 1, W), newest rows before a convolution; (): there is none


def convolve(rows: Tensor, taps: Tensor) -> Tensor:
    """Return the sum of each row and those before it, weighted by `taps` (W, kernel): (B, T + kernel - 1, W) -> T."""
    seg_len = rows.shape[1] - taps.shape[1] + 1
    total = rows[:, :seg_len] * taps[:, 0]
    for place in range(1, taps.shape[1]):
        total = torch.addcmul(total, rows[:, place : place + seg_len], taps[:, place])
    return total


@torch.no_grad()
def draw_taps(taps: Tensor) -> None:
    """Draw first weights (W, kernel) from U(-1/sqrt(kernel), 1/sqrt(kernel)), as torch does for such a convolution."""
    if not taps.is_meta:
        bound = 1 / math.sqrt(taps.shape[1])
        taps.uniform_(-bound, bound)


def newest_of_both(rows: Tensor, valid_len: Tensor, *, num_rows: int) -> Tensor:
    """Return the newest real rows, of old ones and then those of the segment: (B, num_rows + T, W) -> num_rows."""
    places = valid_len[:, None] + torch.arange(num_rows, device=rows.device)
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


class ShortConvolution(nn.Module):
    """The convolution of projected rows, and SiLU."""

    def __init__(self, width: int, *, kernel: int) -> None:
        super().__init__()
        self.width, self.before_len = width, kernel - 1  # channels; rows before a row that it sees
        self.taps = nn.Parameter(torch.zeros(width, kernel))  # the last: the present token

    def reset_parameters(self) -> None:
        draw_taps(self.taps)

    def forward(self, *parts: Tensor, frozen: bool = False) -> tuple[Tensor, ...]:
        """Convolve rows (B, kernel - 1 + R, W) in parts by channels: (B, R, W) in the same parts.

        Args:
            parts: all channels, or only the last of them.
            frozen: whether the rows get a gradient and the taps do not.
        """
        # A copy: what `detach` returns would lose its values after the forward, at ZeRO stage 3.
        taps = self.taps.detach().clone() if frozen else self.taps
        widths = [part.shape[-1] for part in parts]
        taps = taps[len(taps) - sum(widths) :].split(widths)
        return tuple(F.silu(convolve(part, part_taps)) for part, part_taps in zip(parts, taps, strict=True))

    def empty_tail(self, num_lanes: int, *, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Return what is before a document, (B, kernel - 1, W)."""
        return torch.zeros(num_lanes, self.before_len, self.width, device=device, dtype=dtype)

    def after_context(
        self, project: Callable[[Tensor], Tensor], context: Tensor, is_row: Tensor, x: Tensor, *, num_before: int
    ) -> Tensor:
        """Project rows of a context and of a segment, and put zeros before them where a document begins.

        Args:
            context: (B, C, D).  is_row: (B, C) bool; others are 0 for the rows after them.  x: (B, T, D).
            num_before: how many rows of the context are only seen by others, at most kernel - 1.

        Returns:
            (B, kernel - 1 + C - num_before + T, W).
        """
        # Project them separately, so that no gradient is computed for context rows that need none.
        projected = [project(x)] if x.shape[1] or not context.shape[1] else []
        if context.shape[1]:
            projected.insert(0, torch.where(is_row[..., None], project(context), 0.0))
        rows = projected[0] if len(projected) == 1 else torch.cat(projected, dim=1)
        return F.pad(rows, (0, 0, self.before_len - num_before, 0))


def short_convolution(widths: Sequence[int], kernel: int | None) -> ShortConvolution | None:
    """Return the convolution of rows of these widths side by side; None: `memory.kernel` is null."""
    return None if kernel is None else ShortConvolution(sum(widths), kernel=kernel)
