"""The one all-reduce of a step, in which all ranks agree on what the step gave.

    last forward -> `begin` -> last backward -> `finish` -> the step, or a divergence

Everything that is agreed is known after the last forward, so the all-reduce runs during the last backward, and the host
first waits for the device when both have been submitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import Update
from dist_mem.runtime.distributed import gather_objects
from dist_mem.runtime.pending_sum import PendingSum, begin_sum
from dist_mem.supervision.watchdog import beat
from dist_mem.training.meter import Totals


class Forward(NamedTuple):
    """The results of one update's forward passes on this rank."""

    states: list[Any]  # memory after the update, one per lane group
    nll: Tensor  # () fp32, summed over the scored tokens of this rank, nats
    aux: Tensor  # () fp32, auxiliary losses summed over this rank's lanes and segments
    recall_nll: Tensor  # () fp32, the part of nll of recall tokens
    memory_is_finite: Tensor  # () bool, of all new states
    num_read: int  # lanes that read something, summed over micro-batches
    num_tokens: int  # that these lanes read
    num_learned: int  # of them, in micro-batches with a gradient
    logs: dict[str, Tensor]  # figures logged by memories, name -> () fp32, summed over these lanes


class Flags(NamedTuple):
    """Flags that a rank sends with its sums; once reduced, a flag is True if any rank has set it."""

    stop: bool = False  # a stop was requested, or this rank cannot continue
    save: bool = False  # a save is due by the clock
    save_failed: bool = False  # the save in the background has failed


class Shared(NamedTuple):
    """What a rank sends besides the results of its update."""

    flags: Flags = Flags()
    next_scored: Sequence[int] = ()  # targets of every micro-batch of the next update
    slots: Sequence[float] = ()  # further numbers to sum


class Agreed(NamedTuple):
    """The result of the all-reduce, equal on all ranks."""

    flags: Flags
    next_scored: list[int]  # targets of every micro-batch of the next update, all ranks
    totals: Totals  # of this update
    logs: dict[str, float]  # figures of memories, summed over `totals.num_read`
    trouble: str | None  # names what is not finite, and on which ranks
    slots: list[float]  # the argument `slots`, summed over all ranks


class Agreement(NamedTuple):
    """The all-reduce under way."""

    forward: Forward
    shared: Shared
    pending: PendingSum


def begin(forward: Forward, update: Update, shared: Shared, device: torch.device) -> Agreement:
    """Start to add up figures and flags of all ranks; nothing waits for the device."""
    figures = torch.stack([forward.nll, forward.aux, forward.recall_nll, *forward.logs.values()])
    is_finite = torch.isfinite(figures[:2]).all() & forward.memory_is_finite
    measured = torch.cat([figures.double(), (~is_finite).double()[None]])
    counts = [update.num_scored, update.num_recall, update.documents_started, update.documents_skipped]
    reads = [forward.num_read, forward.num_tokens, forward.num_learned]
    known = [*counts, *reads, *shared.flags, *shared.next_scored, *shared.slots]
    return Agreement(forward, shared, begin_sum(measured, known, device))


def finish(agreement: Agreement) -> Agreed:
    """Wait for the sums of all ranks; ask which ranks failed only if one did."""
    forward, shared, pending = agreement
    # On a GPU the host waits here for the backward, behind which the all-reduce runs: that time is the backward's.
    beat("agreeing" if pending.values.device.type == "cpu" else "backward")
    sums = iter(pending.wait())  # the one wait for the device
    nll, aux, recall_nll = (next(sums) for _ in range(3))
    logs = {name: next(sums) for name in forward.logs}
    num_not_finite = next(sums)
    totals = Totals(nll, aux, recall_nll, *(next(sums) for _ in range(len(Totals._fields) - 3)))
    flags = Flags(*(next(sums) > 0 for _ in shared.flags))
    next_scored = [int(next(sums)) for _ in shared.next_scored]
    trouble = _name_non_finite(forward) if num_not_finite else None
    return Agreed(flags, next_scored, totals, logs, trouble, slots=list(sums))


def _name_non_finite(forward: Forward) -> str:
    """Return a description of the ranks whose losses or memories are not finite; collective."""
    loss_is_finite = math.isfinite(forward.nll) and math.isfinite(forward.aux)
    found: list[Mapping[str, bool]] = gather_objects({"loss": loss_is_finite, "memory": bool(forward.memory_is_finite)})
    bad = {kind: [rank for rank, is_ok in enumerate(found) if not is_ok[kind]] for kind in ("loss", "memory")}
    return f"not finite: {', '.join(f'the {kind} of rank {ranks}' for kind, ranks in bad.items() if ranks)}"
