"""Divide lanes among ranks, and count the steps of an epoch and of a run.

Letters: G lanes of the whole job, T tokens of a segment, K segments of an update.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import NamedTuple

from dist_mem.config import ScheduleConfig, TrainConfig
from dist_mem.config.check import stop_on
from dist_mem.config.constraints import check_schedule
from dist_mem.config.keys import STEPS
from dist_mem.config.schema import BY_SEGMENTS
from dist_mem.data.mixture import MixturePlan
from dist_mem.data.plan import DocumentPlan, Plan, lanes_of_rank
from dist_mem.runtime.terminal import count_noun

IDLE_LIMIT = 0.2  # share of wasted work above which a warning is shown


class BatchPlan(NamedTuple):
    """The division of the lanes of the job."""

    world_size: int
    lanes_per_rank: int  # idle ones included; the same on every rank
    groups: int  # micro-batches in which a rank processes its lanes once
    windows: int  # of `train.bptt_segments` segments that one rank reads in one update
    backwards: int  # of one rank in one update
    idle_lanes: int  # of the whole job; their results are discarded


class IdleWork(NamedTuple):
    """A message about computed but discarded work."""

    label: str  # "idle", or "warning" if it is more than IDLE_LIMIT
    text: str


def batch_plan(train: TrainConfig, world_size: int) -> BatchPlan:
    """Divide `train.global_batch_size` among `world_size` ranks."""
    per_rank = len(
        lanes_of_rank(train.global_batch_size, world_size=world_size, rank=0, micro_lanes=train.micro_batch_size)
    )
    groups = per_rank // train.micro_batch_size
    windows = groups * train.segments_per_update // train.bptt_segments
    idle_lanes = per_rank * world_size - train.global_batch_size
    return BatchPlan(world_size, per_rank, groups, windows, windows * backwards_of_window(train), idle_lanes)


def backwards_of_window(train: TrainConfig) -> int:
    """Return the backwards of a window: one, or one for each segment where segments are computed again."""
    return train.bptt_segments if train.activation_checkpointing in BY_SEGMENTS else 1


def best_micro_lanes(train: TrainConfig, world_size: int) -> int:
    """Return the largest `train.micro_batch_size`, not above the present one, that leaves the fewest idle lanes."""

    def idle_lanes(micro_lanes: int) -> int:
        return -train.global_batch_size % (world_size * micro_lanes)

    return min(range(train.micro_batch_size, 0, -1), key=idle_lanes)


def idle_work(train: TrainConfig, world_size: int, *, num_documents: int | None = None) -> IdleWork | None:
    """Return the work wasted if the ranks do not divide the lanes, with better settings; None if nothing is wasted.

    Args:
        num_documents: number that can be read in parallel, a bound of `train.global_batch_size`; None: not known, or no
            bound.
    """
    batch = batch_plan(train, world_size)
    if not batch.idle_lanes:
        return None
    places = train.global_batch_size + batch.idle_lanes
    share = batch.idle_lanes / places
    better = best_micro_lanes(train, world_size)
    left = -train.global_batch_size % (world_size * better)
    ways = [f"train.micro_batch_size={better}"] if left == 0 else []
    if num_documents is None or places <= num_documents:
        ways.append(f"train.global_batch_size={places} (in a new run)")
    if fitting := next((size for size in range(world_size, 0, -1) if not batch_plan(train, size).idle_lanes), None):
        ways.append(count_noun(fitting, "rank"))
    advice = f"; with train.micro_batch_size={better} it would be {left}" if 0 < left < batch.idle_lanes else ""
    advice += f"; none is idle with {' or '.join(ways)}" if ways else ""
    advice = f"{share:.1%} of the work{advice}"
    if share > IDLE_LIMIT:
        return IdleWork("warning", f"{count_noun(batch.idle_lanes, 'idle lane')}, {advice}")
    return IdleWork("idle", f"{count_noun(batch.idle_lanes, 'lane')}, {advice}")


def num_readable(plan: Plan | None) -> int | None:
    """Return how many documents can be read in parallel, a bound of the lanes; None: not known, or no bound."""
    return len(plan.lengths) - len(plan.skipped) if isinstance(plan, DocumentPlan) else None


def steps_per_epoch(train: TrainConfig, plan: Plan) -> float:
    """Return the updates in which every document is read once; the last segment of a document counts as a full one."""
    return plan.num_segments / (train.global_batch_size * train.segments_per_update)


def total_steps(train: TrainConfig, schedule: ScheduleConfig, plan: Plan) -> int:
    """Return the updates of the whole run: `train.steps`, or those of `train.epochs`, rounded up.

    Raises:
        ValueError: they are more than a run can have, or fewer than the configuration needs.
    """
    if train.steps is not None:
        if isinstance(plan, MixturePlan):
            plan.check_steps(train.steps)
        return train.steps
    assert train.epochs is not None, "load_config checks this"
    steps = max(1, math.ceil(train.epochs * steps_per_epoch(train, plan)))
    if steps > STEPS:
        epochs = f"train.epochs is {train.epochs}, which the data make {steps:,} steps"
        raise ValueError(f"{epochs}, but a run has at most {STEPS:,}; give fewer epochs")
    end = f"the {count_noun(steps, 'step')} of train.epochs = {train.epochs:g}; give less, or more epochs"
    stop_on(check_schedule(asdict(schedule), steps, end))
    return steps
