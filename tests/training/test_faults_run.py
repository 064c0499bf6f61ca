"""Faults of a run's place: disk, permissions, compiler, leftovers. All ranks stop, nothing that was saved is lost."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint import commit, saver
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_FAILED, UnfitError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, Point, find_entries
from dist_mem.tracking.tracker import LogSink
from tests.support.faults import flip, remount, small_disk, used_kilobytes
from tests.support.jobs import finish, logged_steps, run_ranks, start_ranks, train_here, write_config
from tests.support.limits import wait_until
from tests.support.messages import refused, said, said_line
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools, launcher_environment
from tests.support.saving import names, newest_verified


def said_once(text: str, *named: object) -> None:
    """Assert that this is the only error."""
    said_line(text, "error: ", *named)
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 1, text


def train_on_a_disk_that_lies(world: World, config: Path, changes: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_MARGIN", -(10**12))  # as where a quota ends before the disk does
        return train_here(world, config, changes)


def test_a_disk_without_room_for_a_save_stops_all_ranks_and_loses_nothing_saved(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    """Before the first step; in the midst of the write where the disk had promised room."""
    with small_disk(tmp_path / "disk", "size=40m") as disk:
        run_dir, more = disk / "run", ["train.steps=10"]
        unseen = {"train": {"steps": 5}, "preflight": False}  # as where the disk fills up later
        config = write_config(tmp_path / "run.yaml", books, run_dir, unseen)
        assert rank_pool(2).run(train_here, config) == [0, 0]
        remount(disk, f"size={used_kilobytes(disk) + 80}k")
        codes, text = run_ranks(["train", str(config), *more], world_size=2, cwd=tmp_path)
        assert codes == [1, 1], text
        said_once(text, run_dir, "checkpoint.keep_last")
        first, second = rank_pool(2).run(error_of, train_on_a_disk_that_lies, config, more)
        assert first == second and "No space left on device: '" in first
        assert names(run_dir) == ["latest", "step-00000005"]
        assert newest_verified(run_dir) == (step_dir(run_dir, 5), [])
        remount(disk, "size=40m")
        assert rank_pool(2).run(train_here, config, more) == [0, 0]
        assert logged_steps(run_dir) == list(range(1, 11))
        assert list_steps(run_dir) == [5, 10]


def test_a_disk_that_fills_up_in_mid_run_stops_all_ranks(tmp_path: Path, books: Path) -> None:
    """Met first by metrics.jsonl, on rank 0 alone and between the collectives of a step."""
    with small_disk(tmp_path / "disk", "size=40m") as disk:
        run_dir = disk / "run"
        endless = {"train": {"steps": 10**6}, "checkpoint": {"every": None}}
        config = write_config(tmp_path / "run.yaml", books, run_dir, endless)
        processes = start_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
        wait_until(lambda: 3 in logged_steps(run_dir), "step 3")
        remount(disk, f"size={used_kilobytes(disk) + 4}k")
        codes, text = finish(processes)
        assert codes == [1, 1], text
        said_once(text, run_dir, "checkpoint.keep_last")
        assert names(run_dir) == []
        assert not (run_dir / "lease.json").exists()


class FullLog(LogSink):
    """A disk that has room for checkpoints, not for a line more: a quota does that, a small disk not reliably."""

    def log(self, point: Point) -> None:
        if point.step >= 3:
            raise OSError(28, "No space left on device", METRICS_FILE)
        super().log(point)


class OnceFullLog(FullLog):
    """There is room again one step later."""

    def log(self, point: Point) -> None:
        if point.step == 3:
            super().log(point)


def train_with_full_metrics(world: World, config: Path, disk: type[LogSink]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dist_mem.tracking.start.LogSink", disk)
        return train_here(world, config)


@pytest.mark.parametrize(("steps", "disk"), [(3, FullLog), (9, FullLog), (4, OnceFullLog)])
def test_a_step_that_cannot_be_recorded_stops_a_run_that_is_saved(
    tmp_path: Path, books: Path, rank_pool: Pools, steps: int, disk: type[LogSink]
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": steps}})
    for text in rank_pool(2).run(error_of, train_with_full_metrics, config, disk):
        said(text, "UnfitError", "rank 0: OSError: [Errno 28]", METRICS_FILE)
    assert list_steps(tmp_path / "run") == [min(steps, 4)]
    assert rank_pool(2).run(train_here, config) == [0, 0]


def test_an_evaluation_that_cannot_score_stops_a_run_that_is_saved(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    data = Path(shutil.copytree(books, tmp_path / "data"))
    flip(next((data / "validation").glob("*.tar")), 1700)
    config = write_config(tmp_path / "run.yaml", data, tmp_path / "run", {"eval": {"every": 3, "batch_size": 2}})
    for text in rank_pool(2).run(error_of, train_here, config):
        said(text, data / "validation", "document ")
    assert list_steps(tmp_path / "run") == [3]


def train_where_ranks_cannot_connect(world: World, config: Path) -> int:
    def refuse(world: World) -> None:
        raise UnfitError("no connection")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "open_side_channel", refuse)
        return train_here(world, config)


def test_a_start_that_fails_after_its_run_is_open_ends_it_as_failed(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    for text in rank_pool(2).run(error_of, train_where_ranks_cannot_connect, config):
        said(text, "UnfitError", "no connection")
    statuses = [entry.body["status"] for entry in find_entries(tmp_path / "run" / METRICS_FILE, "status")]
    assert statuses == ["RUNNING", "FAILED"]


@pytest.mark.usefixtures("single_process")
def test_a_run_directory_on_a_full_or_read_only_disk_is_an_error_of_one_line(
    tmp_path: Path, books: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "size=40k") as disk:
        config = write_config(tmp_path / "run.yaml", books, disk / "run")
        (disk / "run").mkdir()
        with refused(OSError, "[Errno 28]"), (disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert main(["train", str(config)]) == EXIT_FAILED
        said_once(capfd.readouterr().err, f"run_dir {disk / 'run'} ", "[Errno 28]")
        assert list((disk / "run").iterdir()) == []
        remount(disk, "ro")
        assert main(["train", str(config)]) == EXIT_FAILED
        said_once(capfd.readouterr().err, f"run_dir {disk / 'run'} ", "[Errno 30]")


def test_without_a_compiler_the_first_start_says_what_to_install(tmp_path: Path, books: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sh").symlink_to(str(shutil.which("sh")))
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"preflight": False})  # which would tell it
    environment = {
        **os.environ,
        **launcher_environment(0, 1, free_port()),
        "PATH": str(programs),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
    }
    command = [sys.executable, "-m", "dist_mem", "train", str(config)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    said_once(done.stderr, "C++ compiler", "TORCH_EXTENSIONS_DIR")
    assert not (tmp_path / "run").exists()
