"""The tracker of a run, which passes everything that is logged to its sinks, and metrics.jsonl, the sink of every run.

Every logged step is one `Point`. metrics.jsonl in the run directory holds all points of a run, each step once: a
resumed run first drops the points past the step it was restored to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.file_schema import figure, integer, number, read_json_line, read_json_lines, record, table
from dist_mem.runtime.files import check_regular, fsync_path, naming, write_text

METRICS_FILE = "metrics.jsonl"
_TAIL = 1 << 18  # bytes that `last_point` reads
STATUSES = ("FINISHED", "FAILED", "KILLED")


class Point(NamedTuple):
    """The metrics of one step."""

    step: int
    time: float  # seconds since 1970
    metrics: Mapping[str, float]  # of training: "loss"; of an evaluation: "validation/word_perplexity"


class Sink:
    """A destination of a tracker's data. Subclasses override the methods they need; the others do nothing."""

    num_points = 0  # that the run has logged, including lost ones; 0 for a sink that does not count

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None if this is not the sink for MLflow, or MLflow has not answered yet."""
        return None

    def log(self, point: Point) -> None:
        """Log the metrics of one step."""

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Record other data of the run; kinds and bodies are those of a journal's entries."""

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
        point = Point(step, time.time(), dict(metrics))
        for sink in self._sinks:
            sink.log(point)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters of the run that are no keys of the configuration; the first value of each counts."""
        texts = {name: str(value) for name, value in params.items()}
        self._record("params", {"params": texts, "changes": "", "step": 0, "is_config": False})

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


_POINT = record({"step": integer(), "time": number, "metrics": table(figure)}, is_open=True)
_REMEDY = "; remove or fix that line"


def read_points(path: Path) -> list[Point]:
    """Return the points of a metrics file, in order; an absent file has none.

    An incomplete last line (the process was killed while writing it) is ignored.

    Raises:
        UnusableError: another line is not a point, or the file is a pipe.
    """
    check_regular(path)
    return list(map(_decode, read_json_lines(path, _POINT, UnusableError, _REMEDY, may_be_torn=True)))


def last_point(path: Path, metric: str) -> Point | None:
    """Return the last point with a metric, of the end of a metrics file alone; None: there is none.

    Raises:
        UnusableError: a line after it is not a point.
    """
    try:
        with path.open("rb") as file:
            begin = max(0, path.stat().st_size - _TAIL)
            file.seek(begin)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    whole = [line for line in lines[1 if begin else 0 :] if line.endswith(b"\n")]
    for count, line in enumerate(reversed(whole), start=1):
        point = _decode(read_json_line(line, _POINT, path, UnusableError, _REMEDY, place=f"line {count} from its end"))
        if metric in point.metrics:
            return point
    return None


def _decode(body: Mapping[str, Any]) -> Point:
    return Point(body["step"], body["time"], body["metrics"])


class MetricsFile(Sink):
    """metrics.jsonl: {"step": 10, "time": 1764000000.0, "metrics": {"loss": 5.1}}, one line per logged point."""

    def __init__(
        self, path: Path, *, first_step: int, num_points: int = 0, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Drop the points past `first_step`, the step the run continues from (0: a fresh start), then append.

        Args:
            num_points: points that were logged up to there; those that the file no longer has count as lost.
            guard: raises when this process may no longer write.
        """
        self._path, self._guard, self.num_lost = path, guard, 0
        self._open(first_step)
        self.num_lost = max(0, num_points - len(self.kept))
        self.num_points += self.num_lost

    def _open(self, first_step: int) -> None:
        self.kept = [point for point in read_points(self._path) if point.step <= first_step]
        self.num_points = self.num_lost + len(self.kept)
        write_text(self._path, "".join(_encode(point) for point in self.kept))
        # one line is buffered: a kill loses no more
        self._file = self._path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def log(self, point: Point) -> None:
        self._guard()
        self.num_points += 1  # also if the write fails: the point was logged, and is lost
        with naming(self._path):
            self._file.write(_encode(point))

    def flush(self) -> None:
        with naming(self._path):
            fsync_path(self._path)

    def rewind(self, step: int) -> None:
        self._guard()
        self._file.close()
        self._open(step)

    def close(self, status: str) -> None:
        with suppress(OSError):  # a full disk: reported when the point was logged
            self._file.close()
            self.flush()


def _encode(point: Point) -> str:
    return json.dumps(point._asdict()) + "\n"  # a non-finite value is written as NaN or Infinity, as Python reads it
