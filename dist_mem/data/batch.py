"""Input of the training loop: one micro-batch, and all micro-batches of one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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

    def pin(self) -> Batch:
        """Return the same batch in pinned memory, from which a copy to a GPU does not wait."""
        return Batch._make(None if part is None else part.pin_memory() for part in self)


def window_slices(num_batches: int, num_groups: int, num_segments: int) -> list[slice]:
    """Return the places of the micro-batches of every window in `Update.batches`: successive ones of a lane group."""
    size = num_groups * num_segments
    starts = [begin + group for begin in range(0, num_batches, size) for group in range(num_groups)]
    return [slice(start, start - start % num_groups + size, num_groups) for start in starts]


def in_windows(batches: Sequence[Batch], num_groups: int, num_segments: int) -> list[Batch]:
    """Return windows of `num_segments` successive segments of each lane group; a window of one is its batch itself.

    A window has tokens, targets and recall (B, n T), and valid_len, is_new_document and document (B, n).

    Args:
        batches: in the order of `Update.batches`.
    """
    if num_segments == 1:
        return list(batches)
    return [_join(batches[window]) for window in window_slices(len(batches), num_groups, num_segments)]


def _join(segments: Sequence[Batch]) -> Batch:
    tokens, targets, valid_len, is_new, documents, recall = zip(*segments, strict=True)
    return Batch(
        torch.cat(tokens, dim=1),
        torch.cat(targets, dim=1),
        torch.stack(valid_len, dim=1),
        torch.stack(is_new, dim=1),
        torch.stack(documents, dim=1),
        None if recall[0] is None else torch.cat(recall, dim=1),
    )


class Copies(NamedTuple):
    """The batches of an update on the device, whose copying another stream has begun."""

    batches: list[Batch]
    copied: Any  # event of that stream


class Update(NamedTuple):
    """The data of one rank for one optimizer update."""

    batches: list[Batch]  # segments_per_update * num_groups; all groups of the first segment, then of the second, ...
    cursors: Tensor  # (lanes of this rank, 3) int64, position of each lane AFTER this update: epoch, place, offset
    scored: list[int]  # of every micro-batch, its targets that are not IGNORE
    epoch: float  # epochs completed after this update by the mean lane of this rank
    documents_started: int  # documents whose first token is in these segments
    documents_skipped: int = 0  # damaged documents that lanes skipped (data.on_corrupt: skip)
    num_recall: int = 0  # scored targets that refer back to something; 0 if not recorded
    copies: Copies | None = None  # on the device, perhaps still under way

    @property
    def num_scored(self) -> int:
        """Targets of this rank in this update that are not IGNORE."""
        return sum(self.scored)
