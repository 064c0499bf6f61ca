"""The time that the main thread of this process has spent in each phase of a training, as `watchdog.beat` marks them.

    begin(Beginning(time.time() - 3.2))   # the phase is "opening"
    enter("forward")
    seconds()                             # {"opening": 3.4, "forward": 0.2}: every moment belongs to one phase

Only the host's clock is read, so nothing waits for a device.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Beginning(NamedTuple):
    """When this process began to work for a run."""

    time: float  # seconds since 1970
    last_sign: float | None = None  # time of the last sign of life of the job before it, where that is known


class _Timeline:
    """The timeline of the main thread. There is one per process, as there is one main thread."""

    def __init__(self, beginning: Beginning) -> None:
        self.beginning = beginning
        self.phase = "opening"
        self.entered = time.perf_counter() - max(0.0, time.time() - beginning.time)
        self.seconds: dict[str, float] = {}  # of the phases before this one


_timeline = _Timeline(Beginning(time.time()))


def begin(beginning: Beginning) -> None:
    """Begin a new timeline, in the phase "opening"."""
    global _timeline
    _timeline = _Timeline(beginning)


def beginning() -> Beginning:
    """Return what `begin` was given; without it, when this module was imported."""
    return _timeline.beginning


def enter(phase: str) -> None:
    """End the current phase and begin another one; takes a third of a microsecond."""
    now = time.perf_counter()
    passed = _timeline.seconds
    passed[_timeline.phase] = passed.get(_timeline.phase, 0.0) + now - _timeline.entered
    _timeline.phase, _timeline.entered = phase, now


def seconds() -> dict[str, float]:
    """Return the seconds spent in each phase since `begin`, up to now."""
    enter(_timeline.phase)
    return dict(_timeline.seconds)
