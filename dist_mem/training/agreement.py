"""The one all-reduce of a step, in which all ranks agree on what the step gave.

    last forward -> `begin` -> last backward -> `finish` -> the step, or a divergence

Everything that is agreed is known after the last forward, so the all-reduce runs during the last backward, and the host
first waits for the device when both have been submitted. An error of one rank alone waits for it too: `LocalFailure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import Update
from dist_mem.runtime.distributed import REPORTED, PendingSum, agree_all_well, begin_sum, gather_objects
from dist_mem.supervision.watchdog import beat
from dist_mem.training.meter import Totals


@dataclass(frozen=True)
class UpdateSums:
    """The sums of one or several micro-batches on this rank; `+` adds those of others."""

    nll: Tensor  # () fp32, over the scored tokens, nats
    aux: Tensor  # () fp32, auxiliary losses over lanes and segments
    recall_nll: Tensor  # () fp32, the part of nll of recall tokens
    num_read: int = 0  # lanes that read something
    num_tokens: int = 0  # that these lanes read
    num_learned: int = 0  # of them, in micro-batches with a gradient
    logs: dict[str, Tensor] = field(default_factory=dict)  # metrics of memories over these lanes, name -> () fp32

    def __add__(self, other: UpdateSums) -> UpdateSums:
        return UpdateSums(
            self.nll + other.nll,
            self.aux + other.aux,
            self.recall_nll + other.recall_nll,
            self.num_read + other.num_read,
            self.num_tokens + other.num_tokens,
            self.num_learned + other.num_learned,
            {name: self.logs.get(name, 0.0) + metric for name, metric in other.logs.items()},
        )


class Forward(NamedTuple):
    """The results of one update's forward passes on this rank."""

    states: list[Any]  # memory after the update, one per lane group
    sums: UpdateSums  # over all micro-batches
    memory_is_finite: Tensor  # () bool, of all new states


class Flags(NamedTuple):
    """Flags that a rank sends with its sums; once reduced, a flag is True if any rank has set it."""

    stop: bool = False  # a stop was requested, or this rank cannot continue
    save: bool = False  # a save is due by the clock
    save_failed: bool = False  # the save in the background has failed


class RankMessage(NamedTuple):
    """What a rank sends besides the results of its update."""

    flags: Flags = Flags()
    next_scored: Sequence[int] = ()  # targets of every micro-batch of the next update
    slots: Sequence[float] = ()  # further numbers to sum


class AgreedUpdate(NamedTuple):
    """The result of the all-reduce, equal on all ranks."""

    flags: Flags
    next_scored: list[int]  # targets of every micro-batch of the next update, all ranks
    totals: Totals  # of this update
    logs: dict[str, float]  # metrics of memories, summed over `totals.num_read`
    trouble: str | None  # names what is not finite, and on which ranks
    slots: list[float]  # the argument `slots`, summed over all ranks


class Agreement(NamedTuple):
    """The all-reduce under way."""

    forward: Forward
    shared: RankMessage
    pending: PendingSum


def begin(forward: Forward, update: Update, shared: RankMessage, device: torch.device) -> Agreement:
    """Start to add up the sums and flags of all ranks; nothing waits for the device."""
    sums = forward.sums
    summed = torch.stack([sums.nll, sums.aux, sums.recall_nll, *sums.logs.values()])
    is_finite = torch.isfinite(summed[:2]).all() & forward.memory_is_finite
    measured = torch.cat([summed.double(), (~is_finite).double()[None]])
    counts = [update.num_scored, update.num_recall, update.documents_started, update.documents_skipped]
    reads = [sums.num_read, sums.num_tokens, sums.num_learned]
    known = [*counts, *reads, *shared.flags, *shared.next_scored, *shared.slots]
    return Agreement(forward, shared, begin_sum(measured, known, device))


def finish(agreement: Agreement) -> AgreedUpdate:
    """Wait for the sums of all ranks; ask which ranks failed only if one did."""
    forward, shared, pending = agreement
    # On a GPU the host waits here for the backward, behind which the all-reduce runs: that time is the backward's.
    beat("agreeing" if pending.values.device.type == "cpu" else "backward")
    sums = iter(pending.wait())  # the one wait for the device
    nll, aux, recall_nll = (next(sums) for _ in range(3))
    logs = {name: next(sums) for name in forward.sums.logs}
    num_not_finite = next(sums)
    totals = Totals(nll, aux, recall_nll, *(next(sums) for _ in range(len(Totals._fields) - 3)))
    flags = Flags(*(next(sums) > 0 for _ in shared.flags))
    next_scored = [int(next(sums)) for _ in shared.next_scored]
    trouble = _name_non_finite(forward) if num_not_finite else None
    return AgreedUpdate(flags, next_scored, totals, logs, trouble, slots=list(sums))


def _name_non_finite(forward: Forward) -> str:
    """Return a description of the ranks whose losses or memories are not finite; collective."""
    loss_is_finite = math.isfinite(forward.sums.nll) and math.isfinite(forward.sums.aux)
    found: list[Mapping[str, bool]] = gather_objects({"loss": loss_is_finite, "memory": bool(forward.memory_is_finite)})
    bad = {kind: [rank for rank, is_ok in enumerate(found) if not is_ok[kind]] for kind in ("loss", "memory")}
    return f"not finite: {', '.join(f'the {kind} of rank {ranks}' for kind, ranks in bad.items() if ranks)}"


class LocalFailure:
    """The first error of this rank alone: its data cannot be read, or rank 0 cannot record.

    A rank that raised it at once would leave the others waiting in a collective. So it is kept, it stops all ranks
    after the current step, and all raise it once that step is saved.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @property
    def is_set(self) -> bool:
        return self._error is not None

    @contextmanager
    def keep_error(self) -> Iterator[None]:
        """End the block, which is no collective, at an error; keep the error if it is the first."""
        try:
            yield
        except REPORTED as error:
            self._error = self._error or error

    def raise_on_all_ranks(self) -> None:
        """Raise a RunError on every rank if any rank has kept an error; collective."""
        agree_all_well(self._error, "training")
