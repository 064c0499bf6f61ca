"""The time spent in each phase, as `beat` marks them."""

from __future__ import annotations

from dist_mem.supervision import timeline
from dist_mem.supervision.timeline import Beginning
from dist_mem.supervision.watchdog import beat
from tests.support.clock import Clock


def test_every_moment_belongs_to_one_phase(clock: Clock) -> None:
    timeline.begin(Beginning(clock.now - 3.0))
    for phase, passed in (("forward", 1.0), ("agreeing", 2.0), ("forward", 4.0)):
        beat(phase)
        clock.now += passed
    assert timeline.seconds() == {"opening": 3.0, "forward": 5.0, "agreeing": 2.0}
    clock.now += 1.0
    assert timeline.seconds()["forward"] == 6.0


def test_a_new_job_of_a_process_begins_a_new_timeline(clock: Clock) -> None:
    beat("forward")
    timeline.begin(Beginning(clock.now, last_sign=990.0))
    clock.now += 1.0
    assert timeline.seconds() == {"opening": 1.0}
    assert timeline.beginning() == (1000.0, 990.0)
