"""Cross-entropy of a linear map, whose logits never stand whole in memory if they are large.

Up to `KEPT` logits, the forward keeps log-probabilities for the backward, in float32. Above, rows are processed in
chunks of at most `CHUNK` logits, nothing is kept, and the backward computes each chunk again: a third more operations
in this layer, and the memory no longer grows with the number of rows. Shape letters: R rows, D width, V columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.nn.kernel_shapes import device_type_of

KEPT = 2**26  # logits, 256 MiB in float32
CHUNK = 2**24
_MOST_CHUNKS = 1024  # from 2^34 logits on, chunks are larger instead
_CACHED = 2**19  # elements that stay in a core's cache
Weights = tuple[tuple[Tensor, Tensor | None], ...]  # (V_i, D) and (V_i,) of consecutive columns


def full_precision(logits: Tensor) -> Tensor:
    """Cast half precision to float32; leave wider types."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def standing_logits(num_rows: int, num_columns: int) -> int:
    """Return how many logits stand in memory at one time."""
    return num_rows * num_columns if num_rows * num_columns <= KEPT else max(CHUNK, num_columns)


def row_chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Return the rows of each chunk, in order."""
    size = max(1, standing_logits(num_rows, num_columns) // num_columns, num_rows // _MOST_CHUNKS)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, max(1, num_rows), size)]


def linear(rows: Tensor, weights: Weights) -> Tensor:
    """Return the logits of all columns: (R, D) -> (R, V)."""
    parts = [F.linear(rows, weight, bias) for weight, bias in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _chunks(rows: Tensor, weights: Weights) -> list[slice]:
    """Return the rows of each chunk; meta tensors that are planned for no device take no memory, so one has them all.

    Their products are counted, and a second computation in the backward is none of the model's.
    """
    if device_type_of(rows) == "meta":
        return [slice(0, len(rows))]
    return row_chunks(len(rows), sum(len(weight) for weight, _ in weights))


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the parameters themselves, which ZeRO-3 gathers again for the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, learns: bool, *parameters: Tensor | None) -> Tensor:
        weights = _pairs(parameters)
        chunks = _chunks(rows, weights)
        losses, kept = [], None
        for chunk in chunks:
            log_probs = _log_softmax(linear(rows[chunk], weights))
            losses.append(F.nll_loss(log_probs, targets[chunk], ignore_index=IGNORE, reduction="none"))
            if learns and len(chunks) == 1:
                kept = log_probs
        ctx.save_for_backward(rows, targets, kept, *parameters)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, targets, kept, *parameters = ctx.saved_tensors
        weights = _pairs(parameters)
        scored = targets != IGNORE
        scale, columns = torch.where(scored, gradients[0], 0.0), torch.where(scored, targets, 0)
        of_rows = torch.empty_like(rows)
        sums: list[Tensor | None] = [None] * len(parameters)
        chunks = _chunks(rows, weights)
        for chunk in chunks:
            log_probs = _log_softmax(linear(rows[chunk], weights)) if kept is None else kept
            of_logits = _logit_gradients(log_probs, columns[chunk, None], scale[chunk, None], rows.dtype)
            parts = of_logits.split([len(weight) for weight, _ in weights], dim=-1)
            products = [part @ weight for part, (weight, _) in zip(parts, weights, strict=True)]
            of_rows[chunk] = products[0] if len(products) == 1 else products[0] + products[1]
            for index, part in enumerate(parts):
                found = [part.mT @ rows[chunk]] + ([] if weights[index][1] is None else [part.sum(0)])
                for place, one in enumerate(found, start=2 * index):
                    # In half precision, sums over many chunks would lose bits.
                    one, total = one if len(chunks) == 1 else full_precision(one), sums[place]
                    sums[place] = one if total is None else total.add_(one)
        return of_rows, None, None, *[total if total is None else total.to(rows.dtype) for total in sums]


def _cached_rows(logits: Tensor) -> list[slice]:
    """Return rows in groups that stay in a core's cache between two operations; all of them on other devices.

    Without values, only the first group: the next ones would use its memory again, and counting it is all that is left.
    """
    num_rows, num_columns = logits.shape
    size = max(1, _CACHED // num_columns) if device_type_of(logits) == "cpu" else max(1, num_rows)
    end = min(size, num_rows) if logits.is_meta else num_rows
    return [slice(begin, begin + size) for begin in range(0, end, size)]


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities in float32 or wider, (R, V)."""
    if full_precision(logits[:0]).dtype == logits.dtype:
        return logits.log_softmax(-1)
    log_probs = torch.empty_like(logits, dtype=torch.float32)
    for group in _cached_rows(logits):
        torch.log_softmax(full_precision(logits[group]), -1, out=log_probs[group])
    return log_probs


def _logit_gradients(log_probs: Tensor, columns: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the logits from log-probabilities (R, V), which are overwritten if they have this dtype.

    torch's kernel reads the gradient of the log-probabilities, here 0 in all columns but one. A few rows of it are used
    again for all others; autograd fills as many rows with 0 as there are logits. columns and scale of losses: (R, 1).
    """
    groups = _cached_rows(log_probs)
    upstream = torch.zeros_like(log_probs[groups[0]]) if groups else log_probs
    in_place = dtype == log_probs.dtype
    result = log_probs if in_place else torch.empty_like(log_probs, dtype=dtype)
    for group in groups:
        part, column = log_probs[group], columns[group]
        given = upstream[: len(part)].scatter_(1, column, -scale[group])
        out = part if in_place else torch.empty_like(part)
        torch.ops.aten._log_softmax_backward_data.out(given, part, -1, part.dtype, out=out)
        given.scatter_(1, column, 0.0)
        if not in_place:
            result[group] = out
    return result


def _pairs(parameters: Any) -> Weights:
    return tuple(zip(parameters[::2], parameters[1::2], strict=True))


def linear_cross_entropy(rows: Tensor, targets: Tensor, weights: Weights) -> Tensor:
    """Return -log softmax(rows W^T + b) at the targets, in float32 or wider; a backward may run only once.

    Args:
        rows: (R, D).  targets: (R,) int64, IGNORE where the loss is 0.  weights: one or two parts of the columns.

    Returns:
        (R,), the values and gradients of `F.cross_entropy(full_precision(linear(...)))`.
    """
    parameters = [parameter for pair in weights for parameter in pair]
    losses: Tensor = _LinearCrossEntropy.apply(rows, targets, torch.is_grad_enabled(), *parameters)
    return losses
