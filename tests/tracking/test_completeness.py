"""A sync never reports that MLflow has everything of a run that has lost some; a power failure loses nothing saved."""

import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, read_manifest, step_dir
from dist_mem.errors import EXIT_DONE, EXIT_FAILED
from dist_mem.runtime.distributed import World
from dist_mem.supervision.lease import Lease
from dist_mem.tracking.log import METRICS_FILE, find_entries, new_uid, read_header
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ranks
from tests.support.jobs import logged_steps, train_here, write_config
from tests.support.limits import wait_until
from tests.support.power import disk_without_power
from tests.support.ranks import Pools
from tests.support.tracked import history, track_sync

STEPS, EVERY = 10, 4  # of a checkpoint
TRACKING: dict[str, Any] = {"mlflow": True, "send": "never", "system_metrics": False}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Path:
    """A run that has evaluated twice and sent nothing yet; its configuration lies beside it."""
    folder = tmp_path_factory.mktemp("trained")
    saves_and_evaluates = {"checkpoint": {"every": EVERY}, "eval": {"every": 5, "batch_size": 2}}
    changes = {"train": {"steps": STEPS}, "tracking": TRACKING, **saves_and_evaluates}
    config = write_config(folder / "run.yaml", books, folder / "run", changes)
    assert rank_pool(1).run(train_here, config) == [EXIT_DONE]
    return folder / "run"


def copy_of(run_dir: Path, folder: Path) -> Path:
    """A run to spoil, which is another one for MLflow."""
    copied = Path(shutil.copytree(run_dir, folder / "run"))
    log = copied / METRICS_FILE
    log.write_text(log.read_text().replace(read_header(log).uid, new_uid()))
    return copied


def cut_points(path: Path, first_lost: int) -> None:
    """What a power loss takes from a file that was not flushed: the points from this step on, and what follows."""
    lines = path.read_bytes().splitlines(keepends=True)
    mark = b'{"kind": "point"'
    is_lost = [line.startswith(mark) and json.loads(line)["body"]["step"] >= first_lost for line in lines]
    path.write_bytes(b"".join(lines[: is_lost.index(True)]))


def test_sync_names_missing_points_and_the_checkpoints_that_follow_remember_them(
    tmp_path: Path, trained: Path, sqlite_uri: str, client: Any, rank_pool: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(trained, tmp_path)
    cut_points(run_dir / METRICS_FILE, 7)
    for _ in range(2):
        assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_FAILED
        output = capsys.readouterr()
        assert "has 7 of the 12 points that were logged up to step 10, the last of step 6; the others" in output.err
        assert "MLflow has everything" not in output.out
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert [step for step, _ in history(client, run_id, "loss")] == list(range(1, 7))
    config = tmp_path / "run.yaml"
    config.write_text(trained.with_suffix(".yaml").read_text().replace(str(trained), str(run_dir)))
    assert rank_pool(1).run(train_here, config, [f"train.steps={STEPS + EVERY}"]) == [EXIT_DONE]
    assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_FAILED
    assert "has 11 of the 16 points that were logged up to step 14" in capsys.readouterr().err


def test_a_sync_looks_for_the_points_in_mlflow_itself(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after its database was restored badly: the tag counts entries that are not there."""
    run_dir, uri = copy_of(trained, tmp_path), f"sqlite:///{tmp_path}/own.db"
    assert track_sync([run_dir], [f"tracking.uri={uri}"]) == EXIT_DONE
    assert "MLflow has everything" in capsys.readouterr().out
    with sqlite3.connect(tmp_path / "own.db") as database:
        database.execute("DELETE FROM metrics WHERE step > 6 AND key NOT LIKE 'validation%'")
    assert track_sync([run_dir], [f"tracking.uri={uri}"]) == EXIT_FAILED
    output = capsys.readouterr()
    assert "MLflow lacks 4 points (steps 7 to 10) of " in output.err and "has everything" not in output.out


def imports_mlflow(world: World, config_file: Path) -> bool:
    """Whether training does."""
    if world.rank != 0:
        for name in [name for name in sys.modules if name.split(".")[0] == "mlflow"]:
            del sys.modules[name]  # a test module may have asked for it
    assert train_here(world, config_file) == 0
    return "mlflow" in sys.modules


def test_a_checkpoint_whose_job_was_killed_before_it_logged_that_is_logged_by_the_next(
    tmp_path: Path, trained: Path, rank_pool: Pools
) -> None:
    run_dir = copy_of(trained, tmp_path)
    log = run_dir / METRICS_FILE
    *_, logged = find_entries(log, "checkpoint")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"kind": "checkpoint"')))
    changes = [f"run_dir={run_dir}", f"train.steps={STEPS + 1}"]
    assert rank_pool(1).run(train_here, trained.parent / "run.yaml", changes) == [EXIT_DONE]
    again = find_entries(log, "checkpoint")
    assert [entry.body["step"] for entry in again] == [STEPS, STEPS + 1]
    assert again[0].body["points"] == logged.body["points"]
    assert again[0].body["path"] == str(step_dir(run_dir, STEPS))


def test_ranks_other_than_0_never_import_mlflow(rank_pool: Pools, books: Path, tmp_path: Path) -> None:
    changes = {"tracking": {"mlflow": True, "uri": f"sqlite:///{tmp_path}/mlflow.db"}, "train": {"steps": 2}}
    config_file = write_config(tmp_path / "job.yaml", books, tmp_path / "run", changes)
    assert rank_pool(2).run(imports_mlflow, config_file) == [True, False]


# The power fails


def last_saved(run_dir: Path) -> int:
    return max(list_steps(run_dir), default=0)


def test_what_a_checkpoint_was_saved_after_is_logged_when_the_power_fails(tmp_path: Path, books: Path) -> None:
    fork_server()  # before the disk is there
    with disk_without_power(tmp_path / "disk") as disk:
        run_dir = disk.folder / "run"
        changes = {"train": {"steps": 10**6}, "checkpoint": {"every": EVERY, "keep_last": 2}, "tracking": TRACKING}
        config = write_config(tmp_path / "run.yaml", books, run_dir, changes)
        job = Ranks(main, [[["train", str(config)]]], folder=tmp_path)
        try:
            wait_until(lambda: last_saved(run_dir) >= 3 * EVERY, "three checkpoints")
            disk.cut()
        finally:
            job.processes[0].kill()
            job.finish()
        disk.restart()
        saved = last_saved(run_dir)
        assert [step for step in logged_steps(run_dir) if step <= saved] == list(range(1, saved + 1))


def test_the_evaluation_that_a_start_adds_to_a_checkpoint_is_logged_when_the_power_fails(
    tmp_path: Path, trained: Path
) -> None:
    fork_server()
    with disk_without_power(tmp_path / "disk") as disk:
        run_dir, step = copy_of(trained, disk.folder), 2 * EVERY
        os.sync()
        owes = [f"resume={step}", f"eval.every={EVERY}", f"train.steps={10**6}", f"checkpoint.every={10**6}"]
        command = ["train", str(trained.parent / "run.yaml"), f"run_dir={run_dir}", *owes]
        job = Ranks(main, [[command]], folder=tmp_path)
        try:
            wait_until(lambda: saved_manifest(run_dir, step)["validation"]["step"] == step, "the evaluation")
            disk.cut()
        finally:
            job.processes[0].kill()
            job.finish()
        disk.restart()
        logged = [found for found in logged_steps(run_dir) if found <= step]
        assert len(logged) == saved_manifest(run_dir, step)["points"] == step + 2, "evaluated twice"


def saved_manifest(run_dir: Path, step: int) -> dict[str, Any]:
    return read_manifest(step_dir(run_dir, step))


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
