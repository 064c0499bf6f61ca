"""The step of a network's state by a chunk: weights and momentum mixed, plus sums of outer products.

A state is the weights W and the momentum S of one layer side by side, (B, I, 2 O), so that both are read by one
product. The step is bound by memory: on GPUs our own kernel (update_kernels.py) reads and writes each number once, for
two layers in one launch, where torch needs three passes; the kernel's reference is `_update_by_torch`. Shape letters: B
lanes, C rows of a chunk, I and O widths before and after a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dist_mem.nn.distance_attention import why_not


class UpdateLaunch(NamedTuple):
    """Sizes of the kernel."""

    width: int = 64  # rows and columns of a tile of the state
    rows: int = 32  # of a chunk that are multiplied at once
    warps: int = 8
    stages: int = 2


class LayerUpdate(NamedTuple):
    """The step of one layer."""

    state: Tensor  # (B, I, 2 O), W and S; or, going back, their gradients dW' and dS'
    rows: list[Tensor]  # (B, C, I)
    columns: list[Tensor]  # (B, C, 2 O) of the first rows; (B, C, O) of the others, which change W only
    out: Tensor  # (B, I, 2 O), where the next state is written; or the gradient of the state before
    before: Tensor | None = None  # (B, I, 2 O), the state before, where a step goes back


ItemT = TypeVar("ItemT")
LAUNCH = UpdateLaunch()
_LAYERS = 2  # of a launch


def rank_update(updates: Sequence[LayerUpdate], mix: Tensor) -> list[Tensor]:
    """Write the next states: W' = a W + b S + rows^T columns, S' = c S + rows^T columns.

    Going back, the gradients of states by the transposed mixture: dW = a dW' + ..., dS = b dW' + c dS' + ....

    Args:
        updates: of all layers, all on or all back.
        mix: (B, 3), a, b and c.

    Returns:
        Going back, (B, parts, 3) for some layers together: parts of the sums dW' . W, dW' . S and dS' . S of these
        layers, which are the gradients of `mix`.
    """
    found = []
    for begin in range(0, len(updates), _LAYERS):
        given = updates[begin : begin + _LAYERS]
        counts = [len(one.rows) for one in given]
        rows, columns = [part for one in given for part in one.rows], [part for one in given for part in one.columns]
        before = [one.before for one in given if one.before is not None]
        states, out = [one.state for one in given], [one.out for one in given]
        found.append(torch.ops.dist_mem.rank_update(states, mix, rows, columns, counts, before, out))
    return found if updates[0].before is not None else []


def _by_layer(
    states: list[Tensor],
    rows: list[Tensor],
    columns: list[Tensor],
    counts: list[int],
    before: list[Tensor],
    out: list[Tensor],
) -> list[LayerUpdate]:
    """Return the operator's arguments by layer."""
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    olds: list[Tensor | None] = [*before] or [None] * len(states)
    parts = zip(states, spans, out, olds, strict=True)
    return [LayerUpdate(state, rows[span], columns[span], new, old) for state, span, new, old in parts]


def _update_by_torch(states: list[Tensor], mix: Tensor, *given: Any) -> Tensor:
    """Compute `rank_update` by torch's operations."""
    return torch.stack([_update_layer(one, mix) for one in _by_layer(states, *given)], dim=1)


def _update_layer(one: LayerUpdate, mix: Tensor) -> Tensor:
    """Update one layer, and return the sums (B, 3)."""
    weights, momentum = one.state.chunk(2, dim=-1)
    a, b, c = (part[:, None, None] for part in mix.unbind(-1))
    if one.before is None:
        parts = a * weights + b * momentum, c * momentum
    else:
        parts = a * weights, b * weights + c * momentum
    torch.cat(parts, dim=-1, out=one.out)
    one.out.baddbmm_(one.rows[0].mT, one.columns[0])
    for row, column in zip(one.rows[1:], one.columns[1:], strict=True):
        one.out[..., : column.shape[-1]] += torch.bmm(row.mT, column)
    if one.before is None:
        return torch.zeros_like(mix)
    old_weights, old_momentum = one.before.chunk(2, dim=-1)
    pairs = (weights, old_weights), (weights, old_momentum), (momentum, old_momentum)
    return torch.stack([(each * other).sum((1, 2)) for each, other in pairs], dim=-1)


def launch_kernel(states: list[Tensor], mix: Tensor, *given: Any) -> Tensor:
    """Compute `rank_update` by our kernel, for tensors of float32."""
    from dist_mem.memory.parts.update_kernels import update

    updates = _by_layer(states, *given)
    is_back = updates[0].before is not None
    lanes, chunk_len = updates[0].rows[0].shape[:2]
    sizes = [(one.out.shape[1], one.out.shape[2] // 2) for one in updates]
    tiles = [max(-(-size[axis] // LAUNCH.width) for size in sizes) for axis in (0, 1)]
    sums = mix.new_zeros(lanes, len(updates) * tiles[0] * tiles[1] if is_back else 0, 3)
    arguments: list[Tensor | int] = []
    for one, size in zip(_fill_up(updates, _LAYERS), _fill_up(sizes, _LAYERS), strict=True):
        rows, columns = [[part.contiguous() for part in _fill_up(parts, 3)] for parts in (one.rows, one.columns)]
        arguments += [one.state, *rows, *columns, one.state if one.before is None else one.before, one.out, *size]
    update[*tiles, lanes * len(updates)](
        *(mix, sums, *arguments, chunk_len, lanes),
        COUNTS=tuple(len(one.rows) for one in updates) + (0,) * (_LAYERS - len(updates)),
        BACK=is_back,
        WIDTH=LAUNCH.width,
        ROWS=LAUNCH.rows,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
        num_warps=LAUNCH.warps,
        num_stages=LAUNCH.stages,
    )
    return sums


def _fill_up(parts: list[ItemT], size: int) -> list[ItemT]:
    """Return so many parts, the first one in the place of those that are missing."""
    return [*parts, *parts[:1] * (size - len(parts))]


def _on_gpu(states: list[Tensor], mix: Tensor, *given: Any) -> Tensor:
    run = _update_by_torch if mix.dtype == torch.float64 or why_not() else launch_kernel
    return run(states, mix, *given)


def _plan_shape(states: list[Tensor], mix: Tensor, *rest: object) -> Tensor:
    return mix.new_empty(len(mix), len(states), 3)


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_OPS.define(
    "rank_update(Tensor[] states, Tensor mix, Tensor[] rows, Tensor[] columns, int[] counts, Tensor[] before,"
    " Tensor(a!)[] out) -> Tensor"
)
_OPS.impl("rank_update", _update_by_torch, "CPU")
_OPS.impl("rank_update", _on_gpu, "CUDA")
_OPS.impl("rank_update", _plan_shape, "Meta")
