"""Sampling the machine: real monitors, and ones that fail as drivers do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dist_mem.runtime.environment import system_metrics_interval
from dist_mem.tracking.mlflow.system_metrics import SystemMetrics, system_monitors
from tests.support.limits import limit, wait_until
from tests.support.messages import refused

INTERVAL = 0.02


class Counting:
    """A monitor that counts its samples since they were cleared."""

    def __init__(self, name: str = "samples") -> None:
        self.name = name
        self.since_cleared = 0

    def collect_metrics(self) -> None:
        self.since_cleared += 1

    def aggregate_metrics(self) -> dict[str, float]:
        return {self.name: self.since_cleared}

    def clear_metrics(self) -> None:
        self.since_cleared = 0


class Failing(Counting):
    def aggregate_metrics(self) -> dict[str, float]:
        raise RuntimeError("the driver is gone")


class Hanging(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()
        self.has_worked = False

    def collect_metrics(self) -> None:
        super().collect_metrics()
        if self.has_worked:
            self.is_reached.set()
            self.may_go_on.wait()

    def clear_metrics(self) -> None:
        self.has_worked = True


Start = Callable[..., tuple[SystemMetrics, "queue.Queue[dict[str, float]]", list[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start sampling; what is recorded and what is reported. Everything is closed in the end."""
    started = []

    def begin(
        *monitors: Any, interval: float = INTERVAL
    ) -> tuple[SystemMetrics, queue.Queue[dict[str, float]], list[str]]:
        recorded: queue.Queue[dict[str, float]] = queue.Queue()
        reported: list[str] = []
        system = SystemMetrics(monitors, recorded.put, interval=interval, report=reported.append)
        started.append(system)
        return system, recorded, reported

    yield begin
    for system in started:
        system.close("FINISHED")


def test_mlflows_monitors_are_recorded_from_the_first_point_on_under_mlflows_names(start: Start) -> None:
    """It comes first here, because psutil would go on with the figures of an earlier thread."""
    _, recorded, reported = start(*system_monitors(), interval=0.2)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:  # keep a core busy
        pass
    figures = recorded.get(timeout=limit(20))
    assert figures["system/cpu_utilization_percentage"] > 0
    assert figures["system/system_memory_usage_megabytes"] > 100
    figures = recorded.get(timeout=limit(20))
    assert {"system/disk_usage_percentage", "system/network_receive_megabytes"} <= figures.keys()
    assert reported == []


def test_failing_monitor_is_reported_once_and_the_others_continue(start: Start) -> None:
    _, recorded, reported = start(Failing(), Counting())
    for _ in range(3):
        assert recorded.get(timeout=limit(20)) == {"system/samples": 1.0}
    assert reported == ["no more system metrics of Failing: RuntimeError: the driver is gone"]


@pytest.mark.parametrize("monitor", [Failing(), Counting()])
def test_thread_ends_when_no_monitor_is_left_or_the_disk_is_full(monitor: Counting) -> None:
    """With one message."""

    def record(figures: dict[str, float]) -> None:
        raise OSError("no space left on device")

    before, reported = set(threading.enumerate()), list[str]()
    SystemMetrics([monitor], record, interval=INTERVAL, report=reported.append)
    for thread in set(threading.enumerate()) - before:
        thread.join(limit(20))
        assert not thread.is_alive()
    (line,) = reported
    assert line.endswith("the driver is gone" if isinstance(monitor, Failing) else ": no space left on device")


def test_close_does_not_wait_for_a_monitor_that_hangs_and_nothing_comes_after_it(start: Start) -> None:
    hanging = Hanging()
    system, recorded, _ = start(hanging)
    assert hanging.is_reached.wait(limit(20))
    began = time.monotonic()
    system.close("FINISHED")
    assert time.monotonic() - began < limit(1)
    hanging.may_go_on.set()
    wait_until(lambda: all(thread.name != "system metrics" for thread in threading.enumerate()), "its thread to end")
    assert recorded.empty()


def test_interval_is_mlflows_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
    monkeypatch.delenv(name, raising=False)
    assert system_metrics_interval() == 10.0
    monkeypatch.setenv(name, "2.5")
    assert system_metrics_interval() == 2.5
    for wrong in ("0", "-1", "soon", "nan", "inf"):
        monkeypatch.setenv(name, wrong)
        with refused(ValueError, f"{name} is '{wrong}'"):
            system_metrics_interval()
