"""The sink that writes the journal of a run, and sends it to MLflow in a thread, and the rollback of resumed runs.

MLflow cannot delete points. An exact resume repeats the steps past its checkpoint bit for bit, and nothing needs to be
sent. A resume with another learning rate or on other ranks logs different points. From the first different one on, all
points are sent with their later times, so that MLflow's latest values are right, and a tag lists the superseded ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dist_mem.errors import TakenOverError
from dist_mem.runtime.environment import system_metrics_interval
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.mlflow.delivery import Delivery, Sender
from dist_mem.tracking.mlflow.journal import Entry, Journal, find_entries, is_superseded, read_entries
from dist_mem.tracking.mlflow.run import Target, client_tags
from dist_mem.tracking.mlflow.stores import read_run_id
from dist_mem.tracking.mlflow.system_metrics import PREFIX, SystemMetrics, system_monitors
from dist_mem.tracking.tracker import Point, Sink

FLUSH_SECONDS = 6.0  # longest wait of `close` for MLflow; with the preflight, a dead server costs less than 10


class History(NamedTuple):
    """The content of a journal that a resuming job needs."""

    past: list[Point]  # past the step that the job resumes from, without superseded ones
    num_system_points: int
    last_step: int  # of all points; -1 without points
    num_starts: int  # of jobs


def read_history(journal: Journal, first_step: int) -> History:
    """Read a complete journal, for a job that starts from `first_step`."""
    superseded = find_entries(journal.path, "superseded")
    past, num_system_points, last_step, num_starts = [], 0, -1, 0
    for entry in read_entries(journal.path):
        if entry.kind == "system":
            num_system_points += 1
        elif entry.kind == "status":
            num_starts += entry.body["status"] == "RUNNING"
        elif entry.kind == "point":
            last_step = max(last_step, entry.body["step"])
            if entry.body["step"] > first_step and not is_superseded(entry, superseded):
                past.append(Point(entry.body["step"], entry.time / 1000, entry.body["metrics"]))
    return History(past, num_system_points, last_step, num_starts)


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


def _same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)  # NaN equals NaN here


def discreet(report: Callable[[str], None], uri: str) -> Callable[[str], None]:
    """Wrap `report` to remove the user and password of a URI, which would end up in log files."""
    credentials, at, _ = urlsplit(uri).netloc.rpartition("@")
    return lambda text: report(text.replace(credentials + at, "") if at else text)


class JournalSink(Sink):
    """Writes everything into the journal of a run. A thread sends it, so that a dead server blocks nothing here."""

    def __init__(
        self,
        journal: Journal,
        target: Target,
        *,
        sends: bool,
        history: History,
        first_step: int,
        measurements: Collection[str],
        report: Callable[[str], None],
    ) -> None:
        """
        Args:
            sends: import mlflow and start the thread, which also finds or creates the run.
            history: of the journal, for `first_step`, the step that the job starts from.
            measurements: names of metrics that an exact resume does not repeat, such as times.
            report: called with a line for the user, also from threads.
        """
        self._journal, self._target, self._report = journal, target, discreet(report, target.uri)
        self._known_run_id = read_run_id(target.run_dir)
        self._rollback = Rollback(history.past, first_step=first_step, measurements=measurements)
        self._since_checkpoint: list[Entry] = []  # points past the newest checkpoint
        self._is_closed = False
        self._system: SystemMetrics | None = None
        self._sender: Sender | None = None
        self._began = journal.append("status", {"status": "RUNNING"}, time=time.time())
        if sends:
            self.record("tags", client_tags())
            self._sender = Sender(target, journal.path, report=self._notify)
            self._delivery = Delivery(self._send, report=self._notify, service=f"MLflow at {target.uri}")

    @property
    def run_id(self) -> str | None:
        return self._known_run_id if self._sender is None else self._sender.run.run_id

    def add_system_metrics(self, num_points: int) -> None:
        """Record system metrics from now on, as the points after the first `num_points`; imports mlflow."""
        steps = itertools.count(num_points)

        def record(metrics: Mapping[str, float]) -> None:
            self.record("system", {"step": next(steps), "metrics": metrics})

        self._system = SystemMetrics(system_monitors(), record, interval=system_metrics_interval(), report=self._notify)

    def log(self, point: Point) -> None:
        if self._rollback.repeats(point):
            return
        if steps := self._rollback.supersedes(point):  # before the point, so that its sender knows of it
            self.record("superseded", {"first": steps[0], "last": steps[-1], "before": self._began})
        body = {"step": point.step, "metrics": point.metrics}
        logged_at = self._journal.append("point", body, time=point.time)
        of_model = {name: value for name, value in point.metrics.items() if not in_group(name).startswith(PREFIX)}
        self._since_checkpoint.append(Entry("point", logged_at, {**body, "metrics": of_model}))

    def rewind(self, step: int) -> None:
        self._since_checkpoint = []
        past = read_history(self._journal, step).past
        self._rollback = Rollback(past, first_step=step, measurements=self._rollback.measurements)
        self._began = self._journal.advance_clock()

    def flush(self) -> None:
        self._journal.flush()

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "checkpoint":
            body = {**body, "points": [entry for entry in self._since_checkpoint if entry.body["step"] == body["step"]]}
            self._since_checkpoint = [entry for entry in self._since_checkpoint if entry.body["step"] > body["step"]]
        self._journal.append(kind, body, time=time.time())

    def close(self, status: str) -> None:
        if self._system is not None:
            self._system.close()
        try:
            self.record("description", {})
            self.record("status", {"status": status})
        except TakenOverError:  # the other job reports and sends the rest
            self._is_closed = True
            return
        except OSError as error:  # a full disk; rank 0 must end as the other ranks do
            self._notify(f"{self._journal.path}: {error}; MLflow is not informed that the job is {status}")
        self._journal.close()
        sync = f"dist-mem track sync {self._target.run_dir}"
        if self._sender is None:
            self._notify(f"MLflow has received nothing of this job yet; send it with: {sync}")
        elif not self._delivery.close(FLUSH_SECONDS):
            self._notify(
                f"MLflow at {self._target.uri} has not received everything yet; resuming the run sends the rest, and "
                f"so does: {sync}"
            )
        else:
            self._notify(f"MLflow: {self._sender.run.where}")
        self._is_closed = True

    def _send(self) -> None:
        with suppress(TakenOverError):  # ends the training at its next write
            self._journal.guard()
            assert self._sender is not None, "the thread starts after it"
            self._sender.send()

    def _notify(self, text: str) -> None:
        """Report a line to the user, unless the sink is closed: a thread may still wait for MLflow then."""
        if not self._is_closed:
            self._report(text)
