"""A run that is killed again and again, for minutes, ends in the very bits of one that is left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_FAILED, EXIT_REQUEUE
from dist_mem.memory import memory_class
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ranks
from tests.support.jobs import (
    build_books,
    checkpoint_content,
    difference,
    logged_steps,
    losses,
    train_here,
    write_config,
)
from tests.support.limits import wait_until
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

SOAK_SECONDS = 600.0
PAUSES = (8.0, 20.0)  # seconds from a start to a kill, at least and at most
SEED = 5
SEG_LEN = 16  # of the configurations of tests/support/jobs.py
MEMORY = {
    "kind": "infinite",
    **memory_class("infinite").small_options(SEG_LEN),
    "over": {"kind": "transformer_xl", "mem_len": 2 * SEG_LEN},
    "sampling": "sticky",
}


def start(config: Path) -> Ranks:
    """`dist-mem train CONFIG` on two ranks."""
    return Ranks(main, [[["train", str(config)]]] * 2, folder=config.parent)


def soak(config: Path, run_dir: Path, *, seconds: float) -> Counter[str]:
    """Start one command, kill a rank of it, and so on; returns the kills by signal and by when they came."""
    choose = random.Random(SEED)
    kills: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        newest, logged = last_saved(run_dir), last_logged(run_dir)
        job = start(config)
        ended = wait([process.sentinel for process in job.processes], timeout=choose.uniform(*PAUSES))
        has_begun = last_logged(run_dir) != logged
        number, victim = choose.choice([signal.SIGKILL, signal.SIGTERM]), choose.choice(job.processes)
        os.kill(victim.pid, number)
        codes, texts = job.finish()
        assert not ended, texts
        assert set(codes) <= {-signal.SIGKILL, -signal.SIGTERM, EXIT_FAILED, EXIT_REQUEUE}, (codes, texts)
        assert last_saved(run_dir) >= newest, texts
        kills[f"{number.name} {'in training' if has_begun else 'at the start'}"] += 1
    return kills


def last_saved(run_dir: Path) -> int:
    return max(list_steps(run_dir), default=0)


def last_logged(run_dir: Path) -> int:
    return max(logged_steps(run_dir), default=0)


def stop_in_training(config: Path, run_dir: Path) -> int:
    """Start once more and let it save where it is; returns the step."""
    logged = last_logged(run_dir)
    job = start(config)
    wait_until(lambda: last_logged(run_dir) > logged, "another step")
    os.kill(job.processes[1].pid, signal.SIGTERM)
    codes, texts = job.finish()
    assert codes == [EXIT_REQUEUE] * 2, texts
    return last_saved(run_dir)


@pytest.mark.nightly
def test_a_run_killed_for_minutes_ends_in_the_bits_of_one_left_alone(
    tmp_path: Path, rank_pool: Callable[[int], RankPool], capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory samples and remembers without end; dropout is on; saves are made in the background."""
    books = build_books(tmp_path)
    changes = {
        "train": {"steps": 10_000_000},
        "schedule": {"kind": "constant"},
        "checkpoint": {"every": 15, "keep_last": 2},
        "tracking": {"every": 10},
    }
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    configs = [write_config(tmp_path / f"{path.name}.yaml", books, path, changes) for path in (run_dir, alone)]
    for config in configs:
        written = OmegaConf.load(config)
        written.memory = MEMORY
        OmegaConf.save(written, config)
    fork_server()
    assert rank_pool(2).run(train_here, configs[1], [f"run_dir={tmp_path / 'compiled'}", "train.steps=1"]) == [0, 0]
    kills = soak(configs[0], run_dir, seconds=SOAK_SECONDS)
    last = stop_in_training(configs[0], run_dir)
    reported = ", ".join(f"{count} by {how}" for how, count in sorted(kills.items()))
    with capsys.disabled():
        print(f"\n{kills.total()} kills survived in {SOAK_SECONDS:.0f} s and {last} steps: {reported}")
    assert rank_pool(2).run(train_here, configs[1], [f"train.steps={last}", "checkpoint.every=null"]) == [0, 0]
    ends = [checkpoint_content(step_dir(path, last)) for path in (run_dir, alone)]
    assert difference(*ends) is None
    assert losses(run_dir) == losses(alone)[: len(losses(run_dir))]
    assert kills.total() >= SOAK_SECONDS / 30
    assert sum(count for when, count in kills.items() if when.endswith("in training")) >= kills.total() / 2
