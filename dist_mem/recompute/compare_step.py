"""`dist-mem recompute RUN --step S`: compute a step again, and compare it with what the run has recorded.

Without a launcher, the command starts as many ranks on this machine as the run had. Under a launcher each rank runs it,
as `torchrun --nproc-per-node 2 -m dist_mem recompute RUN --step S`. The exit code is 1 if a metric differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from dist_mem.config import change_config
from dist_mem.data.curriculum import splits_at
from dist_mem.data.documents import find_document
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnfitError, UnusableError
from dist_mem.evaluation.job import run_on_ranks, use_threads
from dist_mem.recompute.recompute import RecomputedStep, change_within, choose_start, recompute, resumption_of
from dist_mem.recompute.settings import RecordedPoint, point_at, read_part_with_memory, read_recorded
from dist_mem.runtime.children import launcher, start, watch
from dist_mem.runtime.distributed import World, decide_on_rank0, from_rank0
from dist_mem.runtime.gpu import set_arithmetic
from dist_mem.runtime.ranks import read_ranks
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import count_noun, table
from dist_mem.tracking.tracker import Sink, Tracker
from dist_mem.training.context import Context
from dist_mem.training.history import RunPart, part_of, read_history
from dist_mem.training.meter import MEASUREMENTS
from dist_mem.training.opening import open_run

_OF_UPDATE = frozenset({"grad_norm", "grad_norm_model", "grad_norm_aux", "lr"})
_SHOWN = ("loss", "grad_norm")  # recorded metrics that are always printed


class _Messages(Sink):
    """Prints messages; records nothing."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def run(run_dir: Path, step: int, overrides: Sequence[str] = (), early: StopSignal | None = None) -> int:
    """Compute a step again and print the comparison; return the exit code of the process.

    Raises:
        RunError: the step cannot be computed again, or not on this machine.
    """
    part = part_of(read_history(run_dir), step)
    world_size = read_ranks()[1]
    if world_size == 1 and part.ranks > 1:
        refuse_other_machine(part)
        command = launcher(part.ranks, "" if part.device == "cpu" else None)
        process = start([*command, "recompute", str(run_dir), "--step", str(step), *overrides], None)
        return watch(process, lambda: bool(early and early.received))
    if world_size != part.ranks:
        made = f"step {step} was made on {count_noun(part.ranks, 'rank')}"
        raise UnusableError(f"{made}, this job has {world_size}: start {part.ranks}")
    codes: list[int] = []
    run_on_ranks(
        lambda world, check: codes.append(recompute_step(world, run_dir, step, overrides, check)), overrides, early
    )
    return codes[0]


def refuse_other_machine(part: RunPart) -> None:
    """Raise UnfitError if this machine has no place for the ranks of a part; memory is checked by each rank."""
    if part.device == "cuda" and (found := torch.cuda.device_count()) < part.ranks:
        start = (
            f"start it with a launcher on {part.ranks} GPUs: srun dist-mem recompute, or torchrun -m dist_mem recompute"
        )
        raise UnfitError(
            f"the step was made on {part.ranks} ranks with a GPU each, this machine has {found} GPUs; {start}"
        )


def recompute_step(
    world: World, run_dir: Path, step: int, overrides: Sequence[str] = (), check: Callable[[], None] = lambda: None
) -> int:
    """Compute a step again on the ranks of this job; print the report on rank 0, and return the exit code; collective.

    Raises:
        RunError: on every rank.
    """
    parts, recorded = decide_on_rank0(lambda: (read_history(run_dir), read_recorded(run_dir)))
    choice = choose_start(run_dir, parts, step, world)
    first = choice.manifest["step"] if choice else 0
    part, point = part_of(parts, first + 1), point_at(recorded, step)
    if point is not None and change_within(parts, first + 1, point.last):
        point = None
    last = point.last if point else step
    part = part._replace(stage_ends=part_of(parts, last).stage_ends)  # of all stages that end on the way
    directory = choice.directory if choice else None
    config = world.agree(
        lambda: read_part_with_memory(run_dir, part, overrides, checkpoint=directory), "reading the settings of the run"
    )
    has_sinks = bool(config.tracking.sinks)
    config = change_config(config, {"tracking.sinks": []})  # of these nothing is run here
    use_threads(config.train)
    set_arithmetic(tf32=config.train.tf32)  # which is known only now, like the threads
    if part.device != world.device.type:
        fix = "; CUDA_VISIBLE_DEVICES= hides the GPUs" if part.device == "cpu" else ""
        raise UnusableError(f"step {step} was made on {part.device}, but this job runs on {world.device.type}{fix}")
    tracker = Tracker([_Messages()] if world.rank == 0 else [])
    context, state = open_run(config, world, resumption_of(choice, config.memory), StopSignal(()), tracker=tracker)
    try:
        if step > context.total_steps:
            raise UnusableError(f"--step {step}: the run has {context.total_steps} steps")
        context.divergence.first_trained = part.first_trained
        tracker.message(f"computing steps {first + 1} to {last} again, on {count_noun(part.ranks, 'rank')}")
        found = recompute(context, state, step=step, last=last, check=check)
    finally:
        context.feed.close()
        context.saving.end()
    compared = [other for other in recorded if first < other.last <= last]
    if has_sinks:
        compared = [_without_own_metrics(other, found) for other in compared]
        point = point and _without_own_metrics(point, found)
    if world.rank == 0:
        print("\n".join(report(context, step, found, point, compared)), flush=True)
    is_equal = not any(differing_metrics(other, found) for other in compared)
    return EXIT_DONE if from_rank0(is_equal) else EXIT_FAILED  # some figures, as the epoch, are those of a rank


def differing_metrics(point: RecordedPoint, found: RecomputedStep) -> list[str]:
    """Return the names of the metrics of a recorded point whose recomputed values are not the same bits."""
    again = found.points.get(point.last, {})
    names = _comparable_metrics(point, found)
    return [name for name in names if repr(point.metrics[name]) != repr(again.get(name))]  # nan equals nan


def _without_own_metrics(point: RecordedPoint, found: RecomputedStep) -> RecordedPoint:
    """Return a recorded point without the metrics that sinks of the user added."""
    again = found.points.get(point.last, {})
    return point._replace(metrics={name: value for name, value in point.metrics.items() if name in again})


def _comparable_metrics(point: RecordedPoint, found: RecomputedStep) -> list[str]:
    """Return the names of the metrics that follow from the updates, without measurements of the machine.

    Older versions logged norm and rate of an earlier update after one that was only read.
    """
    left_out = MEASUREMENTS | (_OF_UPDATE - found.points.get(point.last, {}).keys())
    return [name for name in point.metrics if name not in left_out]


def report(
    context: Context, step: int, found: RecomputedStep, point: RecordedPoint | None, compared: Sequence[RecordedPoint]
) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        point: the recorded one that includes the step.
        compared: all recorded points that were computed again on the way.
    """
    yield from (f"diverged: {message}" for message in found.messages)
    norm = f", gradient norm {found.gradient_norm!r}"
    yield f"step {step}, computed again: loss {found.loss!r} nats per token{norm}"
    if point is None:
        yield f"step {step} is not recorded, or the run changed before its next point: there is nothing to compare"
    for other in compared:
        if other == point:
            yield from _comparison(other, found)
        elif names := differing_metrics(other, found):
            yield f"{other}: {', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"
    others = [other for other in compared if other != point]
    if others:
        equal = sum(not differing_metrics(other, found) for other in others)
        yield f"{equal} of {len(others)} other recorded points on the way are equal, bit for bit"
    rows = [("lane", "rank", "document", "scored tokens", "loss, nats per token")]
    splits = splits_at(context.config.data, context.feed.data.splits, step - 1)
    for lane in found.lanes:
        split, number = find_document(splits, lane.document)
        entry = splits[split].documents[number].id
        loss = lane.nll / lane.num_scored if lane.num_scored else float("nan")
        rows.append((str(lane.lane), str(lane.rank), entry, f"{lane.num_scored:,}", f"{loss:.4f}"))
    yield from table(rows)


def _comparison(point: RecordedPoint, found: RecomputedStep) -> Iterator[str]:
    """Yield the lines that compare a recorded point: the shown metrics, and others that differ."""
    again, names, differ = (
        found.points.get(point.last, {}),
        _comparable_metrics(point, found),
        differing_metrics(point, found),
    )
    yield f"recorded at {point}:"
    for name in [name for name in names if name in _SHOWN or name in differ]:
        if name in differ:
            values = f"recorded {point.metrics[name]!r}, computed again {again.get(name)!r}"
            yield f"  {name}: {values}: differs by {again.get(name, math.nan) - point.metrics[name]:.3g}"
        else:
            yield f"  {name}: {point.metrics[name]!r}, equal bit for bit"
    equal = [name for name in names if name not in differ and name not in _SHOWN]
    yield f"  {len(equal)} other metrics are equal, bit for bit: {', '.join(equal)}"
