"""What a run says again that was resumed or rolled back: the steps past its checkpoint that were logged before.

MLflow cannot take points back. An exact resume makes them again, equal to the last bit, and nothing needs to be sent.
A resume with another learning rate or on other ranks makes others: from the first that differs on all are sent, with
their later times, so that MLflow's latest values are right, and a tag says which of the earlier ones count no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist_mem.tracking.sinks import Point


def _same(first: float | None, second: float) -> bool:
    return first == second or (first != first and second != second)  # NaN is the same as NaN here


class Rollback:
    """The points past the restored step, until they have been made again."""

    def __init__(self, points: Iterable[Point], *, first_step: int, measurements: Collection[str]) -> None:
        """
        Args:
            points: everything logged so far, in order.
            measurements: names of metrics that no two jobs have alike, as times.
        """
        self.measurements = measurements
        self._old: dict[int, dict[str, float]] = {}
        for point in points:
            if point.step > first_step:
                self._old.setdefault(point.step, {}).update(point.metrics)
        self._last_step = max(self._old, default=first_step)
        self._same_until = first_step

    def repeats(self, point: Point) -> bool:
        """Whether all of this point was logged before, measurements aside."""
        old = self._old.get(point.step, {})
        values = {name: value for name, value in point.metrics.items() if name not in self.measurements}
        if not all(name in old and _same(old[name], value) for name, value in values.items()):
            return False
        self._same_until = point.step
        return True

    def supersedes(self, point: Point) -> range:
        """The steps at which the points of earlier jobs are wrong, if this point is not what they logged; else none.

        A step of which one point was repeated and another differs, as an evaluation, is not among them: the repeated
        point stands nowhere else.
        """
        if not any(name in self._old.get(point.step, {}) for name in point.metrics):
            return range(0)
        self._old = {}  # whatever follows is new
        return range(self._same_until + 1, self._last_step + 1)
