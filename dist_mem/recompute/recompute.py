"""Compute a step of a run again, from the nearest earlier checkpoint: the updates of the loop alone.

    choose_start -> open_run with a tracker of its own -> train_step, up to the recorded point that includes the step

Nothing is written. Each update is that of `loop.train`, on as many ranks, so that its sums have the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dist_mem.checkpoint.manifest import first_verified, list_steps, step_dir
from dist_mem.checkpoint.resume_choice import ResumeChoice, read_or_refuse, verify_together
from dist_mem.checkpoint.resume_source import Resumption, saved_config
from dist_mem.data.batch import IGNORE, Update, in_windows
from dist_mem.errors import DivergedError, UnusableError
from dist_mem.runtime.distributed import World, decide_on_rank0, gather_objects
from dist_mem.training.agreement import Flags, RankMessage
from dist_mem.training.context import Context
from dist_mem.training.divergence import ROLLBACK
from dist_mem.training.history import RunPart, part_of
from dist_mem.training.state import TrainState
from dist_mem.training.step import train_step


class LaneLoss(NamedTuple):
    """The loss of a lane in one update."""

    lane: int
    rank: int
    document: int  # that it reads at the beginning of the update
    nll: float  # nats, summed over its scored tokens
    num_scored: int


class RecomputedStep(NamedTuple):
    """A step computed again; the same on all ranks."""

    points: dict[int, dict[str, float]]  # metrics by step, of all points that the run logs on the way
    loss: float  # of the step alone, nats per token; nan if its update was rejected
    gradient_norm: float  # nan if its update was only read
    lanes: list[LaneLoss]  # by lane, without idle lanes
    messages: list[str]  # of divergences


def choose_start(run_dir: Path, parts: Sequence[RunPart], step: int, world: World) -> ResumeChoice | None:
    """Return the newest checkpoint before `step` that verifies, None for the start of the run; collective.

    Raises:
        UnusableError: on every rank; a checkpoint in between is gone at which the run changed.
    """
    steps = decide_on_rank0(lambda: read_or_refuse(lambda: list_steps(run_dir)))
    candidates = [step_dir(run_dir, known) for known in reversed(steps) if parts[0].step <= known < step]
    found = first_verified(lambda: candidates, lambda directory: verify_together(directory, world))
    first = found[1]["step"] if found else 0
    if not found and parts[0].step > 0:
        begins = f"the run begins at step {parts[0].step}, with a checkpoint of another run"
        raise UnusableError(f"--step {step}: {begins}, and has none of its own before this step")
    if change := change_within(parts, first + 1, step):
        where = f"the nearest checkpoint before it is of step {first}" if found else "there is no checkpoint before it"
        raise UnusableError(
            f"--step {step} cannot be computed again: {where}, and {change}; checkpoint.keep_* keep more"
        )
    return ResumeChoice(*found, superseded=[], broken=[]) if found else None


def change_within(parts: Sequence[RunPart], first: int, last: int) -> str | None:
    """Return how the run changed between the updates of two steps; None if the first part's settings make all."""
    begin = part_of(parts, first)
    for part in parts:
        if first <= part.step < last and not part.is_like(begin):
            if part.ranks != begin.ranks:
                return f"at step {part.step} the run went from {begin.ranks} to {part.ranks} ranks"
            return f"at step {part.step} the run was rolled back or its configuration changed"
    return None


def resumption_of(choice: ResumeChoice | None, memory: Any) -> Resumption | None:
    """Return what `open_run` needs of the chosen checkpoint; collective."""
    return choice and Resumption(choice, saved_config(choice.directory, memory), changes=[], seconds=0.0)


def recompute(
    context: Context, state: TrainState, *, step: int, last: int, check: Callable[[], None]
) -> RecomputedStep:
    """Make the updates up to step `last` and return what they give; collective.

    Args:
        last: `step`, or a later one at which the run logs metrics that include it.
        check: called before every update; may raise.

    Raises:
        RunError: on every rank; data cannot be read.
    """
    feed, reporting, points = context.feed, context.reporting, dict[int, dict[str, float]]()
    loss = gradient_norm = float("nan")
    lanes, messages = list[LaneLoss](), list[str]()
    feed.read_first()
    while state.step < last:
        check()
        next_scored = feed.read_ahead() if state.step + 1 < last else feed.no_targets()
        made, shared = state.step + 1, RankMessage(Flags(stop=reporting.failure.is_set), next_scored)
        windows = list[Tensor]()  # their losses, (B, n T) each
        context = replace(context, on_window=windows.append)
        try:
            state, outcome = train_step(context, state, feed.update, feed.scored, shared, is_logged=reporting.due(made))
        except DivergedError as error:
            messages.append(str(error))
            outcome = None
        if made == step:
            lanes = _lane_losses(context, feed.update, [nll.sum(dim=1) for nll in windows])
        if outcome is not None and outcome.decision:
            messages.append(outcome.decision.message)
        if outcome is None or (outcome.decision and outcome.decision.action == ROLLBACK):
            break
        if outcome.flags.stop:
            reporting.failure.raise_on_all_ranks()
        reporting.meter.add(
            outcome.totals, epoch=feed.update.epoch, logs=outcome.logs, is_read_only=outcome.is_read_only
        )
        if made == step and outcome.decision is None:
            gradient_norm = math.nan if outcome.is_read_only else context.engine.gradient_norm()
            loss = outcome.totals.nll / feed.num_scored if feed.num_scored else math.nan
        if reporting.due(made):
            reporting.meter.note(feed.use_of_sources(made))
            points[made] = reporting.meter.read(context.engine)
        feed.advance(outcome.next_scored)
    return RecomputedStep(points, loss, gradient_norm, lanes, messages)


def _lane_losses(context: Context, update: Update, rows: Sequence[Tensor]) -> list[LaneLoss]:
    """Return the losses of the lanes of all ranks, by lane; of an update repeated after overflows, the last ones."""
    micro_lanes, num_lanes = context.config.train.micro_batch_size, context.config.train.global_batch_size
    batches = in_windows(update.batches, len(context.feed.lane_ids) // micro_lanes, context.config.train.bptt_segments)
    own: dict[int, LaneLoss] = {}
    for index, (batch, nll) in enumerate(zip(batches, rows[-len(batches) :], strict=True)):
        first = index * micro_lanes % len(context.feed.lane_ids)
        lane_ids = context.feed.lane_ids[first : first + micro_lanes].tolist()
        scored = (batch.targets != IGNORE).sum(dim=1).tolist()
        documents = batch.document.view(len(lane_ids), -1)[:, 0].tolist()  # of a window, that of its first segment
        for lane, document, loss, count in zip(lane_ids, documents, nll.tolist(), scored, strict=True):
            before = own.setdefault(lane, LaneLoss(lane, context.world.rank, document, 0.0, 0))
            own[lane] = before._replace(nll=before.nll + loss, num_scored=before.num_scored + count)
    found = [lane for of_rank in gather_objects(list(own.values())) for lane in of_rank if lane.lane < num_lanes]
    return sorted(found)
