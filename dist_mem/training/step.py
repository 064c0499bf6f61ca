"""One update: forward and backward of every micro-batch, agreement of all ranks, then the step.

The order matters. Every lane reads one segment (or `segments_per_update`). The gradients of all micro-batches add up to
that of one loss over all scored tokens of all ranks. One small all-reduce gives all ranks the loss, and whether loss
and memories are finite; it runs during the last backward (agreement.py). Only then do the ranks decide, and parameters
and memories advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.config import Config, TrainConfig
from dist_mem.data.batch import Batch, Update, in_windows, window_slices
from dist_mem.data.batch_plan import backwards_of_window
from dist_mem.engine import window
from dist_mem.engine.engine import Engine
from dist_mem.engine.optimizer import lr_factor
from dist_mem.memory.base import named_tensors
from dist_mem.model import DocumentStarts, reset_lanes
from dist_mem.runtime.distributed import World
from dist_mem.supervision.watchdog import beat
from dist_mem.training.agreement import Agreement, Flags, Forward, RankMessage, UpdateSums, begin, finish
from dist_mem.training.divergence import SKIP, Decision, Divergence
from dist_mem.training.feed import on_device
from dist_mem.training.meter import Totals
from dist_mem.training.state import TrainState

_GRADIENT = "not finite: the gradient, though every loss and memory is"
_AT_LEAST_SCALE = (
    "the fp16 loss scale is {:g} and cannot shrink (deepspeed.fp16.loss_scale: 0 for one that does, min_loss_scale)"
)


@dataclass(frozen=True)
class StepContext:
    """The parts of a run that an update needs."""

    config: Config
    world: World
    engine: Engine
    divergence: Divergence
    total_steps: int
    # is called with the losses of every window, see `WindowRead.begin_backward`
    on_window: Callable[[Tensor], None] = field(default=lambda nll: None, kw_only=True)


class Outcome(NamedTuple):
    """The result of one update, equal on all ranks."""

    flags: Flags  # of all ranks
    totals: Totals  # of this update; after a divergence only the numbers of documents
    next_scored: Sequence[int]  # targets of every micro-batch of the next update, all ranks
    decision: Decision | None = None  # set after a divergence
    slots: Sequence[float] = ()  # the argument `slots`, summed over all ranks
    logs: Mapping[str, float] = MappingProxyType({})  # of memories, summed over `totals.num_read`; as `totals`
    overflows: int = 0  # fp16: repetitions of the same segments, each with a smaller loss scale
    is_made: bool = True  # False: a stop ended the repetitions, and nothing has changed
    is_read_only: bool = False  # without a gradient: the engine still has norm and rate of an earlier update


def accumulate_gradients(
    context: StepContext,
    memories: Sequence[Any],
    update: Update,
    scored: Sequence[int],
    shared: RankMessage,
    reset: str,
) -> Agreement:
    """Run forward and backward of every micro-batch of one update, and begin the agreement between the last two.

    DeepSpeed averages gradients over ranks, hence the factor `world.size`. An update without targets runs without
    gradient, and so do some micro-batches, see `_needs_gradient`.

    Args:
        scored: targets of every micro-batch on all ranks; all 0: the update is only read.
        reset: as `train.reset`, of this update.
    """
    world, train, num_scored = context.world, context.config.train, sum(scored)
    lanes_segments = train.global_batch_size * train.segments_per_update
    states = list(memories)
    shape = (len(states), train.bptt_segments)
    host_windows, windows = in_windows(update.batches, *shape), in_windows(on_device(update, world.device), *shape)
    needs_gradient = _needs_gradient(context, [sum(scored[window]) for window in window_slices(len(scored), *shape)])
    sums = UpdateSums(*torch.zeros(3, device=world.device))
    last = len(windows) - 1
    for index, (host_batch, batch) in enumerate(zip(host_windows, windows, strict=True)):
        group = index % len(states)
        starts = _starts(host_batch, batch, context.engine, reset)
        text = window.Text(batch.tokens, batch.targets, batch.valid_len, starts)
        beat("forward")
        with torch.set_grad_enabled(needs_gradient[index]):
            found = window.read(context.engine, text, states[group], recomputes=backwards_of_window(train) > 1)
        beat("backward")
        nll = found.begin_backward(lambda nll, aux: world.size * (nll / num_scored + aux / lanes_segments))
        is_recall = None if batch.recall is None else batch.recall > 0
        num_tokens = int(host_batch.valid_len.sum())
        sums += UpdateSums(
            nll.sum(),
            found.aux,
            found.aux.new_zeros(()) if is_recall is None else (nll * is_recall).sum(),
            num_read=int((host_batch.valid_len > 0).sum()),
            num_tokens=num_tokens,
            num_learned=num_tokens * needs_gradient[index],
            logs={name: torch.where(batch.valid_len > 0, metric, 0.0).sum() for name, metric in found.logs.items()},
        )
        context.on_window(nll)
        states[group] = found.state
        if index == last:
            are_finite = [_finite_lanes(state, train.micro_batch_size, world.device) for state in states]
            agreement = begin(Forward(states, sums, torch.cat(are_finite).all()), update, shared, world.device)
        if needs_gradient[index]:
            found.end_backward()
        if num_scored > 0 and index < last:
            for _ in range(1 if needs_gradient[index] else backwards_of_window(train)):
                context.engine.end_micro_batch()
    return agreement


def _starts(host_batch: Batch, batch: Batch, engine: Engine, reset: str) -> list[DocumentStarts | None]:
    """Return for each segment of a window the lanes that begin with an empty memory in it, None if none does.

    Args:
        reset: as `train.reset`.
    """
    parts = (_by_segment(part) for part in (host_batch.is_new_document, batch.is_new_document, batch.document))
    starts: list[DocumentStarts | None] = []
    for host_is_new, is_new, document in zip(*parts, strict=True):
        is_reset = reset == "segment" or (reset == "window" and not starts)
        # Asked on the CPU, so that nothing waits for the device.
        if is_reset or host_is_new.any():
            lanes = torch.ones_like(is_new) if is_reset else is_new
            starts.append(DocumentStarts(engine.init_state(document), lanes))
        else:
            starts.append(None)
    return starts


def _by_segment(values: Tensor) -> tuple[Tensor, ...]:
    """Return (B,) values of every segment, of one segment (B,) or of a window (B, n)."""
    return values.view(len(values), -1).unbind(dim=1)


def _needs_gradient(context: StepContext, scored: Sequence[int]) -> list[bool]:
    """Return which windows of micro-batches run with a gradient; the same on all ranks.

    A window without a target on any rank runs without: memories are constants to later windows, so it contributes
    to no loss (the sorting task scores only the last of 4 to 16 segments). Its auxiliary losses are then not trained
    on, as in the published code, unless some parameters are trained by auxiliary losses only. The last window ends the
    update, and always runs with a gradient.
    """
    if not any(scored):
        return [False] * len(scored)
    train = context.config.train
    if train.segments_per_update == train.bptt_segments or any(
        memory.auxiliary_parameters() for memory in context.engine.module.memories()
    ):
        return [True] * len(scored)
    return [count > 0 for count in scored[:-1]] + [True]


def _finite_lanes(state: Any, num_lanes: int, device: torch.device) -> Tensor:
    """Return which lanes have finite memories, (B,) bool."""
    is_finite = torch.ones(num_lanes, dtype=torch.bool, device=device)
    for part in named_tensors(state).values():
        is_finite &= torch.isfinite(part).unsqueeze(-1).flatten(1).all(1)
    return is_finite


def reset_of(train: TrainConfig, step: int) -> str:
    """Return when the update after `step` empties memories, as `train.reset`."""
    return train.reset if train.reset_steps is None or step < train.reset_steps else "never"


def train_step(
    context: StepContext,
    state: TrainState,
    update: Update,
    scored: Sequence[int],
    shared: RankMessage = RankMessage(),  # noqa: B008  # immutable
    *,
    is_logged: bool = True,
    asks_to_stop: Callable[[], bool] = lambda: False,
) -> tuple[TrainState, Outcome]:
    """Make one update: accumulate, agree, decide, step. Return the state after it.

    Memories, cursors and the step advance past a skipped update too; to roll back is left to the caller. An fp16
    overflow changes nothing: the same segments are repeated until the loss scale is small enough, or a stop is asked
    for. Where the scale cannot shrink, it is a divergence.

    Args:
        scored: targets of every micro-batch of the update, on all ranks.
        shared: what this rank sends to all others in the step's all-reduce.
        is_logged: measure gradient norms that are only logged.
        asks_to_stop: whether this rank has a reason to stop by now; called before each repetition.

    Raises:
        DivergedError: on every rank, before any parameter has changed.
    """
    is_read_only = state.step < context.divergence.first_trained
    trains = any(scored) and not is_read_only
    overflows, train = 0, context.config.train
    reset = reset_of(train, state.step)
    while True:
        agreement = accumulate_gradients(
            context, state.memories, update, scored if trains else [0] * len(scored), shared, reset
        )
        agreed = finish(agreement)
        loss = agreed.totals.nll / sum(scored) if any(scored) else math.nan
        trouble, is_overflow = agreed.trouble, False
        if trains:
            trouble, is_overflow = _apply(context, state.step, loss, trouble, is_logged=is_logged)
        if not is_overflow:
            break
        overflows += 1
        if agreed.flags.stop:
            outcome = Outcome(agreed.flags, Totals(), agreed.next_scored, overflows=overflows, is_made=False)
            return state, outcome
        shared = shared._replace(flags=shared.flags._replace(stop=shared.flags.stop or asks_to_stop()))
    made = state.step + 1  # as in metrics.jsonl, `dist-mem batch` and `dist-mem recompute`
    decision = context.divergence.decide(made, trouble, loss=loss) if trouble and not is_read_only else None
    if decision is None or decision.action == SKIP:
        memories = agreement.forward.states
        if trouble:
            memories = _reset_non_finite(context, update, memories)
        state = state._replace(step=state.step + 1, memories=memories, cursors=update.cursors)
    totals, logs = agreed.totals, agreed.logs
    if trouble:  # report only metrics of trained tokens
        totals, logs = Totals(documents=totals.documents, documents_skipped=totals.documents_skipped), {}
    return state, Outcome(
        agreed.flags, totals, agreed.next_scored, decision, agreed.slots, logs, overflows, is_read_only=not trains
    )


def _apply(
    context: StepContext, step: int, loss: float, trouble: str | None, *, is_logged: bool
) -> tuple[str | None, bool]:
    """Apply the accumulated gradients, or discard them; return why they were discarded, and if it is an overflow."""
    engine, divergence = context.engine, context.divergence
    beat("updating")
    is_finite = engine.gradients_finite()  # needs no agreement: without ZeRO every rank has the same gradients
    trouble = trouble or (None if is_finite else _GRADIENT) or divergence.judge(loss)
    least_scale = engine.least_loss_scale() if context.config.train.precision == "fp16" else None
    if trouble:
        engine.discard(is_logged=is_logged)
    elif engine.step(lr_factor(step, context.config.schedule, context.total_steps), is_logged=is_logged):
        divergence.remember(loss)
    elif context.config.train.precision == "fp16" and least_scale is None:
        return None, True
    else:  # DeepSpeed itself has skipped the update, on all ranks
        trouble = _GRADIENT if least_scale is None else f"{_GRADIENT}; {_AT_LEAST_SCALE.format(least_scale)}"
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
