"""The parts of a run's time: they add up to all of it, also after kills and rollbacks."""

import json
import signal
from pathlib import Path

import pytest

from dist_mem.launch.status import read_state
from dist_mem.supervision import timeline
from dist_mem.supervision.timeline import Beginning
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.log import read_points
from dist_mem.training.goodput import METRICS, PARTS, Goodput, note_start
from dist_mem.training.meter import MEASUREMENTS
from tests.support.clock import Clock
from tests.support.jobs import build_books, finish, start_ranks, write_config
from tests.support.limits import wait_until


def spend(clock: Clock, **phases: float) -> None:
    """Let time pass in each phase."""
    for phase, seconds in phases.items():
        beat(phase)
        clock.now += seconds


def start(run_dir: Path, clock: Clock, saved: dict[str, object], *, last_sign: float | None) -> Goodput:
    """Start a process of the run now."""
    beginning = Beginning(clock.now, last_sign)
    timeline.begin(beginning)
    return Goodput(note_start(run_dir, beginning), json.loads(json.dumps(saved)))


def nonzero(goodput: Goodput) -> dict[str, float]:
    return {part: seconds for part, seconds in goodput.seconds().items() if seconds}


def test_each_phase_belongs_to_a_part(tmp_path: Path, clock: Clock) -> None:
    goodput = start(tmp_path, clock, {}, last_sign=None)
    spend(clock, opening=4, forward=1, backward=2, updating=3, agreeing=5, saving=6, evaluating=7, recording=8)
    parts = {"start": 4, "useful": 6, "agreement": 5, "saving": 6, "evaluation": 7, "other": 8}
    assert nonzero(goodput) == parts
    figures = goodput.metrics()
    assert figures.keys() == METRICS < MEASUREMENTS
    assert figures["goodput/useful"] == 6 / 36 and figures["goodput/seconds"] == 36


def test_all_time_after_the_checkpoint_is_lost_to_a_kill(tmp_path: Path, clock: Clock) -> None:
    """30 s of work are done again after the death; 20 s pass between the last sign of life and the next start."""
    first = start(tmp_path, clock, {}, last_sign=None)
    spend(clock, opening=10, forward=50)
    saved = first.state()
    spend(clock, forward=30)
    died = clock.now
    clock.now += 20
    second = start(tmp_path, clock, saved, last_sign=died)
    spend(clock, opening=5, forward=35)
    assert nonzero(second) == {"start": 15, "useful": 85, "repeated": 30, "down": 20}


def test_a_death_before_the_first_new_checkpoint_loses_that_start_too(tmp_path: Path, clock: Clock) -> None:
    """Of the start that saved nothing its work is lost, and the time before and after it."""
    first = start(tmp_path, clock, {}, last_sign=None)
    spend(clock, forward=50)
    saved = first.state()
    clock.now += 7
    start(tmp_path, clock, saved, last_sign=saved["time"])
    spend(clock, opening=8, forward=9)
    died = clock.now
    clock.now += 11
    third = start(tmp_path, clock, saved, last_sign=died)
    assert nonzero(third) == {"useful": 50, "repeated": 17, "down": 18}


def test_a_run_killed_before_its_first_checkpoint_has_lost_everything(tmp_path: Path, clock: Clock) -> None:
    start(tmp_path, clock, {}, last_sign=None)
    spend(clock, opening=8, forward=9)
    died = clock.now
    clock.now += 3
    second = start(tmp_path, clock, {}, last_sign=died)
    assert nonzero(second) == {"repeated": 17, "down": 3}


def test_a_rollback_loses_the_time_since_its_checkpoint(tmp_path: Path, clock: Clock) -> None:
    goodput = start(tmp_path, clock, {}, last_sign=None)
    spend(clock, opening=10, forward=20)
    saved = goodput.state()
    spend(clock, forward=30, restoring=2)
    goodput.roll_back(saved)
    spend(clock, forward=4)
    assert nonzero(goodput) == {"start": 10, "useful": 24, "repeated": 32}


def test_clocks_that_disagree_make_no_part_negative(tmp_path: Path, clock: Clock) -> None:
    """The next start is on a machine whose clock is behind."""
    first = start(tmp_path, clock, {}, last_sign=None)
    spend(clock, forward=50)
    saved = first.state()
    clock.now -= 500
    second = start(tmp_path, clock, saved, last_sign=saved["time"])
    assert nonzero(second) == {"useful": 50}


def test_parts_of_a_run_killed_twice_add_up_to_its_time_by_the_clock(tmp_path: Path) -> None:
    books = build_books(tmp_path / "books")
    run_dir = tmp_path / "run"
    changes = {"train": {"steps": 60}, "checkpoint": {"every": 5}, "eval": {"every": 20}}
    config = write_config(tmp_path / "run.yaml", books, run_dir, changes)
    for step in (10, 25):
        processes = start_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
        wait_until((run_dir / "checkpoints" / f"step-{step:08}").is_dir, f"the checkpoint of step {step}")
        for process in processes:
            process.send_signal(signal.SIGKILL)
        finish(processes)
    assert finish(start_ranks(["train", str(config)], world_size=2, cwd=tmp_path))[0] == [0, 0]

    point = [point for point in read_points(run_dir / "metrics.jsonl") if "loss" in point.metrics][-1]
    shares = {part: point.metrics[f"goodput/{part}"] for part in PARTS}
    assert sum(shares.values()) == pytest.approx(1.0)
    starts = [json.loads(line)["time"] for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 3
    assert point.metrics["goodput/seconds"] == pytest.approx(point.time - starts[0], rel=0.005)
    assert min(shares[part] for part in ("useful", "evaluation", "saving", "agreement", "start", "down")) > 0
    assert read_state(run_dir)["goodput"] == {**shares, "seconds": point.metrics["goodput/seconds"]}
