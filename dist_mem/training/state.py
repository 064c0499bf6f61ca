"""The state of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dist_mem.data.mixture import MixturePart


class TrainState(NamedTuple):
    """The state of a run after `step` updates, on this rank; with that of the engine, a checkpoint restores it."""

    step: int
    memories: list[Any]  # one memory state per lane group
    cursors: Tensor  # (P, 3) int64
    validation: dict[str, Any] | None = None  # of the newest evaluation, as in checkpoint/retention.py
    stage_ends: Sequence[int] = ()  # steps at which the first stages ended, up to the last one by data.until_accuracy
    mixture: Sequence[MixturePart] = ()  # the weights of the sources so far, the present ones last
