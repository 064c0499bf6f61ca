"""Rows that `Inspectable.forget` takes out of a cache: they stay in place, and nothing attends to them any more.

The mask is a part of the state, empty unless something is taken out. Shape letters: B lanes, M rows, D model.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.layers import newest_rows

Shown: TypeAlias = Tensor | tuple[()]  # (B, M) bool, false for rows taken out; (): none is


def valid_rows(length: Tensor, num_rows: int, shown: Shown) -> Tensor:
    """Return which of M rows may be attended to, (B, M) bool: the newest `length` (B,), but those taken out."""
    valid = newest_rows(length, num_rows)
    return valid & shown if isinstance(shown, Tensor) else valid


def take_out(shown: Shown, rows: Tensor) -> Tensor:
    """Return the mask after taking out `rows` too, (B, M) bool."""
    return shown & ~rows if isinstance(shown, Tensor) else ~rows


def append_shown(shown: Shown, new: Shown, num_new: int) -> Shown:
    """Return the mask of the newest M of M rows and E new ones; `new` (B, E) bool, (): all are shown."""
    if not isinstance(shown, Tensor):
        return ()
    added = new if isinstance(new, Tensor) else shown.new_ones(len(shown), num_new)
    return torch.cat([shown, added], dim=1)[:, -shown.shape[1] :]


def zero_hidden(rows: Tensor, shown: Shown) -> Tensor:
    """Return rows (B, E, D), of which the first are a cache's oldest, with 0 in place of those taken out."""
    if not isinstance(shown, Tensor):
        return rows
    mask = F.pad(shown[:, : rows.shape[1]], (0, max(0, rows.shape[1] - shown.shape[1])), value=True)
    return torch.where(mask[..., None], rows, 0.0)
