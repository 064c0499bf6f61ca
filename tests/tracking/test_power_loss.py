"""The power fails: what a checkpoint says was logged is there, and every point comes to MLflow once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps
from dist_mem.supervision.lease import Lease
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ranks
from tests.support.jobs import build_books, logged_steps, write_config
from tests.support.limits import wait_until
from tests.support.power import Disk, disk_without_power

pytestmark = pytest.mark.ranks

EVERY = 4  # steps between two checkpoints


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fork_server()
    return build_books(tmp_path_factory.mktemp("books"))


def cut_in_mid_run(disk: Disk, config: Path, run_dir: Path, *, num_saves: int) -> int:
    """Train until there are so many more checkpoints, and cut; returns the step of the newest that is left."""
    had = last_saved(run_dir)
    job = Ranks(main, [[["train", str(config)]]], folder=config.parent)
    try:
        wait_until(lambda: last_saved(run_dir) >= had + num_saves * EVERY, f"{num_saves} checkpoints")
        disk.cut()
    finally:
        for process in job.processes:
            process.kill()
        job.finish()
    disk.restart()
    return last_saved(run_dir)


def last_saved(run_dir: Path) -> int:
    return max(list_steps(run_dir), default=0)


def test_what_a_checkpoint_was_saved_after_is_logged_when_the_power_fails(tmp_path: Path, books: Path) -> None:
    with disk_without_power(tmp_path / "disk") as disk:
        run_dir = disk.folder / "run"
        tracking: dict[str, Any] = {"mlflow": True, "send": "never", "system_metrics": False}
        changes = {"train": {"steps": 10**6}, "checkpoint": {"every": EVERY, "keep_last": 2}, "tracking": tracking}
        config = write_config(tmp_path / "run.yaml", books, run_dir, changes)
        saved = cut_in_mid_run(disk, config, run_dir, num_saves=3)
        assert [step for step in logged_steps(run_dir) if step <= saved] == list(range(1, saved + 1))


def test_a_lease_survives_the_power_and_names_its_job(tmp_path: Path) -> None:
    """An empty one kept the next job waiting for a minute."""
    with disk_without_power(tmp_path / "disk") as disk:
        os.sync()
        lease = Lease(disk.folder / "run")
        written = lease.path.read_text()
        disk.cut()
        lease.release()
        disk.restart()
        assert lease.path.read_text() == written
