"""Three sources of one stop, each alone: all ranks end at the same step, all is saved, and the run goes on exactly."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, read_manifest, step_dir, verify
from dist_mem.config import Config
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, StoppedEarlyError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.signals import StopSignal
from dist_mem.tracking.log import read_points
from dist_mem.training import run, stopping
from dist_mem.training.feed import Feed
from dist_mem.training.stopping import LEAST_SECONDS, Stopping
from tests.support.forked_ranks import Ranks, run_forked
from tests.support.jobs import (
    checkpoint_content,
    difference,
    logged_steps,
    losses,
    stop_after_one_step,
    train_here,
    write_config,
)
from tests.support.limits import wait_until
from tests.support.messages import refused, said_line
from tests.support.ranks import Pools
from tests.support.saving import before_writing

ENDLESS = {"train": {"steps": 10**6}, "schedule": {"kind": "constant"}, "checkpoint": {"every": None}}


def train_forked(config: str, environment: dict[str, str], seconds_a_step: float = 0.0) -> int:
    """`dist-mem train CONFIG` with steps of a known length at least, and 4 s at least kept free for a stop."""
    read_ahead = Feed.read_ahead

    def read_slowly(feed: Feed) -> int:
        time.sleep(seconds_a_step)
        return read_ahead(feed)

    os.environ.update(environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "read_ahead", read_slowly)
        patch.setattr(stopping, "LEAST_SECONDS", 4.0)
        return main(["train", config])


def start(config: Path, **options: Any) -> Ranks:
    """Two ranks."""
    arguments = (str(config), options.get("environment", {}), options.get("seconds_a_step", 0.0))
    return Ranks(train_forked, [arguments] * 2, folder=config.parent)


def in_mid_run(config: Path, run_dir: Path, stop: Callable[[Ranks], object]) -> Ranks:
    ranks = start(config)
    wait_until(lambda: 3 in logged_steps(run_dir), "step 3")
    stop(ranks)
    return ranks


def by_signal(config: Path, run_dir: Path, number: signal.Signals, rank: int) -> Ranks:
    return in_mid_run(config, run_dir, lambda ranks: os.kill(ranks.processes[rank].pid, number))


def by_file(config: Path, run_dir: Path) -> Ranks:
    return in_mid_run(config, run_dir, lambda _: (run_dir / "STOP").touch())


def by_clock(config: Path, run_dir: Path) -> Ranks:
    """Ten seconds for the start and some steps, however slow the machine."""
    return start(config, environment={"DIST_MEM_JOB_END": f"{time.time() + 14:.0f}"}, seconds_a_step=0.1)


SOURCES: dict[str, tuple[Callable[..., Ranks], str]] = {
    "TERM on rank 0": (lambda *where: by_signal(*where, signal.SIGTERM, 0), f"(SIGTERM on rank 0, {node_name()})"),
    "USR1 on rank 1": (lambda *where: by_signal(*where, signal.SIGUSR1, 1), f"(SIGUSR1 on rank 1, {node_name()})"),
    "file": (by_file, "/run/STOP (remove it first); everything is saved"),
    "clock": (by_clock, "by the clock: the time of this job is over in "),
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_alone_stops_all_ranks_at_one_step_and_nothing_is_lost(
    tmp_path: Path, books: Path, rank_pool: Pools, source: str
) -> None:
    run_dir = tmp_path / "run"
    stop, reported = SOURCES[source]
    config = write_config(tmp_path / "run.yaml", books, run_dir, ENDLESS)
    ended = stop(config, run_dir).finish()
    text = "\n".join(ended.texts)
    assert ended.codes == [EXIT_REQUEUE] * 2, text
    (step,) = list_steps(run_dir)
    assert logged_steps(run_dir)[-1] == step
    assert f"step {step}: stopped by " in text and reported in text
    assert "; everything is saved; run the same command to continue" in text
    assert text.count("stopped by ") == 1
    assert not (run_dir / "lease.json").exists()

    (run_dir / "STOP").unlink(missing_ok=True)
    assert rank_pool(2).run(train_here, config, [f"train.steps={step + 3}"]) == [EXIT_DONE] * 2
    straight = tmp_path / "straight"
    changes = [f"run_dir={straight}", f"train.steps={step + 3}"]
    assert rank_pool(2).run(train_here, config, changes) == [EXIT_DONE] * 2
    assert difference(*(checkpoint_content(step_dir(folder, step + 3)) for folder in (run_dir, straight))) is None
    assert losses(run_dir) == losses(straight)


def test_more_signals_to_all_ranks_do_not_hurt_a_slow_save(tmp_path: Path, books: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, ENDLESS)
    ranks = Ranks(train_with_slow_disk, [(str(config),)] * 2, folder=tmp_path)
    wait_until(lambda: 3 in logged_steps(run_dir), "step 3")
    os.kill(ranks.processes[1].pid, signal.SIGUSR2)
    wait_until(lambda: any((run_dir / "checkpoints").glob(".*.partial")), "the save")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        for process in ranks.processes:
            os.kill(process.pid, number)
    assert list_steps(run_dir) == [], "the save was over before the signals: this proves nothing"
    ended = ranks.finish()
    assert ended.codes == [EXIT_REQUEUE] * 2, ended.texts
    assert list_steps(run_dir) == [logged_steps(run_dir)[-1]]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir())[0] == "latest", "something half is there"


def train_with_slow_disk(config: str) -> int:
    with before_writing(lambda path: time.sleep(0.3)):
        return main(["train", config])


def test_a_signal_while_the_job_opens_stops_it_after_one_step(tmp_path: Path, books: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, ENDLESS)
    ranks = start(config)
    wait_until((run_dir / "lease.json").exists, "the lease")
    assert not (run_dir / "metrics.jsonl").exists(), "it trains already: this proves nothing"
    os.kill(ranks.processes[1].pid, signal.SIGUSR2)
    ended = ranks.finish()
    assert ended.codes == [EXIT_REQUEUE] * 2, ended.texts
    said_line("\n".join(ended.texts), "step 1: ", "SIGUSR2 on rank 1")
    assert list_steps(run_dir) == [1]


def test_a_signal_between_two_handlers_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of the start is replaced by that of the training, which hears the signal first."""
    early = StopSignal()
    monkeypatch.setattr(run, "before_joining", lambda *others: others[-1]())
    monkeypatch.setattr(run, "StopSignal", lambda: own)
    with StopSignal() as own, refused(StoppedEarlyError, "SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
        run.run(Config(), early=early)
    early.restore()


def train_refused(config: str, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    return main(["train", config])


@pytest.mark.parametrize(
    ("end", "code", "reported"),
    [
        ("", EXIT_USAGE, "/run/STOP exists"),
        ("tomorrow", EXIT_USAGE, "DIST_MEM_JOB_END is 'tomorrow', but must be seconds since 1970"),
        ("nan", EXIT_USAGE, "DIST_MEM_JOB_END is 'nan', but must be seconds since 1970"),
        ("1000000000", EXIT_FAILED, "the time of this job has been over for "),  # the next job has its own time
        ("in 20 s", EXIT_FAILED, "the time of this job is over in "),
    ],
    ids=["the file", "no number", "not finite", "past", "near"],
)
def test_what_would_stop_a_run_keeps_it_from_being_started_and_nothing_is_built(
    tmp_path: Path, books: Path, end: str, code: int, reported: str
) -> None:
    """The file, or an end of the time that cannot be kept; on both ranks."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, ENDLESS)
    environment = {"DIST_MEM_JOB_END": f"{time.time() + 20:.0f}" if end == "in 20 s" else end} if end else {}
    if not end:
        run_dir.mkdir()
        (run_dir / "STOP").touch()
    ended = run_forked(train_refused, [(str(config), environment)] * 2, folder=tmp_path)
    assert ended.codes == [code] * 2, ended.texts
    text = "\n".join(ended.texts)
    assert reported in text and text.count("error: ") == 1 and "Traceback" not in text, text
    assert [path.name for path in run_dir.glob("*")] == ([] if end else ["STOP"])
    assert end == "" or not run_dir.exists()


def stopping_of(rank: int, now: list[float], saved: float = 0.0) -> Stopping:
    world = World(rank=rank, size=2, local_rank=rank, local_size=2, device=torch.device("cpu"))
    return Stopping(Path("run"), world, StopSignal([]), training_seconds=lambda: now[0], save_seconds=lambda: saved)


def seconds_needed(*, saved: float, steps: list[float]) -> float:
    now = [0.0]
    asked = stopping_of(1, now, saved)
    now[0] = 780.0  # of the rehearsal and the first segments, which are no step
    for seconds in (0.0, *steps):
        now[0] += seconds
        assert not asked.is_asked_for()
    return asked.seconds_needed()


def test_a_disk_that_does_not_answer_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any, **_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    asked = stopping_of(0, [0.0])
    monkeypatch.setattr("os.stat", fail)
    assert not asked.is_asked_for()


def test_the_clock_leaves_time_for_three_saves_and_two_steps() -> None:
    assert seconds_needed(saved=0.1, steps=[1.0, 3.0, 2.0]) == LEAST_SECONDS + 6
    assert seconds_needed(saved=100.0, steps=[1.0, 3.0, 2.0]) == 306
    assert seconds_needed(saved=100.0, steps=[50.0, *[1.0] * 10]) == 302, "the first step, which compiles, for ever"


def validation_points(run_dir: Path) -> list[tuple[int, float]]:
    points = read_points(run_dir / "metrics.jsonl")
    name = "validation/word_perplexity"
    return [(point.step, point.metrics[name]) for point in points if name in point.metrics]


def test_a_stop_does_not_wait_for_an_evaluation_and_the_next_start_makes_it(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    """A scheduler that sends a signal two minutes ahead would kill the job in the midst of a long evaluation."""
    changes = {"train": {"steps": 4}, "eval": {"every": 2}, "schedule": {"kind": "constant"}}
    stopped = write_config(tmp_path / "stopped.yaml", books, tmp_path / "stopped", changes)
    straight = write_config(tmp_path / "straight.yaml", books, tmp_path / "straight", changes)
    assert rank_pool(2).run(train_here, straight) == [EXIT_DONE] * 2
    for steps in ([1], [1, 2]):
        assert rank_pool(2).run(stop_after_one_step, stopped) == [EXIT_REQUEUE] * 2
        assert list_steps(tmp_path / "stopped") == steps
    assert validation_points(tmp_path / "stopped") == []
    assert rank_pool(2).run(train_here, stopped) == [EXIT_DONE] * 2
    assert validation_points(tmp_path / "stopped") == validation_points(tmp_path / "straight")
    assert [step for step, _ in validation_points(tmp_path / "stopped")] == [2, 4]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    for step in (2, 4):  # the best is found where its weights are, although it was measured after they were saved
        assert read_manifest(step_dir(tmp_path / "stopped", step))["validation"]["step"] == step
        verify(step_dir(tmp_path / "stopped", step))
