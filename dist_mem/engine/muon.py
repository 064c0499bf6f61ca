"""Muon: each step moves a matrix by its orthogonalised momentum; all other parameters are AdamW's.

Source: Keller Jordan, kellerjordan.github.io/posts/muon; the update is that of torch.optim.Muon. Deviations from torch:
Newton-Schulz runs in float32 by default (`optimizer.muon.precision`), where torch and the published code take bfloat16;
the usual scale is that of Moonlight (arXiv 2502.16982), with which rates and decays of AdamW carry over. From the
published code besides: a gradient that is None moves nothing, and eps is the least norm, where that code adds it.

ZeRO gives an optimizer flat tensors that hold pieces of matrices. The momentum is computed piece by piece, so its state
is saved and restored like any moment. A matrix is orthogonalised whole: of as many matrices as there are ranks, each is
gathered on one rank, and every rank gets the results, one after the other. What a rank holds does not grow with the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_mem.config import OptimizerConfig
from dist_mem.config.schema import MuonConfig
from dist_mem.nn.layers import DTYPES

MUON, ADAMW = "muon", "adamw"  # the rule of a parameter group, under its key "rule"
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic whose iterates bring singular values near 1
MOMENTUM = "momentum_buffer"  # kind of the state, as torch.optim.Muon names it


class HeldRange(NamedTuple):
    """The elements of a flattened matrix that this rank holds in a flat tensor."""

    start: int
    stop: int
    offset: int  # of `start`, in the flat tensor

    @property
    def flat_slice(self) -> slice:
        """Where they are in the flat tensor."""
        return slice(self.offset, self.offset + self.stop - self.start)


class MuonMatrix(NamedTuple):
    """A matrix in a flat tensor, of which this rank may hold nothing."""

    shape: tuple[int, int]  # rows are outputs
    piece: HeldRange | None


Matrices = Mapping[Tensor, Sequence[MuonMatrix]]  # by flat tensor


class _Move(NamedTuple):
    """A matrix that is to be moved in this step."""

    flat: Tensor
    matrix: MuonMatrix
    lr: float


def muon_settings(optimizer: OptimizerConfig) -> MuonConfig | None:
    """Return `optimizer.muon`, or its defaults; None with another `optimizer.kind`."""
    return (optimizer.muon or MuonConfig()) if optimizer.kind == MUON else None


def is_map(name: str, owner: nn.Module) -> bool:
    """Return whether a parameter is Muon's: the weight of a linear map of a block."""
    return isinstance(owner, nn.Linear) and name.startswith("blocks.") and name.endswith(".weight")


def orthogonalize(update: Tensor, *, steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix near 1 (0.7 to 1.2; very small ones stay small), by Newton-Schulz.

    Args:
        update: (rows, columns), any float type, in which it computes.
        steps: of the iteration.
        eps: least norm that divides the matrix.
    """
    wide = update.T if update.shape[0] > update.shape[1] else update
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if update.shape[0] > update.shape[1] else x


def orthogonal_flops(shapes: Iterable[tuple[int, int]], steps: int) -> int:
    """Return the operations that `orthogonalize` takes of matrices of these shapes."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return steps * sum(4 * short**2 * long + 2 * short**3 for short, long in sides)


def orthogonal_bytes(shapes: Iterable[tuple[int, int]], precision: str) -> int:
    """Return the bytes that a rank needs at most for an update of matrices of these shapes, beside flat tensors.

    While it gathers: its matrix, another one and a piece of that; then its matrix and the products of `orthogonalize`.
    """
    size, most = DTYPES[precision].itemsize, 0
    for rows, columns in shapes:
        short, numel = min(rows, columns), rows * columns
        copies = 2 if size == 4 else 3  # two iterates, and the update in that precision
        most = max(most, 12 * numel, 4 * numel + size * (copies * numel + 2 * short**2))
    return most


def shape_factor(rows: int, columns: int, scale: str) -> float:
    """Return what multiplies the orthogonalised matrix: `optimizer.muon.scale`."""
    if scale == "original":
        return max(1.0, rows / columns) ** 0.5
    return float(0.2 * max(rows, columns) ** 0.5)  # match_rms_adamw: the root mean square of AdamW's updates


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a class's step as it was before torch wrapped it, which the first instance of the class in a process does.

    The wrapper calls the hooks of the instance, which `MuonAdamW.step` has called.
    """
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class MuonAdamW(torch.optim.AdamW):
    """Muon for groups whose "rule" is MUON, AdamW for all others.

    A rank of ZeRO calls `step` for the same flat tensors in the same order as all others, which is what the collectives
    in it need.
    """

    def __init__(self, groups: list[dict[str, Any]], muon: MuonConfig, **of_adamw: Any) -> None:
        super().__init__(groups, **of_adamw)
        self.muon = muon
        # The same on every rank; None until DeepSpeed has made its tensors.
        self.matrices: Matrices | None = None
        self._is_replicated = True
        self._device = torch.device("cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's looks for a step in the state of every parameter

    def bind(self, matrices: Matrices, device: torch.device, *, is_replicated: bool) -> None:
        """Say where the matrices are, before the first step.

        Args:
            device: computes and communicates, also for tensors that are offloaded.
            is_replicated: every rank holds all matrices whole; else the ranks together hold each element once.
        """
        self.matrices, self._device, self._is_replicated = matrices, device, is_replicated

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all groups; collective where there are several ranks."""
        groups, moves = self.param_groups, list[_Move]()
        try:
            for group in groups:
                self.param_groups = [group]
                if group["rule"] == ADAMW:
                    _without_hooks(torch.optim.AdamW.step)(self)
                else:
                    moves += self._begin(group)
        finally:
            self.param_groups = groups
        num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for first in range(0, len(moves), num_ranks):
            self._move_bundle(moves[first : first + num_ranks], rank, num_ranks)

    def _begin(self, group: dict[str, Any]) -> Iterator[_Move]:
        """Update momenta and decay weights of a group, and yield its matrices, which are still to be moved."""
        for flat in group["params"]:
            if flat.grad is None:
                continue
            if MOMENTUM not in self.state[flat]:
                self.state[flat][MOMENTUM] = torch.zeros_like(flat)
            self.state[flat][MOMENTUM].lerp_(flat.grad, 1 - self.muon.momentum)
            if self.matrices is None:  # a trial step, of DeepSpeed's start or of restoring
                continue
            flat.mul_(1 - group["lr"] * group["weight_decay"])
            for matrix in self.matrices[flat]:
                yield _Move(flat, matrix, group["lr"])

    def _move_bundle(self, moves: Sequence[_Move], rank: int, num_ranks: int) -> None:
        """Move at most one matrix of every rank, the one whose place in the bundle is its rank.

        A rank holds its own matrix and one that it sends or receives, however many ranks there are.
        """
        mine = None
        for place, move in enumerate(moves):
            if place == rank:
                mine = self._gather(move, place, num_ranks)
            elif not self._is_replicated:
                self._gather(move, place, num_ranks)
        if mine is not None:
            self._orthogonalize(mine)
        for place, move in enumerate(moves):
            self._move(move, place, mine if place == rank else None, num_ranks)

    def _move(self, move: _Move, place: int, whole: Tensor | None, num_ranks: int) -> None:
        """Subtract the direction of a matrix, which rank `place` has, from the piece of this rank."""
        if whole is None:
            whole = torch.empty(move.matrix.shape, dtype=torch.float32, device=self._device)
        if num_ranks > 1:
            dist.broadcast(whole, src=place)
        if piece := move.matrix.piece:
            moved = whole.view(-1)[piece.start : piece.stop].to(move.flat.device)
            move.flat.view(-1)[piece.flat_slice].sub_(moved, alpha=move.lr)

    def _gather(self, move: _Move, place: int, num_ranks: int) -> Tensor:
        """Return the update of a matrix, (rows, columns) fp32, whole on rank `place`."""
        settings, whole = self.muon, torch.zeros(move.matrix.shape, dtype=torch.float32, device=self._device)
        if piece := move.matrix.piece:
            assert move.flat.grad is not None
            gradient, momentum = (
                each.reshape(-1)[piece.flat_slice] for each in (move.flat.grad, self.state[move.flat][MOMENTUM])
            )
            update = gradient.lerp(momentum, settings.momentum) if settings.nesterov else momentum
            whole.view(-1)[piece.start : piece.stop] = update
        if num_ranks > 1 and not self._is_replicated:
            dist.reduce(whole, dst=place)  # each element is on one rank, and 0 on the others
        return whole

    def _orthogonalize(self, whole: Tensor) -> None:
        """Replace an update, (rows, columns) fp32, by what it moves the matrix by for a rate of 1."""
        settings = self.muon
        found = orthogonalize(whole.to(DTYPES[settings.precision]), steps=settings.steps, eps=settings.eps)
        whole.copy_(found).mul_(shape_factor(whole.shape[0], whole.shape[1], settings.scale))
