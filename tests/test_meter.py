"""What a run says about its own speed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dist_mem import meter as meter_module
from dist_mem.data.batch import Update
from dist_mem.meter import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that pass when the test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: clock.now)
    return clock


def test_loss_and_speed_are_those_since_the_last_point(clock: SimpleNamespace) -> None:
    engine = SimpleNamespace(gradient_norm=lambda: 1.0, lr=0.1)
    meter = Meter(lane_segments_per_update=4)
    update = Update([], torch.zeros(0, 3), num_scored=0, epoch=0.5, documents_started=2, documents_skipped=1)
    for nll, tokens in ((30.0, 10), (10.0, 10)):
        clock.now += 2.0
        meter.add(update, nll, 8.0, tokens)
    with meter.paused():
        clock.now += 50.0
    found = meter.read(engine)
    assert found["loss"] == 2.0
    assert found["tokens_per_second"] == 5.0
    assert found["step_seconds"] == 2.0
    assert found["aux_loss"] == 2.0
    assert (found["documents"], found["documents_skipped"], found["epoch"]) == (4, 2, 0.5)
    clock.now += 1.0
    meter.add(update, 7.0, 0.0, 7)
    assert meter.read(engine)["loss"] == 1.0


def test_waiting_for_data_is_a_share_of_the_time(clock: SimpleNamespace) -> None:
    def slow() -> object:
        clock.now += 1.0
        yield "update"

    meter = Meter(lane_segments_per_update=1)
    assert meter.timed_next(slow()) == "update"
    clock.now += 3.0
    assert meter.read(SimpleNamespace(gradient_norm=lambda: 0.0, lr=0.0))["data_wait_share"] == 0.25
