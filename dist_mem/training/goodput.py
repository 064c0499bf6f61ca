"""Goodput: the parts of a run's time, over all of its starts, from the first one to now.

    the phases of this process (supervision/timeline.py) -> parts -> metrics goodput/...
    RUN/starts.jsonl: when each start began, and how long no job ran before it
    a checkpoint keeps the parts up to then, and its time: all time from there to the next start is lost

Only rank 0's metrics are logged. Times between starts are differences of the clocks of their machines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import on_all_ranks
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import number, read_json_lines, record
from dist_mem.runtime.files import write_text
from dist_mem.supervision import timeline
from dist_mem.supervision.timeline import Beginning
from dist_mem.supervision.watchdog import UNWATCHED

STARTS = "starts.jsonl"
PREFIX = "goodput/"

# Part of the time -> the phases of `beat` that belong to it; all others are `other`.
_PHASES = {
    "useful": ("forward", "backward", "updating"),
    "data": ("reading data", UNWATCHED),
    "evaluation": ("evaluating", "drawing"),
    "saving": ("saving",),
    "agreement": ("agreeing",),  # the all-reduce of a step, and the wait for slower ranks
    "start": ("opening", "restoring"),
}
_LOST = ("repeated", "down")  # work after the checkpoint from which a start resumed; no job ran
PARTS = (*_PHASES, *_LOST, "other")
METRICS = frozenset({*(PREFIX + part for part in PARTS), PREFIX + "seconds"})
_PART_OF = {phase: part for part, phases in _PHASES.items() for phase in phases}


class StartTime(NamedTuple):
    """A line of RUN/starts.jsonl."""

    time: float  # seconds since 1970
    down: float  # seconds since the last sign of life of the start before; 0 for the first


_START = record({"time": number, "down": number}, is_open=True)


def last_sign_of_life(run_dir: Path) -> float | None:
    """Return when a job last wrote to a run directory: a heartbeat or a logged point; None if none did.

    Call it before this job writes there.
    """
    times = []
    for name in ("lease.json", "metrics.jsonl"):
        with suppress(OSError):
            times.append((run_dir / name).stat().st_mtime)
    return max(times, default=None)


def read_starts(run_dir: Path) -> list[StartTime]:
    """Return the starts of a run, none for a new one. Raises UnusableError if the file is damaged."""
    bodies = read_json_lines(run_dir / STARTS, _START, UnusableError, "; remove the file")
    return [StartTime(body["time"], body["down"]) for body in bodies]


def note_start(run_dir: Path, begin: Beginning) -> list[StartTime]:
    """Add this start to RUN/starts.jsonl, and return all starts of the run, on rank 0.

    Raises:
        UnusableError: the file is damaged.
        OSError: it cannot be written.
    """
    starts = read_starts(run_dir)
    last = max([start.time for start in starts] + [begin.last_sign or 0.0])
    starts.append(StartTime(begin.time, max(0.0, begin.time - last) if starts else 0.0))
    write_text(run_dir / STARTS, "".join(json_text(start._asdict()) + "\n" for start in starts))
    return starts


def open_goodput(run_dir: Path, saved: Mapping[str, Any], *, writes: bool) -> Goodput:
    """Return the parts of a run's time, from the beginning of the timeline on; collective.

    Args:
        saved: as for `Goodput`.
        writes: on rank 0 of a run that is recorded: note this start in the run directory.

    Raises:
        RunError: on every rank; the run directory cannot be used.
    """
    begin = timeline.beginning()
    alone = [StartTime(begin.time, 0.0)]
    return Goodput(on_all_ranks(lambda: note_start(run_dir, begin) if writes else alone, f"opening {run_dir}"), saved)


class Goodput:
    """The parts of a run's time. Every rank has one; that of rank 0 is logged."""

    def __init__(self, starts: Sequence[StartTime], saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Args:
            starts: of the run; the last one is this process's.
            saved: `state()` in the checkpoint from which the run resumes; {}: without one.
        """
        self._starts = list(starts)
        self._counted: dict[str, float] = {}  # phases of the timeline that `_seconds` contains
        self._seconds = self._seconds_after(saved, until=starts[-1].time)

    def roll_back(self, saved: Mapping[str, Any]) -> None:
        """Continue from an earlier `state()`; the time since then is lost."""
        self._counted = timeline.seconds()
        self._seconds = self._seconds_after(saved, until=time.time())

    def _seconds_after(self, saved: Mapping[str, Any], *, until: float) -> dict[str, float]:
        """Return the seconds of each part, if all time from the saved state on is lost."""
        seconds = dict.fromkeys(PARTS, 0.0) | saved.get("seconds", {})
        since = saved.get("time", self._starts[0].time)
        lost = max(0.0, until - since)
        down = min(lost, sum(start.down for start in self._starts if start.time > since))
        seconds["repeated"] += lost - down
        seconds["down"] += down
        return seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, from the first start of the run to now."""
        found = dict(self._seconds)
        for phase, passed in timeline.seconds().items():
            found[_PART_OF.get(phase, "other")] += passed - self._counted.get(phase, 0.0)
        return found

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"time": time.time(), "seconds": self.seconds()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a logged point: the share of each part, which add up to 1, and all seconds."""
        seconds = self.seconds()
        total = sum(seconds.values())
        return {**{PREFIX + part: of_part / total for part, of_part in seconds.items()}, PREFIX + "seconds": total}
