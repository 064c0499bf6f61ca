"""Which memories compute by our own kernels, and why: on GPUs for long segments, unless `model.attention` forces one.

auto takes them where they run, triton for every length; with all other values torch's operators compute.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dist_mem.nn.attention import SHORT, BackEndChoice
from dist_mem.nn.distance_attention import WIDEST, why_not
from dist_mem.nn.kernel_shapes import device_type_of


@runtime_checkable
class UsesKernels(Protocol):
    """A module that has kernels of our own."""

    computes: str  # what they compute, as a message says it

    def choose_kernels(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return triton or torch, and why."""


def choose(
    back_end: str, device_type: str, num_queries: int, *, width: int, refused: str | None, reason: str
) -> BackEndChoice:
    """Return what computes.

    Args:
        back_end: `model.attention`.  width: of a head.
        refused: why our kernels cannot compute it; None: they can.  reason: what they gain.
    """
    if back_end not in ("auto", "triton"):
        return BackEndChoice("torch", "model.attention")
    if device_type != "cuda":
        return BackEndChoice("torch", "our kernels run on GPUs only")
    if back_end == "auto" and num_queries < SHORT:
        return BackEndChoice("torch", f"it is fast for segments of {num_queries} tokens")
    if width > WIDEST:
        refused = f"our kernels take heads of at most {WIDEST} numbers, these have {width}"
    if refused := refused or why_not():
        return BackEndChoice("torch", refused)
    return BackEndChoice("triton", reason)


def by_kernels(module: UsesKernels, rows: Tensor, num_queries: int) -> bool:
    """Return whether kernels compute for rows of this device and dtype; they sum in float32."""
    return rows.dtype != torch.float64 and module.choose_kernels(device_type_of(rows), num_queries).back_end == "triton"


def describe_kernels(model: nn.Module, device_type: str, num_queries: int) -> list[str]:
    """Return one line for each choice of memories with own kernels; none on CPUs, where nothing is to choose."""
    if device_type != "cuda":
        return []
    users = [module for module in model.modules() if isinstance(module, UsesKernels)]
    choices = Counter((user.computes, user.choose_kernels(device_type, num_queries)) for user in users)
    return [
        f"{what} of {count} layers: {choice.back_end} ({choice.reason})" for (what, choice), count in choices.items()
    ]
