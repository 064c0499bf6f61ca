"""Handle the steps past its checkpoint that a resumed or rolled back run logs a second time.

MLflow cannot delete points. An exact resume repeats them bit for bit, and nothing needs to be sent. A resume with
another learning rate or on other ranks logs different points. From the first different one on, all points are sent with
their later times, so that MLflow's latest values are right, and a tag lists the superseded ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist_mem.tracking.sinks import Point


def _same(first: float | None, second: float) -> bool:
    return first == second or (first != first and second != second)  # NaN equals NaN here


class Rollback:
    """The points past the restored step, until they are logged again."""

    def __init__(self, points: Iterable[Point], *, first_step: int, measurements: Collection[str]) -> None:
        """
        Args:
            points: all points logged so far, in order.
            measurements: names of metrics that differ between any two jobs, such as times.
        """
        self.measurements = measurements
        self._old: dict[int, dict[str, float]] = {}
        for point in points:
            if point.step > first_step:
                self._old.setdefault(point.step, {}).update(point.metrics)
        self._last_step = max(self._old, default=first_step)
        self._same_until = first_step

    def repeats(self, point: Point) -> bool:
        """Whether the same values were logged at this step before, apart from measurements."""
        old = self._old.get(point.step, {})
        values = {name: value for name, value in point.metrics.items() if name not in self.measurements}
        if not all(name in old and _same(old[name], value) for name, value in values.items()):
            return False
        self._same_until = point.step
        return True

    def supersedes(self, point: Point) -> range:
        """Return the steps superseded by a point that `repeats` denies; empty if none of its metrics was logged before.

        A step of which one point was repeated and another one differs, such as an evaluation, is not superseded: the
        repeated point has no other copy.
        """
        if not any(name in self._old.get(point.step, {}) for name in point.metrics):
            return range(0)
        self._old = {}  # all later points are new
        return range(self._same_until + 1, self._last_step + 1)
