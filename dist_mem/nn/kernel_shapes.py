"""What a fused attention kernel reads, returns and keeps, on tensors without values (the meta device), for planning.

Torch's own fused kernels do not exist there. The operators below compute nothing; whoever counts memory and work, as
dist_mem/estimate/counting.py does, sees their inputs and outputs. Shape letters: B lanes, T queries, J keys, H heads, K
head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kernel(NamedTuple):
    """What counts of an operator that attends."""

    products: int  # of all queries and keys
    query: int  # place of the query among its arguments; the key is the next one


KERNELS = {
    **{"fused_attention": Kernel(2, 0), "fused_attention_backward": Kernel(5, 1)},
    # Tiles multiply with distances too; in the backward twice as many, which its first kernel does not keep.
    **{"distance_attention": Kernel(3, 0), "distance_attention_backward": Kernel(8, 4)},
}


class Launched(NamedTuple):
    """What an operator does that launches several kernels."""

    num_bytes: list[int]  # read and written by each kernel
    workspace: int  # bytes that it allocates and frees again, at most


LAUNCHED: dict[str, Callable[..., Launched]] = {}  # by operator, of its arguments; filled where operators are defined

_planned: ContextVar[str] = ContextVar("planned", default="meta")


@contextmanager
def planned_for(device_type: str) -> Iterator[None]:
    """Let code that depends on the type of device take tensors without values for tensors of this one."""
    token = _planned.set(device_type)
    try:
        yield
    finally:
        _planned.reset(token)


def device_type_of(tensor: Tensor) -> str:
    """Return the type of the tensor's device, or of the one that is planned for."""
    return _planned.get() if tensor.is_meta else tensor.device.type


_operators = torch.library.Library("dist_mem", "FRAGMENT")
_operators.define("fused_attention(Tensor query, Tensor key, Tensor value, Tensor? table) -> (Tensor, Tensor)")
_operators.define(
    "fused_attention_backward(Tensor rows, Tensor query, Tensor key, Tensor value, Tensor? table)"
    " -> (Tensor, Tensor, Tensor, Tensor?)"
)


def _forward(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    rows: Tensor, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    gradient = None if table is None else torch.empty_like(table)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), gradient


_operators.impl("fused_attention", _forward, "Meta")
_operators.impl("fused_attention_backward", _backward, "Meta")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, log_sum = torch.ops.dist_mem.fused_attention(query, key, value, table)
        ctx.save_for_backward(rows, log_sum, query, key, value, table)
        return rows, log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        _, _, query, key, value, table = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = torch.ops.dist_mem.fused_attention_backward(
            gradients[0], query, key, value, table
        )
        return found


def fused(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows and log-sums without values: (H, B, T, K), and (H, B, T) float32.

    Args:
        query: (H, B, T, K).  key, value: (H, B, J, K).  table: further scores, which the kernel reads and keeps.
    """
    found: tuple[Tensor, Tensor] = _Fused.apply(query, key, value, table)
    return found
