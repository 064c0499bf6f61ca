"""Sinks that write the journal of a run: one only writes it, one also sends it to MLflow in a thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dist_mem.errors import TakenOverError
from dist_mem.runtime.environment import system_metrics_interval
from dist_mem.tracking.delivery import Delivery, Sender
from dist_mem.tracking.journal import Journal, find_entries, is_superseded, read_entries
from dist_mem.tracking.mlflow_run import Target, client_tags, system_monitors
from dist_mem.tracking.rollback import Rollback
from dist_mem.tracking.run_id import read_run_id
from dist_mem.tracking.sinks import Point, Sink
from dist_mem.tracking.system_metrics import SystemMetrics

FLUSH_SECONDS = 6.0  # longest wait of `close` for MLflow; with the preflight, a dead server costs less than 10


class History(NamedTuple):
    """The content of a journal that a resuming job needs."""

    past: list[Point]  # past the step that the job resumes from, without superseded ones
    num_system_points: int
    last_step: int  # of all points; -1 without points
    num_starts: int  # of jobs


def read_history(journal: Path, first_step: int) -> History:
    """Read a complete journal, for a job that starts from `first_step`."""
    superseded = find_entries(journal, "superseded")
    past, num_system_points, last_step, num_starts = [], 0, -1, 0
    for entry in read_entries(journal):
        if entry.kind == "system":
            num_system_points += 1
        elif entry.kind == "status":
            num_starts += entry.body["status"] == "RUNNING"
        elif entry.kind == "point":
            last_step = max(last_step, entry.body["step"])
            if entry.body["step"] > first_step and not is_superseded(entry, superseded):
                past.append(Point(entry.body["step"], entry.time / 1000, entry.body["metrics"]))
    return History(past, num_system_points, last_step, num_starts)


def discreet(report: Callable[[str], None], uri: str) -> Callable[[str], None]:
    """Wrap `report` to remove the user and password of a URI, which would end up in log files."""
    credentials, at, _ = urlsplit(uri).netloc.rpartition("@")
    return lambda text: report(text.replace(credentials + at, "") if at else text)


class JournalSink(Sink):
    """Writes everything into the journal of a run. Only `add_system_metrics` imports mlflow."""

    def __init__(
        self,
        journal: Journal,
        run_dir: Path,
        *,
        past: Collection[Point],
        first_step: int,
        measurements: Collection[str],
        report: Callable[[str], None],
    ) -> None:
        """
        Args:
            past: points logged past `first_step`, the step that the job starts from.
            measurements: names of metrics that an exact resume does not repeat, such as times.
            report: called with a line for the user, also from threads.
        """
        self._journal = journal
        self._run_dir = run_dir
        self._known_run_id = read_run_id(run_dir)
        self._rollback = Rollback(past, first_step=first_step, measurements=measurements)
        self._report = report
        self._is_closed = False
        self._system: SystemMetrics | None = None
        self._began = journal.append("status", {"status": "RUNNING"}, time=time.time())

    @property
    def run_id(self) -> str | None:
        return self._known_run_id

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
        self._journal.append("point", {"step": point.step, "metrics": point.metrics}, time=point.time)

    def rewind(self, step: int) -> None:
        past = read_history(self._journal.path, step).past
        self._rollback = Rollback(past, first_step=step, measurements=self._rollback.measurements)
        self._began = self._journal.advance_clock()

    def flush(self) -> None:
        self._journal.flush()

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        self._journal.append(kind, body, time=time.time())

    def close(self, status: str) -> None:
        if self._system is not None:
            self._system.close()
        try:
            self.record("status", {"status": status})
        except TakenOverError:  # the other job reports and sends the rest
            self._is_closed = True
            return
        except OSError as error:  # a full disk; rank 0 must end as the other ranks do
            self._notify(f"{self._journal.path}: {error}; MLflow is not informed that the job is {status}")
        self._journal.close()
        self._report_unsent()
        self._is_closed = True

    def _report_unsent(self) -> None:
        """Report how to send the rest, once the journal is complete."""
        self._notify(f"MLflow has received nothing of this job yet; send it with: dist-mem track sync {self._run_dir}")

    def _notify(self, text: str) -> None:
        """Report a line to the user, unless the sink is closed: a thread may still wait for MLflow then."""
        if not self._is_closed:
            self._report(text)


class MlflowSink(JournalSink):
    """Sends the journal in a thread, which also finds or creates the run, so that a dead server blocks nothing here."""

    def __init__(self, journal: Journal, target: Target, **options: Any) -> None:
        """Import mlflow and start the thread; `options` are those of `JournalSink`."""
        options["report"] = discreet(options["report"], target.uri)
        super().__init__(journal, target.run_dir, **options)
        self.record("tags", client_tags())
        self._sender = Sender(target, journal.path, report=self._notify)
        self._service = f"MLflow at {target.uri}"
        self._delivery = Delivery(self._send, report=self._notify, service=self._service)

    def _send(self) -> None:
        with suppress(TakenOverError):  # ends the training at its next write
            self._journal.guard()
            self._sender.send()

    @property
    def run_id(self) -> str | None:
        return self._sender.run.run_id

    def _report_unsent(self) -> None:
        if not self._delivery.close(FLUSH_SECONDS):
            self._notify(
                f"{self._service} has not received everything yet; resuming the run sends the rest, and so does: "
                f"dist-mem track sync {self._run_dir}"
            )
