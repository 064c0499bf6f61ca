"""The tracker: it passes the metrics, parameters, files and messages of a run to its sinks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dist_mem.config.check import flatten
from dist_mem.tracking.sinks import STATUSES, Point, Sink


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

    def log_params(self, params: Mapping[str, Any], *, step: int) -> None:
        """Log parameters of the run, valid from `step` on; names of nested blocks are joined by dots."""
        leaves = flatten(params)
        flat = {name.replace("[", ".").replace("]", ""): str(value) for name, value in leaves.items()}
        self._record("params", {"params": flat, "step": step})

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run; a later value of a tag replaces the earlier one."""
        self._record("tags", tags)

    def log_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Log the datasets of the run: name, digest (at most 36 characters), source, context, profile of each."""
        self._record("datasets", {"datasets": datasets})

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
