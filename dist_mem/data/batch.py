"""Input of the training loop: one micro-batch, and all micro-batches of one update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # target of a position that is not scored


class Batch(NamedTuple):
    """One segment of each lane of a lane group, on the CPU."""

    tokens: Tensor  # (B, T) int64, inputs; real tokens first, padding is token 0
    targets: Tensor  # (B, T) int64, the next token, or IGNORE
    valid_len: Tensor  # (B,) int64, how many of the T positions are real; 0 for an idle lane
    is_new_document: Tensor  # (B,) bool, this segment is the first of its document
    document: Tensor  # (B,) int64, index of the document in its split, -1 for an idle lane
    recall: Tensor | None  # (B, T) int64, tokens from a target back to its referent, 0 = none; None: not recorded

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on `device`."""
        return Batch._make(None if part is None else part.to(device, non_blocking=True) for part in self)


class Update(NamedTuple):
    """The data of one rank for one optimizer update."""

    batches: list[Batch]  # segments_per_update * num_groups; all groups of the first segment, then of the second, ...
    cursors: Tensor  # (lanes of this rank, 3) int64, position of each lane AFTER this update: epoch, place, offset
    num_scored: int  # targets of this rank in this update that are not IGNORE
    epoch: float  # epochs completed after this update by the mean lane of this rank
    documents_started: int  # documents whose first token is in these segments
    documents_skipped: int = 0  # damaged documents that lanes skipped (data.on_corrupt: skip)
    num_recall: int = 0  # scored targets that refer back to something; 0 if not recorded
