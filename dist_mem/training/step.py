"""One update: forward and backward of every micro-batch, agreement of all ranks, then the step.

The order of decision matters. Every lane reads one segment (or `segments_per_update`); the gradients of all micro-
batches add up to that of one loss over all scored tokens of all ranks; all ranks learn in one small all-reduce what the
loss is and whether all is finite; only then they decide, and parameters and memories move on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Update
from dist_mem.engine.optimizer import lr_factor
from dist_mem.memory.base import named_tensors
from dist_mem.model import reset_lanes
from dist_mem.runtime.distributed import gather_objects, sum_over_ranks
from dist_mem.runtime.watchdog import beat
from dist_mem.training.divergence import SKIP, Decision
from dist_mem.training.meter import Totals

if TYPE_CHECKING:
    from dist_mem.training.run import Job

_GRADIENT = "not finite: the gradient, though every loss and memory is"


class Forward(NamedTuple):
    """What one update's forwards and backwards left on this rank."""

    states: list[Any]  # memory after the update, one per lane group
    nll: Tensor  # () fp32, summed over the scored tokens of this rank, nats
    aux: Tensor  # () fp32, auxiliary losses summed over this rank's lanes and segments
    recall_nll: Tensor  # () fp32, the share of nll that is of recall tokens
    memory_is_finite: Tensor  # () bool: every new state
    num_read: int  # lanes that read something, summed over micro-batches
    logs: dict[str, Tensor]  # figures that memories log, name -> () fp32, summed over these lanes


class Flags(NamedTuple):
    """What a rank tells the others with its sums; of all ranks: whether any of them does."""

    stop: bool = False  # it was told to stop, or cannot read on
    save: bool = False  # a save is due by the clock
    save_failed: bool = False  # one in the background


class Agreed(NamedTuple):
    """What all ranks know before they decide."""

    flags: Flags
    next_scored: int  # targets of the next update, all ranks
    totals: Totals  # of this update
    logs: dict[str, float]  # as in Outcome
    trouble: str | None  # what is not finite, and on which ranks
    slots: list[float]  # as in Outcome


class Outcome(NamedTuple):
    """What the ranks agreed on in one update."""

    again: bool  # fp16 overflow: nothing has changed, feed the same segments again
    flags: Flags  # of all ranks
    totals: Totals  # of this update; of one that diverged the documents only
    next_scored: int  # targets of the next one, all ranks
    decision: Decision | None = None  # what is done about a divergence
    slots: Sequence[float] = ()  # what was given as `slots`, summed over all ranks
    logs: Mapping[str, float] = MappingProxyType({})  # figures of memories, summed over `totals.num_read`; as `totals`


def accumulate_gradients(job: Job, update: Update, num_scored: int) -> Forward:
    """Forward and backward of every micro-batch of one update.

    DeepSpeed averages gradients over ranks, hence the factor `world`; an update without targets runs without gradient,
    and so does a micro-batch, see `_learning`.
    """
    world, train = job.world, job.config.train
    learning = _learning(job, update) if num_scored > 0 else [False] * len(update.batches)
    lanes_segments = train.lanes * train.segments_per_update
    states = list(job.states)
    nll_sum, aux_sum, recall_sum = torch.zeros(3, device=world.device)
    num_read, logs = 0, dict[str, Tensor]()
    for index, host_batch in enumerate(update.batches):
        group = index % len(states)
        batch = host_batch.to(world.device)
        state = states[group]
        if host_batch.is_new_document.any():  # asked on the CPU, so that nothing waits for the device
            state = reset_lanes(state, job.engine.init_state(batch.document), batch.is_new_document)
        beat("forward")
        with torch.set_grad_enabled(learning[index]):
            output = job.engine(batch.tokens, batch.targets, batch.valid_len, state=state)
            nll = output.nll.sum()
            aux = torch.stack([nll.new_zeros(()), *(loss.sum() for loss in output.aux.values())]).sum()
        beat("backward")
        if learning[index]:
            job.engine.backward(world.size * (nll / num_scored + aux / lanes_segments))
        if num_scored > 0 and index + 1 < len(update.batches):
            job.engine.end_micro_batch()
        nll_sum, aux_sum = nll_sum + nll.detach(), aux_sum + aux.detach()
        if batch.recall is not None:
            recall_sum = recall_sum + (output.nll.detach() * (batch.recall > 0)).sum()
        for name, figure in output.logs.items():
            logs[name] = logs.get(name, 0.0) + torch.where(batch.valid_len > 0, figure, 0.0).sum()
        num_read += int((host_batch.valid_len > 0).sum())
        states[group] = output.state
    is_finite = torch.cat([_finite_lanes(state, train.micro_lanes, world.device) for state in states]).all()
    return Forward(states, nll_sum, aux_sum, recall_sum, is_finite, num_read, logs)


def _learning(job: Job, update: Update) -> list[bool]:
    """Which micro-batches run with a gradient; the same on all ranks.

    Those without a target on any rank do not: memories are constants to later segments, so that no loss sees them (the
    sorting task scores the last of 4 to 16 segments). Their auxiliary losses are then not learnt from, as in the
    published code; where parameters learn from nothing else, every segment counts. The last one ends the update.
    """
    num_batches = len(update.batches)
    if job.config.train.segments_per_update == 1 or any(
        memory.auxiliary_parameters() for memory in job.engine.module.memories()
    ):
        return [True] * num_batches
    targets = [int((batch.targets != IGNORE).sum()) for batch in update.batches]
    if job.world.size > 1:
        beat("agreeing")  # who still reads data is behind those that wait here
        targets = [int(count) for count in sum_over_ranks(targets, job.world.device)]
    return [count > 0 for count in targets[:-1]] + [True]


def _finite_lanes(state: Any, num_lanes: int, device: torch.device) -> Tensor:
    """Which lanes' memories are finite, (B,) bool."""
    is_finite = torch.ones(num_lanes, dtype=torch.bool, device=device)
    for part in named_tensors(state).values():
        is_finite &= torch.isfinite(part).unsqueeze(-1).flatten(1).all(1)
    return is_finite


def _agree(
    job: Job,
    update: Update,
    forward: Forward,
    *,
    trains: bool,
    flags: Flags,
    next_scored: int,
    slots: Sequence[float],
) -> Agreed:
    """The one all-reduce of a step; whose fault it is, is asked only if there is one."""
    beat("agreeing")
    figures = [forward.nll, forward.aux, forward.recall_nll, *forward.logs.values()]
    nll, aux, recall_nll, *logged = torch.stack(figures).tolist()  # the one wait for the device
    finite = {
        "loss": math.isfinite(nll) and math.isfinite(aux),
        "memory": bool(forward.memory_is_finite),
        "gradient": not trains or job.engine.gradients_finite(),
    }
    mine = Totals(
        nll=nll,
        aux=aux,
        recall_nll=recall_nll,
        num_scored=update.num_scored,
        num_recall=update.num_recall,
        documents=update.documents_started,
        documents_skipped=update.documents_skipped,
        num_read=forward.num_read,
    )
    own = [not all(finite.values()), next_scored, *flags, *mine, *logged, *slots]
    sums = iter(sum_over_ranks(own, job.world.device))
    trouble = _whose(finite) if next(sums) else None
    all_next_scored = int(next(sums))
    all_flags = Flags(*(next(sums) > 0 for _ in flags))
    totals = Totals(*(next(sums) for _ in mine))
    logs = {name: next(sums) for name in forward.logs}
    return Agreed(all_flags, all_next_scored, totals, logs, trouble, slots=list(sums))


def _whose(finite: Mapping[str, bool]) -> str:
    """Which ranks' losses and memories are not finite; `finite` is of this rank."""
    told = gather_objects(finite)
    bad = {what: [rank for rank, is_finite in enumerate(told) if not is_finite[what]] for what in ("loss", "memory")}
    named = [f"the {what} of rank {ranks}" for what, ranks in bad.items() if ranks]
    return f"not finite: {', '.join(named)}" if named else _GRADIENT


def train_step(
    job: Job, update: Update, num_scored: int, next_scored: int, flags: Flags, slots: Sequence[float] = ()
) -> Outcome:
    """One update: accumulate, agree, decide, step. Memories and cursors move on, also past an update that is skipped.

    Args:
        num_scored: targets of the update, of all ranks; `next_scored`: of this rank, in the next update.
        slots: more numbers to be summed over all ranks.

    Raises:
        DivergedError: on every rank, before any parameter has changed.
    """
    divergence = job.divergence
    is_read_only = job.step < divergence.first_trained
    trains = num_scored > 0 and not is_read_only
    forward = accumulate_gradients(job, update, num_scored if trains else 0)
    agreed = _agree(job, update, forward, trains=trains, flags=flags, next_scored=next_scored, slots=slots)
    loss = agreed.totals.nll / num_scored if num_scored else math.nan
    trouble = agreed.trouble
    beat("updating")
    if trains:
        trouble = trouble or divergence.judge(loss)
        if trouble:
            job.engine.discard()
        elif job.engine.step(lr_factor(job.step, job.config.schedule, job.total_steps)):
            divergence.remember(loss)
        elif job.config.train.precision == "fp16":
            return Outcome(True, agreed.flags, agreed.totals, agreed.next_scored)
        else:
            trouble = _GRADIENT  # DeepSpeed has skipped the update by itself, on all ranks
    decision = divergence.decide(job.step, trouble, loss=loss) if trouble and not is_read_only else None
    if decision is None or decision.action == SKIP:
        job.states = _mended(job, update, forward.states) if trouble else forward.states
        job.cursors = update.cursors
    totals, logs = agreed.totals, agreed.logs
    if trouble:  # figures are of what was trained on
        totals, logs = Totals(documents=totals.documents, documents_skipped=totals.documents_skipped), {}
    return Outcome(False, agreed.flags, totals, agreed.next_scored, decision, agreed.slots, logs)


def _mended(job: Job, update: Update, states: Sequence[Any]) -> list[Any]:
    """New memories, empty in the lanes in which they are not finite: there the old ones may be the cause."""
    groups = zip(states, update.batches[-len(states) :], strict=True)
    return [
        reset_lanes(
            state,
            job.engine.init_state(batch.document),
            ~_finite_lanes(state, len(batch.document), job.world.device),
        )
        for state, batch in groups
    ]
