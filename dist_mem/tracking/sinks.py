"""What a run records about itself, and who is told: a Tracker hands everything to its sinks.

Every logged step is one `Point`. metrics.jsonl in the run directory is the sink that is always there; it holds all
points of a run, each step once: a resumed run first drops the points past the step it was restored to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.runtime.files import fsync_path, naming, write_text

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

    @property
    def num_points(self) -> int:
        """How many points the run has logged, lost ones too; 0 for a sink that does not count."""
        return 0

    def log(self, point: Point) -> None:
        """Take the metrics of one step."""

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take something else to keep with the run; kinds and bodies are those of a journal's entries."""

    def rewind(self, step: int) -> None:
        """The run has gone back to `step`: points past it count no more, and may come again."""

    def flush(self) -> None:
        """Return when all that was logged is on the disk; other threads call it while points are logged.

        Raises:
            OSError: naming the file.
        """

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

    def __init__(
        self, path: Path, *, first_step: int, num_points: int = 0, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Drop the points past `first_step`, the step the run continues from (0: a fresh start), then append.

        Args:
            num_points: that were logged up to there; those that the file does not have any more stay lost.
            guard: raises where nothing may be written any more.
        """
        self._path, self._guard = path, guard
        self._open(first_step)
        self.num_lost = max(0, num_points - len(self.kept))

    @property
    def num_points(self) -> int:
        return self.num_lost + self._num_points

    def _open(self, first_step: int) -> None:
        self.kept = [point for point in read_points(self._path) if point.step <= first_step]
        self._num_points = len(self.kept)
        write_text(self._path, "".join(_encode(point) for point in self.kept))
        # by lines: a kill loses one at most
        self._file = self._path.open("a", encoding="utf-8", newline="\n", buffering=1)

    def log(self, point: Point) -> None:
        self._guard()
        self._num_points += 1  # also one that the disk does not take: it was logged, and is lost
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
        with suppress(OSError):  # a full disk: told when the point was logged
            self._file.close()
            self.flush()
