"""One update: forward and backward of every micro-batch, agreement of all ranks, then the step.

The order matters. Every lane reads one segment (or `segments_per_update`). The gradients of all micro-batches add up to
that of one loss over all scored tokens of all ranks. One small all-reduce gives all ranks the loss, and whether loss,
memories and gradients are finite. Only then do the ranks decide, and parameters and memories advance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Update
from dist_mem.engine.optimizer import lr_factor
from dist_mem.memory.base import named_tensors
from dist_mem.model import reset_lanes
from dist_mem.runtime.distributed import gather_objects, sum_over_ranks
from dist_mem.runtime.watchdog import beat
from dist_mem.training.context import StepContext, TrainState
from dist_mem.training.divergence import SKIP, Decision
from dist_mem.training.meter import Totals

_GRADIENT = "not finite: the gradient, though every loss and memory is"


class Forward(NamedTuple):
    """The results of one update's forward and backward passes on this rank."""

    states: list[Any]  # memory after the update, one per lane group
    nll: Tensor  # () fp32, summed over the scored tokens of this rank, nats
    aux: Tensor  # () fp32, auxiliary losses summed over this rank's lanes and segments
    recall_nll: Tensor  # () fp32, the part of nll of recall tokens
    memory_is_finite: Tensor  # () bool, of all new states
    num_read: int  # lanes that read something, summed over micro-batches
    logs: dict[str, Tensor]  # figures logged by memories, name -> () fp32, summed over these lanes


class Flags(NamedTuple):
    """Flags that a rank sends with its sums; once reduced, a flag is True if any rank has set it."""

    stop: bool = False  # a stop was requested, or this rank cannot continue
    save: bool = False  # a save is due by the clock
    save_failed: bool = False  # the save in the background has failed


class Agreed(NamedTuple):
    """The result of the all-reduce, equal on all ranks."""

    flags: Flags
    next_scored: int  # targets of the next update, all ranks
    totals: Totals  # of this update
    logs: dict[str, float]  # as in Outcome
    trouble: str | None  # names what is not finite, and on which ranks
    slots: list[float]  # as in Outcome


class Outcome(NamedTuple):
    """The result of one update, equal on all ranks."""

    flags: Flags  # of all ranks
    totals: Totals  # of this update; after a divergence only the numbers of documents
    next_scored: int  # targets of the next update, all ranks
    decision: Decision | None = None  # set after a divergence
    slots: Sequence[float] = ()  # the argument `slots`, summed over all ranks
    logs: Mapping[str, float] = MappingProxyType({})  # of memories, summed over `totals.num_read`; as `totals`
    overflows: int = 0  # fp16: repetitions of the same segments, each with a smaller loss scale


def accumulate_gradients(context: StepContext, memories: Sequence[Any], update: Update, num_scored: int) -> Forward:
    """Run forward and backward of every micro-batch of one update.

    DeepSpeed averages gradients over ranks, hence the factor `world.size`. An update without targets runs without
    gradient, and so do some micro-batches, see `_needs_gradient`.
    """
    world, train = context.world, context.config.train
    needs_gradient = _needs_gradient(context, update) if num_scored > 0 else [False] * len(update.batches)
    lanes_segments = train.lanes * train.segments_per_update
    states = list(memories)
    nll_sum, aux_sum, recall_sum = torch.zeros(3, device=world.device)
    num_read, logs = 0, dict[str, Tensor]()
    for index, host_batch in enumerate(update.batches):
        group = index % len(states)
        batch = host_batch.to(world.device)
        state = states[group]
        if host_batch.is_new_document.any():  # on the CPU, so that nothing waits for the device
            state = reset_lanes(state, context.engine.init_state(batch.document), batch.is_new_document)
        beat("forward")
        with torch.set_grad_enabled(needs_gradient[index]):
            output = context.engine(batch.tokens, batch.targets, batch.valid_len, state=state)
            nll = output.nll.sum()
            aux = torch.stack([nll.new_zeros(()), *(loss.sum() for loss in output.aux.values())]).sum()
        beat("backward")
        if needs_gradient[index]:
            context.engine.backward(world.size * (nll / num_scored + aux / lanes_segments))
        if num_scored > 0 and index + 1 < len(update.batches):
            context.engine.end_micro_batch()
        nll_sum, aux_sum = nll_sum + nll.detach(), aux_sum + aux.detach()
        if batch.recall is not None:
            recall_sum = recall_sum + (output.nll.detach() * (batch.recall > 0)).sum()
        for name, figure in output.logs.items():
            logs[name] = logs.get(name, 0.0) + torch.where(batch.valid_len > 0, figure, 0.0).sum()
        num_read += int((host_batch.valid_len > 0).sum())
        states[group] = output.state
    is_finite = torch.cat([_finite_lanes(state, train.micro_lanes, world.device) for state in states]).all()
    return Forward(states, nll_sum, aux_sum, recall_sum, is_finite, num_read, logs)


def _needs_gradient(context: StepContext, update: Update) -> list[bool]:
    """Return which micro-batches run with a gradient; the same on all ranks.

    A micro-batch without a target on any rank runs without: memories are constants to later segments, so it contributes
    to no loss (the sorting task scores only the last of 4 to 16 segments). Its auxiliary losses are then not trained
    on, as in the published code, unless some parameters are trained by auxiliary losses only. The last micro-batch ends
    the update, and always runs with a gradient.
    """
    num_batches = len(update.batches)
    if context.config.train.segments_per_update == 1 or any(
        memory.auxiliary_parameters() for memory in context.engine.module.memories()
    ):
        return [True] * num_batches
    targets = [int((batch.targets != IGNORE).sum()) for batch in update.batches]
    if context.world.size > 1:
        beat("agreeing")  # a rank that still reads data is behind those that wait here
        targets = [int(count) for count in sum_over_ranks(targets, context.world.device)]
    return [count > 0 for count in targets[:-1]] + [True]


def _finite_lanes(state: Any, num_lanes: int, device: torch.device) -> Tensor:
    """Return which lanes have finite memories, (B,) bool."""
    is_finite = torch.ones(num_lanes, dtype=torch.bool, device=device)
    for part in named_tensors(state).values():
        is_finite &= torch.isfinite(part).unsqueeze(-1).flatten(1).all(1)
    return is_finite


def _agree(
    context: StepContext,
    update: Update,
    forward: Forward,
    *,
    trains: bool,
    flags: Flags,
    next_scored: int,
    slots: Sequence[float],
) -> Agreed:
    """Sum figures and flags of all ranks in the one all-reduce of a step; ask which ranks failed only if one did."""
    beat("agreeing")
    figures = [forward.nll, forward.aux, forward.recall_nll, *forward.logs.values()]
    nll, aux, recall_nll, *logged = torch.stack(figures).tolist()  # the one wait for the device
    finite = {
        "loss": math.isfinite(nll) and math.isfinite(aux),
        "memory": bool(forward.memory_is_finite),
        "gradient": not trains or context.engine.gradients_finite(),
    }
    rank_totals = Totals(
        nll=nll,
        aux=aux,
        recall_nll=recall_nll,
        num_scored=update.num_scored,
        num_recall=update.num_recall,
        documents=update.documents_started,
        documents_skipped=update.documents_skipped,
        num_read=forward.num_read,
    )
    values = [not all(finite.values()), next_scored, *flags, *rank_totals, *logged, *slots]
    sums = iter(sum_over_ranks(values, context.world.device))
    trouble = _name_non_finite(finite) if next(sums) else None
    all_next_scored = int(next(sums))
    all_flags = Flags(*(next(sums) > 0 for _ in flags))
    totals = Totals(*(next(sums) for _ in rank_totals))
    logs = {name: next(sums) for name in forward.logs}
    return Agreed(all_flags, all_next_scored, totals, logs, trouble, slots=list(sums))


def _name_non_finite(finite: Mapping[str, bool]) -> str:
    """Return a description of the ranks whose losses or memories are not finite; `finite` is that of this rank."""
    gathered = gather_objects(finite)
    bad = {kind: [rank for rank, is_ok in enumerate(gathered) if not is_ok[kind]] for kind in ("loss", "memory")}
    named = [f"the {kind} of rank {ranks}" for kind, ranks in bad.items() if ranks]
    return f"not finite: {', '.join(named)}" if named else _GRADIENT


def train_step(
    context: StepContext,
    state: TrainState,
    update: Update,
    num_scored: int,
    flags: Flags = Flags(),  # noqa: B008  # immutable
    *,
    next_scored: int = 0,
    slots: Sequence[float] = (),
) -> tuple[TrainState, Outcome]:
    """Make one update: accumulate, agree, decide, step. Return the state after it.

    Memories, cursors and the step advance past a skipped update too; to roll back is left to the caller. An fp16
    overflow changes nothing: the same segments are repeated until the loss scale is small enough.

    Args:
        num_scored: targets of the update, on all ranks.
        next_scored: targets of the next update, on this rank.
        slots: further numbers to sum over all ranks.

    Raises:
        DivergedError: on every rank, before any parameter has changed.
    """
    is_read_only = state.step < context.divergence.first_trained
    trains = num_scored > 0 and not is_read_only
    overflows = 0
    while True:
        forward = accumulate_gradients(context, state.memories, update, num_scored if trains else 0)
        agreed = _agree(context, update, forward, trains=trains, flags=flags, next_scored=next_scored, slots=slots)
        loss = agreed.totals.nll / num_scored if num_scored else math.nan
        trouble, is_overflow = agreed.trouble, False
        if trains:
            trouble, is_overflow = _apply(context, state.step, loss, trouble)
        if not is_overflow:
            break
        overflows += 1
    decision = context.divergence.decide(state.step, trouble, loss=loss) if trouble and not is_read_only else None
    if decision is None or decision.action == SKIP:
        memories = _reset_non_finite(context, update, forward.states) if trouble else forward.states
        state = TrainState(state.step + 1, memories, update.cursors, state.validation)
    totals, logs = agreed.totals, agreed.logs
    if trouble:  # report only figures of trained tokens
        totals, logs = Totals(documents=totals.documents, documents_skipped=totals.documents_skipped), {}
    return state, Outcome(agreed.flags, totals, agreed.next_scored, decision, agreed.slots, logs, overflows)


def _apply(context: StepContext, step: int, loss: float, trouble: str | None) -> tuple[str | None, bool]:
    """Apply the accumulated gradients, or discard them; return why they were discarded, and if it is an overflow."""
    engine, divergence = context.engine, context.divergence
    beat("updating")
    trouble = trouble or divergence.judge(loss)
    if trouble:
        engine.discard()
    elif engine.step(lr_factor(step, context.config.schedule, context.total_steps)):
        divergence.remember(loss)
    elif context.config.train.precision == "fp16":
        return None, True
    else:
        trouble = _GRADIENT  # DeepSpeed itself has skipped the update, on all ranks
    return trouble, False


def _reset_non_finite(context: StepContext, update: Update, states: Sequence[Any]) -> list[Any]:
    """Return the new memories, emptied in lanes where they are not finite: there the old ones may be the cause."""
    groups = zip(states, update.batches[-len(states) :], strict=True)
    return [
        reset_lanes(
            state,
            context.engine.init_state(batch.document),
            ~_finite_lanes(state, len(batch.document), context.world.device),
        )
        for state, batch in groups
    ]
