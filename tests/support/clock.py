"""A clock that a test moves."""

import time
from dataclasses import dataclass

import pytest


@dataclass
class Clock:
    """Seconds of `time.time` and `time.perf_counter`, which pass when the test says so."""

    now: float = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    return clock
