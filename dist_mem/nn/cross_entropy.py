"""Cross-entropy of a linear map, whose logits never stand whole in memory if they are large.

Up to `KEPT` logits, the forward keeps log-probabilities for the backward, in float32. Above, rows are processed in
chunks of at most `CHUNK` logits, nothing is kept, and the backward computes each chunk again: a third more operations
in this layer, and the memory no longer grows with the number of rows. On a GPU, a share of its memory, `GPU_SHARE`,
takes the place of both. There, in half precision, logits themselves are kept, two compiled kernels read them once each,
with float32 only in registers, and columns are padded to a multiple of 8, as products of odd sizes run on slow kernels
(docs/results/gpu.md). Shape letters: R rows, D width, V columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.nn.kernel_shapes import card_bytes, device_type_of

KEPT = 2**26  # logits, 256 MiB in float32
CHUNK = 2**24
GPU_SHARE = 1 / 32  # of a GPU's memory, for logits in half precision; their gradients take as much
_MOST_CHUNKS = 1024  # from 2^34 logits on, chunks are larger instead
_CACHED = 2**19  # elements that stay in a core's cache
Weights = tuple[tuple[Tensor, Tensor | None], ...]  # (V_i, D) and (V_i,) of consecutive columns


def full_precision(logits: Tensor) -> Tensor:
    """Cast half precision to float32; leave wider types."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def row_chunks(rows: Tensor, num_columns: int) -> list[slice]:
    """Return the rows (R, D) of each chunk, in order, so that few enough logits stand in memory at one time."""
    kept, chunk, num_rows = KEPT, CHUNK, len(rows)
    if device_type_of(rows) == "cuda":
        kept = chunk = int(card_bytes(rows) * GPU_SHARE) // 2
    standing = num_rows if num_rows * num_columns <= kept else chunk // num_columns
    size = max(1, standing, num_rows // _MOST_CHUNKS)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, max(1, num_rows), size)]


def compute_logits(rows: Tensor, weights: Weights) -> Tensor:
    """Return the logits of all columns: (R, D) -> (R, V)."""
    parts = [F.linear(rows, weight, bias) for weight, bias in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _chunks(rows: Tensor, weights: Weights) -> list[slice]:
    """Return the rows of each chunk; meta tensors that are planned for no device take no memory, so one has them all.

    Their products are counted, and a second computation in the backward is none of the model's.
    """
    if device_type_of(rows) == "meta":
        return [slice(0, len(rows))]
    return row_chunks(rows, sum(len(weight) for weight, _ in weights))


def _has_kernels(rows: Tensor) -> bool:
    return device_type_of(rows) == "cuda" and full_precision(rows[:0]).dtype != rows.dtype


def join_bins(weights: Weights, multiple: int = 8) -> Weights:
    """Return one part with all columns, and with columns of probability 0 to a multiple."""
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in weights]
    missing = -sum(map(len, biases)) % multiple
    if len(weights) == 1 and not missing:
        return weights
    weight, bias = torch.cat([weight for weight, _ in weights]), torch.cat(biases)
    return ((F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-torch.inf)),)


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the parameters themselves, which ZeRO-3 gathers again for the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, learns: bool, *parameters: Tensor | None) -> Tensor:
        has_kernels = _has_kernels(rows)
        weights = join_bins(_pairs(parameters)) if has_kernels else _pairs(parameters)
        chunks = _chunks(rows, weights)
        losses, kept = [], None
        for chunk in chunks:
            logits = compute_logits(rows[chunk], weights)
            if has_kernels:
                losses.append(_losses(logits, targets[chunk]))
            else:
                logits = _log_softmax(logits)
                losses.append(F.nll_loss(logits, targets[chunk], ignore_index=IGNORE, reduction="none"))
            if learns and len(chunks) == 1:
                kept = logits
        ctx.save_for_backward(rows, targets, kept, *parameters)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, targets, kept, *parameters = ctx.saved_tensors
        has_kernels = _has_kernels(rows)
        weights = join_bins(_pairs(parameters)) if has_kernels else _pairs(parameters)
        scored = targets != IGNORE
        scale, columns = torch.where(scored, gradients[0], 0.0), torch.where(scored, targets, 0)
        of_rows = torch.empty_like(rows)
        sums: list[Tensor | None] = [None] * (2 * len(weights))
        chunks = _chunks(rows, weights)
        for chunk in chunks:
            logits = compute_logits(rows[chunk], weights) if kept is None else kept
            if has_kernels:
                of_logits = _gradients(logits, columns[chunk], scale[chunk])
            else:
                log_probs = _log_softmax(logits) if kept is None else kept
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
        given = [None if total is None else total.to(rows.dtype) for total in sums]
        return of_rows, None, None, *(_split_gradients(given, parameters) if has_kernels else given)


def _split_gradients(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of parameters from those of their `join_bins` weight and bias."""
    sizes = [len(weight) for weight in parameters[::2] if weight is not None]
    weights, biases = (None if one is None else one[: sum(sizes)].split(sizes) for one in gradients)
    parted: list[Tensor | None] = []
    for index, bias in enumerate(parameters[1::2]):
        parted += [weights and weights[index], None if bias is None else biases and biases[index]]
    return parted


def losses_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of logits (R, V), float32: (R,)."""
    exact, columns = full_precision(logits), targets.clamp(min=0)[:, None]
    losses = exact.logsumexp(-1) - exact.gather(1, columns)[:, 0]
    return torch.where(targets == IGNORE, 0.0, losses)


def logit_gradients(logits: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    """Return the gradients of logits (R, V), in their dtype, of losses in columns (R,) times a scale (R,)."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    probabilities = full_precision(logits).softmax(-1)
    return ((probabilities - torch.where(is_target, 1.0, 0.0)) * scale[:, None]).to(logits.dtype)


@cache
def _compile_for_any_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function compiled for any number of rows; torch's compiler is imported here."""
    return torch.compile(function, dynamic=True)


def _call(function: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """Run a kernel that is made for this number of columns: one for any number is three times as slow at 50,000."""
    torch._dynamo.mark_static(logits, 1)
    return _compile_for_any_rows(function)(logits, *others)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.is_meta:
        return logits.new_empty(len(logits), dtype=torch.float32)
    return _call(losses_of, logits, targets)


def _gradients(logits: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(logits) if logits.is_meta else _call(logit_gradients, logits, columns, scale)


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
        (R,), the values and gradients of `F.cross_entropy(full_precision(compute_logits(...)))`.
    """
    parameters = [parameter for pair in weights for parameter in pair]
    losses: Tensor = _LinearCrossEntropy.apply(rows, targets, torch.is_grad_enabled(), *parameters)
    return losses
