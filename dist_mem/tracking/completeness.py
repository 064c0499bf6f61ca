"""Find the points of a run that are missing in metrics.jsonl, in MLflow's journal, or in MLflow.

A checkpoint counts the points that were logged before it. A resumed run does not log them again, so every one of them
must be in each of the three places, checked in this order: each must contain the points of the one before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from dist_mem.checkpoint.manifest import list_steps, read_manifest, step_dir
from dist_mem.errors import CheckpointError
from dist_mem.tracking.delivery import Sender
from dist_mem.tracking.journal import Entry, find_entries, is_superseded
from dist_mem.tracking.sinks import METRICS_FILE, read_points


class Counted(NamedTuple):
    """The number of points that a checkpoint counts."""

    step: int
    num_points: int


def newest_count(run_dir: Path) -> Counted | None:
    """Return the count of the newest readable checkpoint; None without one, or if it has no count (older versions)."""
    for step in reversed(list_steps(run_dir)):
        try:
            num_points = read_manifest(step_dir(run_dir, step)).get("points")
        except CheckpointError:  # a job also passes it over
            continue
        return None if num_points is None else Counted(step, num_points)
    return None


def find_gaps(run_dir: Path, counted: Counted | None, journal: Path, sender: Sender) -> list[str]:
    """Return one line for each place that lacks points.

    Args:
        counted: read before the journal was sent, because a job may be running.
        sender: has sent the journal.

    Raises:
        ValueError: metrics.jsonl has a line that is not a point.
        Exception: any error of MLflow's client.
    """
    path, points = run_dir / METRICS_FILE, read_points(run_dir / METRICS_FILE)
    if counted is not None:
        points = [point for point in points if point.step <= counted.step]
    gaps = []
    if counted is not None and len(points) < counted.num_points:
        gaps.append(
            f"{path} has {len(points)} of the {counted.num_points} points that were logged up to step {counted.step}"
            f"{f', the last of step {points[-1].step}' if points else ''}; the others are lost"
        )
    superseded = find_entries(journal, "superseded")
    entries = [entry for entry in find_entries(journal, "point") if not is_superseded(entry, superseded)]
    names: dict[int, set[str]] = defaultdict(set)
    for entry in entries:
        names[entry.body["step"]].update(entry.body["metrics"])
    if counted is not None:  # otherwise a job may be adding a point now, first to metrics.jsonl
        absent = [point.step for point in points if names[point.step].isdisjoint(point.metrics)]
        if absent:
            gaps.append(f"{journal} lacks {_listed(absent)}, which {path} has; the next start of the run adds them")
    return [*gaps, *_gaps_of_mlflow(entries, sender)]


def _gaps_of_mlflow(entries: Iterable[Entry], sender: Sender) -> Iterable[str]:
    expected: dict[str, set[int]] = defaultdict(set)
    for entry in sender.branches.points(entries):
        for name in entry.body["metrics"]:
            expected[name].add(entry.body["step"])
    # All metrics of a point are sent together: query one of the names that have the same steps.
    for name in {frozenset(steps): name for name, steps in expected.items()}.values():
        absent = expected[name] - sender.run.steps_of(name)
        if absent:
            yield f"MLflow lacks {_listed(absent)} of {name}, which it accepted before, or refused"


def _listed(steps: Collection[int]) -> str:
    places = f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    return f"{len(steps)} point{'s' * (len(steps) > 1)} ({places})"
