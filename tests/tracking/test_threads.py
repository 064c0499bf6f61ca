"""The threads beside a training: samples of the machine, from monitors that may fail, and the delivery to a service."""

import queue
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from requests import HTTPError, Response

from dist_mem.runtime.environment import system_metrics_interval
from dist_mem.tracking.mlflow.client import is_refusal
from dist_mem.tracking.mlflow.sender import Delivery
from dist_mem.tracking.mlflow.system_metrics import SystemMetrics, system_monitors
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said

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


class Sampling:
    """What is recorded of monitors, and reported."""

    def __init__(self, *monitors: Any, interval: float = INTERVAL) -> None:
        self.recorded: queue.Queue[dict[str, float]] = queue.Queue()
        self.reported: list[str] = []
        self._system = SystemMetrics(monitors, self.recorded.put, interval=interval, report=self.reported.append)

    def close(self) -> None:
        self._system.close("FINISHED")


def test_mlflows_monitors_are_recorded_from_the_first_point_on_under_mlflows_names() -> None:
    """It comes first here, because psutil would go on with the figures of an earlier thread."""
    with closing(Sampling(*system_monitors(), interval=0.2)) as sampling:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:  # keep a core busy
            pass
        figures = sampling.recorded.get(timeout=limit(20))
        assert figures["system/cpu_utilization_percentage"] > 0
        assert figures["system/system_memory_usage_megabytes"] > 100
        figures = sampling.recorded.get(timeout=limit(20))
        assert {"system/disk_usage_percentage", "system/network_receive_megabytes"} <= figures.keys()
        assert sampling.reported == []


def test_failing_monitor_is_reported_once_and_the_others_continue() -> None:
    with closing(Sampling(Failing(), Counting())) as sampling:
        for _ in range(3):
            assert sampling.recorded.get(timeout=limit(20)) == {"system/samples": 1.0}
        assert sampling.reported == ["no more system metrics of Failing: RuntimeError: the driver is gone"]


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


def test_close_does_not_wait_for_a_monitor_that_hangs_and_nothing_comes_after_it() -> None:
    hanging = Hanging()
    sampling = Sampling(hanging)
    assert hanging.is_reached.wait(limit(20))
    began = time.monotonic()
    sampling.close()
    assert time.monotonic() - began < limit(1)
    hanging.may_go_on.set()
    wait_until(lambda: all(thread.name != "system metrics" for thread in threading.enumerate()), "its thread to end")
    assert sampling.recorded.empty()


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


# The delivery: what it does while a service is down, and how it ends


def answered(status: int) -> HTTPError:
    """The error of a file that a server, or a proxy before it, answered with this HTTP status."""
    response = Response()
    response.status_code = status
    return HTTPError(response=response)


def test_only_a_file_that_no_later_attempt_can_send_is_given_up() -> None:
    """413: a proxy's limit of size. Such a file would hold up those that follow it for ever."""
    given_up = {status for status in (400, 401, 403, 404, 408, 413, 429, 500, 503) if is_refusal(answered(status))}
    assert given_up == {400, 404, 413}


class Service:
    """Takes all entries, unless it is set to fail."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.received: list[str] = []
        self.failures: list[Exception] = []
        self.reports: list[str] = []

    def send(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.received += self.written[len(self.received) :]

    def delivery(self) -> Delivery:
        return Delivery(self.send, report=self.reports.append, service="Test", interval=0.01)


def test_an_outage_loses_nothing_and_each_reason_is_reported_once() -> None:
    service = Service()
    down, refusal = ConnectionError("down\nand a long story"), answered(401)
    service.failures = [down, down, refusal, refusal, down]
    service.written.append("word")
    delivery = service.delivery()
    wait_until(lambda: bool(service.received), "the word")
    service.written.append("the last one")
    assert delivery.close(5.0)
    assert service.received == ["word", "the last one"]
    for report, named in zip(service.reports, ["ConnectionError: down", "401", "works again"], strict=True):
        said(report, named)


def test_close_gives_up_on_a_service_that_hangs_or_is_down() -> None:
    answer = threading.Event()
    delivery = Delivery(answer.wait, report=print, service="Black hole", interval=0.01)
    began = time.monotonic()
    assert not delivery.close(0.1)
    assert time.monotonic() - began < limit(1.0)
    answer.set()
    service = Service()
    service.failures = [ConnectionError("down")] * 1000
    assert not service.delivery().close(5.0)
    assert len(service.failures) > 900  # at the end one attempt is enough
