"""A sum over all ranks that runs while the device and the host do something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class PendingSum(NamedTuple):
    """A sum over all ranks that is under way."""

    values: Tensor  # (N,) float64, on the device
    work: Any  # of torch.distributed

    def wait(self) -> list[float]:
        """Return the sums; the one point at which the host waits, for all ranks and for the device."""
        self.work.wait()
        return self.values.tolist()


def begin_sum(measured: Tensor, known: Sequence[float], device: torch.device) -> PendingSum:
    """Start the element-wise float64 sum of this rank's values over all ranks; nothing waits.

    Args:
        measured: (M,) float64 on the device, perhaps not computed yet.
        known: numbers that the host has.
    """
    # From pinned memory, because a copy from other memory would wait for the device.
    own = torch.tensor(known, dtype=torch.float64, pin_memory=device.type == "cuda")
    values = torch.cat([measured, own.to(device, non_blocking=True)])
    return PendingSum(values, dist.all_reduce(values, async_op=True))
