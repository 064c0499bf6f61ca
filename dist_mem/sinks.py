"""What a run records about itself, and who is told: a Tracker hands everything to its sinks.

Every logged step is one `Point`. metrics.jsonl in the run directory is the sink that is always there; it holds all
points of a run, each step once: a resumed run first drops the points past the step it was restored to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.config_check import flatten
from dist_mem.files import write_text

METRICS_FILE = "metrics.jsonl"
STATUSES = ("FINISHED", "FAILED", "KILLED")


class Point(NamedTuple):
    """The metrics of one step."""

    step: int
    time: float  # seconds since 1970
    metrics: Mapping[str, float]  # of training: "loss"; of an evaluation: "validation/word_perplexity"


class Sink:
    """Where a tracker's news goes. A sink overrides what it cares for."""

    @property
    def run_id(self) -> str | None:
        """The MLflow run, or None: this is not the sink for MLflow, or MLflow has not answered yet."""
        return None

    def log(self, point: Point) -> None:
        """Take the metrics of one step."""

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take something else to keep with the run; kinds and bodies are those of a journal's entries."""

    def message(self, text: str) -> None:
        """Take a line for whoever watches."""

    def close(self, status: str) -> None:
        """Take leave; `status` is FINISHED, FAILED or KILLED."""


def read_points(path: Path) -> list[Point]:
    """The points of a metrics file, in order; an absent file has none.

    The last line may be torn (the process was killed while writing it) and is left out then.

    Raises:
        ValueError: another line is not a point.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    points = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            points.append(Point(record["step"], record["time"], record["metrics"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is not a logged step ({error}); remove or mend that line"
            ) from error
    return points


def _encode(point: Point) -> str:
    return json.dumps(point._asdict()) + "\n"  # a non-finite value is written as NaN or Infinity, as Python reads it


class MetricsFile(Sink):
    """metrics.jsonl: {"step": 10, "time": 1764000000.0, "metrics": {"loss": 5.1}}, one line per logged point."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Drop the points past `first_step`, the step the run continues from (0: a fresh start), then append."""
        self.kept = [point for point in read_points(path) if point.step <= first_step]
        write_text(path, "".join(_encode(point) for point in self.kept))
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1)  # by lines: a kill loses one at most

    def log(self, point: Point) -> None:
        self._file.write(_encode(point))

    def close(self, status: str) -> None:
        with suppress(OSError):  # a full disk: told when the point was logged
            self._file.close()


class Tracker:
    """What the training loop talks to. On ranks other than 0 it has no sinks and does nothing."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    @property
    def run_id(self) -> str | None:
        """The MLflow run, or None: not rank 0, MLflow is off, or has not answered yet."""
        return next((sink.run_id for sink in self._sinks if sink.run_id is not None), None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step: of training ("loss"), or of one split ("validation/word_perplexity")."""
        point = Point(step, time.time(), dict(metrics))
        for sink in self._sinks:
            sink.log(point)

    def log_params(self, params: Mapping[str, Any], *, step: int) -> None:
        """Record parameters of the run, valid from `step` on; names of nested blocks are joined by dots."""
        leaves = flatten(params)
        flat = {name.replace("[", ".").replace("]", ""): str(value) for name, value in leaves.items()}
        self._record("params", {"params": flat, "step": step})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Label the run; a later value of a tag replaces the earlier one."""
        self._record("tags", tags)

    def log_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Record what the run reads: name, digest (at most 36 characters), source, context, profile of each."""
        self._record("datasets", {"datasets": datasets})

    def log_artifact(self, name: str) -> None:
        """Keep a file of the run directory with the run, as it is when it is sent."""
        self._record("artifact", {"path": name})

    def log_text(self, text: str, name: str) -> None:
        """Keep a text with the run, as the file `name`."""
        self._record("text", {"text": text, "name": name})

    def _record(self, kind: str, body: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.record(kind, body)

    def message(self, text: str) -> None:
        """Tell whoever watches, without tearing the progress bar."""
        for sink in self._sinks:
            sink.message(text)

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise ValueError(f"tracking status {status!r}: must be one of {', '.join(STATUSES)}")
        for sink in self._sinks:
            sink.close(status)
