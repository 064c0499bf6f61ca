"""What a fused kernel reads, returns and keeps, on tensors without values (the meta device), for planning.

Torch's own fused kernels do not exist there, nor do those that its compiler makes. The operators below compute nothing;
whoever counts memory and work, as dist_mem/estimate/counting.py does, sees their inputs and outputs. Shape letters: B
lanes, T queries, J keys, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class AttentionKernel(NamedTuple):
    """What counts of an operator that attends."""

    products: int  # of all queries and keys
    query: int  # place of the query among its arguments; the key is the next one


KERNELS = {
    **{"fused_attention": AttentionKernel(2, 0), "fused_attention_backward": AttentionKernel(5, 1)},
    **{"window_attention": AttentionKernel(2, 0), "window_attention_backward": AttentionKernel(5, 3)},
    # Tiles multiply with distances too; in the backward twice as many, which its first kernel does not keep.
    **{"distance_attention": AttentionKernel(3, 0), "distance_attention_backward": AttentionKernel(8, 4)},
    # memory/parts/fused_rows.py
    **{"nearest_rows": AttentionKernel(1, 0), "nearest_of_buckets": AttentionKernel(1, 0)},
    # memory/parts/fused_signal.py
    **{"read_signal": AttentionKernel(1, 0), "read_signal_backward": AttentionKernel(2, 1)},
    **{"signal_moments": AttentionKernel(2, 0), "signal_moments_backward": AttentionKernel(4, 0)},
    **{"append_rows": AttentionKernel(2, 1), "append_rows_backward": AttentionKernel(1, 1)},
    # memory/parts/fused_matrix.py, of rows and a matrix
    **{"recall": AttentionKernel(1, 0), "recall_backward": AttentionKernel(2, 1)},
    **{"write": AttentionKernel(2, 1), "write_backward": AttentionKernel(4, 3)},
}


class KernelTraffic(NamedTuple):
    """What an operator does that launches several kernels."""

    num_bytes: list[int]  # read and written by each kernel
    workspace: int  # bytes that it allocates and frees again, at most


# By operator, of its arguments; filled where operators are defined.
LAUNCHED: dict[str, Callable[..., KernelTraffic]] = {}

_planned: ContextVar[str] = ContextVar("planned", default="meta")
_planned_card: ContextVar[int | None] = ContextVar("planned_card", default=None)
_USUAL_CARD = 80 * 2**30  # bytes of an A100 or H100


@contextmanager
def plan_for(device_type: str) -> Iterator[None]:
    """Let code that depends on the type of device take tensors without values for tensors of this one."""
    token = _planned.set(device_type)
    try:
        yield
    finally:
        _planned.reset(token)


@contextmanager
def planned_card(num_bytes: int) -> Iterator[None]:
    """Let code that depends on a GPU's memory take tensors without values for tensors of one with so much."""
    token = _planned_card.set(num_bytes)
    try:
        yield
    finally:
        _planned_card.reset(token)


def device_type_of(tensor: Tensor) -> str:
    """Return the type of the tensor's device, or of the one that is planned for."""
    return _planned.get() if tensor.is_meta else tensor.device.type


def card_bytes(tensor: Tensor) -> int:
    """Return the memory of the tensor's GPU as a whole, or of the one that is planned for; by default, of a GPU here.

    What is free of it changes within a run; what were decided by that would differ between a run and its resumption.
    """
    planned = _planned_card.get()
    if torch.cuda.is_available() and (tensor.device.type == "cuda" or planned is None):  # fake ones need none
        return torch.cuda.get_device_properties(None if tensor.is_meta else tensor.device).total_memory
    return planned or _USUAL_CARD


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


class _FusedAttention(torch.autograd.Function):
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


def fused_shapes(query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows and log-sums without values: (H, B, T, K), and (H, B, T) float32.

    Args:
        query: (H, B, T, K).  key, value: (H, B, J, K).  table: further scores, which the kernel reads and keeps.
    """
    found: tuple[Tensor, Tensor] = _FusedAttention.apply(query, key, value, table)
    return found


_operators.define("one_kernel(Tensor[] read) -> Tensor[]")
_called: list[Callable[[list[Tensor]], tuple[Tensor, ...]]] = []


def compute_one_kernel(read: list[Tensor]) -> list[Tensor]:
    """Run the function of `one_kernel` that was called last, on what it reads; each call is run once."""
    return list(_called.pop()(read))


_operators.impl("one_kernel", compute_one_kernel, "Meta")


def one_kernel(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Let a function of tensors count as one kernel where it is counted, as the compiler makes one of it.

    Its arguments are tensors and lists of them, its options are no tensors; it computes element by element, with sums
    over the last axis.
    """

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        tensors, structure = tree_flatten(arguments)
        if not tensors[0].is_meta:
            return function(*arguments, **options)
        _called.append(lambda read: function(*tree_unflatten(read, structure), **options))
        return tuple(torch.ops.dist_mem.one_kernel(tensors))

    return run
