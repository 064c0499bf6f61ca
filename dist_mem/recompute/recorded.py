"""The losses that a run has recorded: the points of metrics.jsonl, each the mean of the steps since the one before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dist_mem.tracking.tracker import METRICS_FILE, read_points


class Recorded(NamedTuple):
    """A recorded point of the training."""

    first: int  # its losses are means over the steps first..last
    last: int
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        means = f", mean of steps {self.first} to {self.last}" if self.first < self.last else ""
        return f"step {self.last}{means}"


def read_recorded(run_dir: Path) -> list[Recorded]:
    """Return the points of the training in the order of their steps; none if nothing is recorded yet.

    Raises:
        UnusableError: metrics.jsonl is damaged.
    """
    points = {point.step: point for point in read_points(run_dir / METRICS_FILE) if "loss" in point.metrics}
    steps = sorted(points)
    return [Recorded(before + 1, step, points[step].metrics) for before, step in zip([0, *steps], steps, strict=False)]


def recorded_at(recorded: list[Recorded], step: int) -> Recorded | None:
    """Return the point that includes a step; None if it is not recorded."""
    return next((point for point in recorded if point.first <= step <= point.last), None)
