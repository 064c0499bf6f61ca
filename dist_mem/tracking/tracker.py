"""The tracker of a run, which passes everything that is recorded to its sinks: first the log, then its readers.

Every logged step is one `Point`. The log keeps all of them, and the points that count have each step once: a resumed
run begins with an entry that supersedes the points past the step that it was restored to.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import TakenOverError
from dist_mem.tracking.log import (
    STATUSES,
    Entry,
    Log,
    Point,
    as_point,
    counted_steps,
    find_entries,
    is_superseded,
    select_counted,
)
from dist_mem.tracking.names import OF_SYSTEM, in_group

CLOSE_SECONDS = 30.0  # longest wait at the end of a run for a program that is not ours: the other ranks wait too


def end_in_time(call: Callable[[], object]) -> str | None:
    """Call this, which handles its errors, in a thread; return how long it was waited for in vain, or None."""
    thread = threading.Thread(target=call, name="end-of-sink", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    return f"{CLOSE_SECONDS:g} s" if thread.is_alive() else None


class Sink:
    """A destination of a tracker's data. Subclasses override the methods they need; the others do nothing."""

    num_points = 0  # that the run has logged, including lost ones; 0 for a sink that does not count

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None if this is not the reader for MLflow, or MLflow has not answered yet."""
        return None

    def further_metrics(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics of your own for a step that is about to be logged; the log and all sinks get them too.

        The same metrics must give the same values, unless a name begins with system/, as of a time.

        Args:
            metrics: of the step, under the names of metrics.jsonl; with those of sinks before this one.
        """
        return {}

    def log(self, point: Point) -> None:
        """Log the metrics of one step."""

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record other data of the run; kinds and bodies are those of the log."""

    def rewind(self, step: int) -> None:
        """Go back to `step`: points past it are superseded, and may be logged again."""

    def flush(self) -> None:
        """Flush all logged data to disk; other threads may call it while points are logged.

        Raises:
            OSError: names the file.
        """

    def message(self, text: str) -> None:
        """Show a line to the user."""

    def close(self, status: str) -> None:
        """Close the sink; `status` is FINISHED, FAILED or KILLED."""


class Tracker:
    """Logs a run to its sinks. On ranks other than 0 it has no sinks and does nothing."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None on ranks other than 0, or if MLflow is off or has not answered yet."""
        return next((sink.run_id for sink in self._sinks if sink.run_id is not None), None)

    @property
    def num_points(self) -> int:
        """The number of points that the run has logged, before and after it was restored."""
        return max((sink.num_points for sink in self._sinks), default=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step: of training ("loss"), or of one split ("validation/word_perplexity")."""
        metrics = dict(metrics)
        for sink in self._sinks:
            metrics |= sink.further_metrics(step, metrics)
        point = Point(step, time.time_ns() // 1_000_000 / 1000, metrics)  # in milliseconds, as the log has it
        for sink in self._sinks:
            sink.log(point)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters of the run that are no keys of the configuration; the first value of each counts."""
        texts = {name: str(value) for name, value in params.items()}
        self._record("params", {"params": texts, "changes": "", "step": 0})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; a later value of a tag replaces the earlier one."""
        self._record("tags", tags)

    def log_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Log the datasets of the run: name, digest (at most 36 characters), source, context, profile of each."""
        self._record("datasets", {"datasets": datasets})

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Log a checkpoint that is written; the points of its step have been logged before."""
        self._record("checkpoint", {"step": step, "path": str(path)})

    def log_artifact(self, name: str) -> None:
        """Log a file of the run directory, with the content it has when it is sent."""
        self._record("artifact", {"path": name})

    def log_text(self, text: str, name: str) -> None:
        """Log a text as the file `name`."""
        self._record("text", {"text": text, "name": name})

    def _record(self, kind: str, body: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.record(kind, body)

    def rewind(self, step: int) -> None:
        """Go back to `step`: points past it are superseded, and may be logged again."""
        for sink in self._sinks:
            sink.rewind(step)

    def flush(self) -> None:
        """Flush all logged data to disk, so that it survives a power loss; any thread may call it."""
        for sink in self._sinks:
            sink.flush()

    def message(self, text: str) -> None:
        """Show a line to the user, without breaking the progress bar."""
        for sink in self._sinks:
            sink.message(text)

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise ValueError(f"tracking status {status!r}: must be one of {', '.join(STATUSES)}")
        for sink in self._sinks:
            sink.close(status)


class Branch(NamedTuple):
    """Steps of which another job has logged other values."""

    first: int
    last: int


class Rollback:
    """The points that count no more, until they are logged again.

    An exact resume repeats them bit for bit, apart from measurements. A resume with another learning rate or on other
    ranks does not: from the first different point on, all points are new.
    """

    def __init__(self, points: Iterable[Point], *, first_step: int, measurements: Collection[str]) -> None:
        """
        Args:
            points: those that count no more, in order.
            first_step: the last one of which any point counts.
            measurements: names of metrics that differ between any two jobs, such as times.
        """
        self.measurements = measurements
        self._old: dict[int, dict[str, float]] = {}
        for point in points:
            self._old.setdefault(point.step, {}).update(point.metrics)
        self._last_step = max(self._old, default=first_step)
        self._same_until = first_step

    def repeats(self, point: Point) -> bool:
        """Whether the same values were logged at this step before, apart from measurements."""
        old = self._old.get(point.step, {})
        values = {
            name: value
            for name, value in point.metrics.items()
            if name not in self.measurements and not name.startswith(OF_SYSTEM)
        }
        if not all(name in old and _is_same(old[name], value) for name, value in values.items()):
            return False
        self._same_until = point.step
        return True

    def leaves(self, point: Point) -> Branch | None:
        """Return the steps that differ from a point on that `repeats` denies; None if its metrics were not logged yet.

        A step of which one point was repeated and another one differs, such as an evaluation, is not among them: the
        repeated point has no other copy in MLflow.
        """
        if not any(name in self._old.get(point.step, {}) for name in point.metrics):
            return None
        self._old = {}  # all later points are new
        first = self._same_until + 1
        return Branch(first, self._last_step) if first <= self._last_step else None


def _is_same(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)  # NaN equals NaN here


class LogSink(Sink):
    """Writes the log. It comes before its readers, and after what records in a thread."""

    def __init__(
        self,
        log: Log,
        *,
        first_step: int,
        report: Callable[[str], None],
        num_points: int | None = None,
        measurements: Collection[str] = (),
    ) -> None:
        """Begin a job that continues from `first_step` (0: a fresh start).

        Args:
            report: shows a line to the user.
            num_points: points that were logged up to there; those that the log no longer has count as lost, and those
                of `first_step` that it has beyond them are made again; None: as many as it has.
            measurements: names of metrics that an exact resume does not repeat, such as times.
        """
        self._log, self._report, self._measurements = log, report, measurements
        self._since_checkpoint: list[Entry] = []  # points past the newest checkpoint, or since the restored step
        self.num_lost = 0
        self._began = log.append("status", {"status": "RUNNING"}, at=time.time())
        num_kept = self._continue_from(first_step, num_points)
        self.num_lost = max(0, (num_points or 0) - num_kept)
        self.num_points += self.num_lost
        if self.num_lost:
            has = f"{num_kept} of the {num_points} points that were logged up to step {first_step}"
            report(f"warning: {log.path} has {has}; the others are lost")

    def _continue_from(self, step: int, num_points: int | None = None) -> int:
        """Return the number of points that count up to a step; the others are superseded."""
        steps = counted_steps(self._log.path)
        logged = find_entries(self._log.path, "point", "repeat", "rewind", "branch", first=step)  # not all: gigabytes
        of_step = [point for point in select_counted(logged) if point.step == step]
        num_found = bisect_right(steps, step)
        surplus = 0 if num_points is None else min(len(of_step), max(0, num_found - num_points))
        num_kept = num_found - surplus
        if num_kept < len(steps):
            self._began = self._log.append("rewind", {"step": step, "surplus": surplus}, at=time.time())
        self.num_points = self.num_lost + num_kept
        counted = {name for point in of_step[: len(of_step) - surplus] for name in point.metrics}
        branches = [entry for entry in logged if entry.kind == "branch"]
        entries = [entry for entry in logged if entry.kind == "point" and not is_superseded(entry, branches)]
        restored = [entry for entry in entries if entry.body["step"] == step]
        self._past = [entry for entry in restored if counted.isdisjoint(entry.body["metrics"])]
        self._past += [entry for entry in entries if entry.body["step"] > step]
        self._since_checkpoint = []
        self._add_to_next_checkpoint(entry for entry in restored if not counted.isdisjoint(entry.body["metrics"]))
        first_step = step - 1 if surplus and not counted else step
        self._rollback = Rollback(map(as_point, self._past), first_step=first_step, measurements=self._measurements)
        return num_kept

    def log(self, point: Point) -> None:
        self.num_points += 1  # also if the write fails: the point was logged, and is lost
        body = {"step": point.step, "metrics": point.metrics}
        if self._rollback.repeats(point):
            self._log.append("repeat", body, at=point.time)
            first = [entry for entry in self._past if entry.body["step"] == point.step]
            self._add_to_next_checkpoint(
                entry for entry in first if entry.body["metrics"].keys() & point.metrics.keys()
            )
            return
        if steps := self._rollback.leaves(point):  # before the point, so that readers know of it
            self._log.append("branch", {**steps._asdict(), "before": self._began}, at=point.time)
        self._add_to_next_checkpoint([Entry("point", self._log.append("point", body, at=point.time), body)])

    def _add_to_next_checkpoint(self, entries: Iterable[Entry]) -> None:
        """Keep what a checkpoint of their step has as a model, at the times at which the run has it."""
        for kind, logged_at, body in entries:
            metrics = body["metrics"].items()
            of_model = {name: value for name, value in metrics if not in_group(name).startswith(OF_SYSTEM)}
            self._since_checkpoint.append(Entry(kind, logged_at, {**body, "metrics": of_model}))

    def rewind(self, step: int) -> None:
        self._log.advance_clock()
        self._continue_from(step)

    def flush(self) -> None:
        self._log.flush()

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "checkpoint":
            body = {**body, "points": [entry for entry in self._since_checkpoint if entry.body["step"] == body["step"]]}
            self._since_checkpoint = [entry for entry in self._since_checkpoint if entry.body["step"] > body["step"]]
        self._log.record(kind, body)

    def close(self, status: str) -> None:
        try:
            self.record("status", {"status": status})
        except TakenOverError:  # the other job reports the end
            return
        except OSError as error:  # a full disk; rank 0 must end as the other ranks do
            self._report(f"{self._log.path}: {error}; it does not say that the job is {status}, nor will MLflow")
        finally:
            self._log.close()
