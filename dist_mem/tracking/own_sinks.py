"""Sinks of the user: classes of their own files, `tracking.sinks: [FILE.py:CLASS]`, which get what a run records.

Only a training on rank 0 runs them. A class is derived from `Sink`, and is made as `CLASS(run_dir, first_step)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dist_mem.errors import UnusableError
from dist_mem.runtime.outside_code import copies, line_in, load_named, source_of
from dist_mem.tracking.log import Point
from dist_mem.tracking.names import in_group
from dist_mem.tracking.tracker import Sink, end_in_time

_KEY = "tracking.sinks"
ResultT = TypeVar("ResultT")


def load_sink(named: str) -> type[Sink]:
    """Return the class of `PATH:CLASS`.

    Raises:
        UnusableError: there is no such file or class, the file does not run, or the class is no `Sink`.
    """
    try:
        found = load_named(named, _KEY)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Sink)):
        name = named.rpartition(":")[2]
        raise UnusableError(f"{_KEY} has {named!r}: {name} is no class derived from dist_mem.tracking.tracker.Sink")
    return found


def sink_sources(sinks: Sequence[str]) -> dict[str, str]:
    """Return the files of sinks, which a run keeps a copy of, as `sinks/NAME.py` -> text."""
    return copies(sinks, "sinks")


class OwnSink(Sink):
    """Passes everything to a sink of the user, until that raises an error: the training goes on without it."""

    def __init__(self, named: str, run_dir: Path, *, first_step: int, report: Callable[[str], None]) -> None:
        """Make the sink of `PATH:CLASS`.

        Args:
            first_step: the step the run continues from; 0: a fresh start.
            report: shows a line to the user.

        Raises:
            UnusableError: as `load_sink`, or its constructor fails.
        """
        self._named, self._report = named, report
        made: Any = load_sink(named)
        try:
            self._sink: Sink | None = made(run_dir, first_step)
        except Exception as error:  # any error of a user's program
            raise UnusableError(f"{_KEY}: {self._describe(error)}") from error

    def _describe(self, error: Exception) -> str:
        return f"{self._named}{line_in(source_of(self._named), error)}: {type(error).__name__}: {error}"

    def _call(self, call: Callable[[Sink], ResultT], otherwise: ResultT) -> ResultT:
        """Call the sink; after an error, report it once and do without the sink."""
        if self._sink is None:
            return otherwise
        try:
            return call(self._sink)
        except Exception as error:
            self._sink = None
            lost = "it gets nothing more of this job; metrics.jsonl has every point"
            self._report(f"warning: {_KEY}: {self._describe(error)}; {lost}")
            return otherwise

    def further_metrics(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        def check_metrics(sink: Sink) -> Mapping[str, float]:
            found = {str(name): float(value) for name, value in sink.further_metrics(step, dict(metrics)).items()}
            taken = {in_group(name) for name in metrics}  # the names that other readers show
            for name in found:
                if in_group(name) in taken:
                    raise ValueError(f"the run logs {name!r} itself: give the metric another name")
                taken.add(in_group(name))
            return found

        return self._call(check_metrics, {})

    def log(self, point: Point) -> None:
        self._call(lambda sink: sink.log(point), None)

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        self._call(lambda sink: sink.record(kind, body), None)

    def rewind(self, step: int) -> None:
        self._call(lambda sink: sink.rewind(step), None)

    def flush(self) -> None:
        self._call(lambda sink: sink.flush(), None)

    def close(self, status: str) -> None:
        if waited := end_in_time(lambda: self._call(lambda sink: sink.close(status), None)):
            problem = f"its close has not ended after {waited}"
            self._report(f"warning: {_KEY}: {self._named}: {problem}; the run ends without it, metrics.jsonl has all")
