"""The delivery thread: what it does while a service is down, and how it ends."""

from __future__ import annotations

import threading
import time

from dist_mem.tracking.mlflow.sender import Delivery
from tests.support.limits import limit, wait_until
from tests.support.messages import said


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


def test_an_outage_loses_nothing_and_is_reported_once() -> None:
    service = Service()
    service.failures = [ConnectionError("down\nand a long story")] * 3
    service.written.append("word")
    delivery = service.delivery()
    wait_until(lambda: bool(service.received), "the word")
    service.written.append("the last one")
    assert delivery.close(5.0)
    assert service.received == ["word", "the last one"]
    for report, named in zip(service.reports, ["ConnectionError: down", "works again"], strict=True):
        said(f"exit code 0: {report}", named)


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
