"""Faults of MLflow, disk and network: exit codes of `dist-mem track sync`, and errors at the start of tracking."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from sqlalchemy.engine import make_url

from dist_mem.config import save_config
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE, UnusableError, run_error
from dist_mem.runtime.file_schema import read_json_lines, text
from dist_mem.tracking.log import (
    FORMAT_VERSION,
    METRICS_FILE,
    Entry,
    LogReader,
    last_point,
    read_header,
    read_points,
)
from dist_mem.tracking.mlflow.client import file_of
from dist_mem.tracking.mlflow.store import check_store, check_tracking, warn_of_folder
from tests.support.faults import remount, small_disk
from tests.support.messages import refused
from tests.support.tracked import config_for, job, start, track_sync
from tests.tracking.test_safe_sync import POINT, answering, make_run

pytestmark = pytest.mark.ranks


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has sent nothing yet."""
    return make_run(tmp_path / "run", "sqlite:///mlflow.db", POINT)


@pytest.mark.parametrize(
    ("status", "code"), [(401, EXIT_USAGE), (403, EXIT_USAGE), (500, EXIT_FAILED), (503, EXIT_FAILED)]
)
def test_refused_login_is_2_and_a_server_in_trouble_or_down_is_1(
    run_dir: Path, capsys: pytest.CaptureFixture[str], status: int, code: int
) -> None:
    with answering(status) as server:
        assert track_sync([run_dir], [f"tracking.uri={server.uri}"]) == code
    assert str(status) in capsys.readouterr().err
    assert track_sync([run_dir], [f"tracking.uri={server.uri}"]) == EXIT_FAILED, "it is down now"


def test_wrong_address_is_refused_and_named(run_dir: Path) -> None:
    for uri in ("ftp://mlflow.example", "'http://[::1'", "sqlite:////nowhere/at/all/mlflow.db"):
        with refused(UnusableError, "tracking.uri"):
            track_sync([run_dir], [f"tracking.uri={uri}"])


GONE = {"experiment": "gone"}, {"id": "987654"}, {"id": "so it is"}, {"uri": "file:./runs"}, {"uri": "runs"}


@pytest.mark.parametrize("which", GONE)
def test_an_experiment_or_a_store_that_cannot_be_used_is_2_with_the_remedy(
    tmp_path: Path, sqlite_uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, which: dict[str, Any]
) -> None:
    """At the start of a training, where nothing is made yet, and at `track sync`."""
    monkeypatch.chdir(tmp_path)
    if (found := client.get_experiment_by_name("gone")) is None:
        client.delete_experiment(client.create_experiment("gone"))
    assert found is None or found.lifecycle_stage == "deleted"
    if which.get("id"):
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", which["id"])
    config = config_for(which.get("uri", sqlite_uri), tracking={"experiment": which.get("experiment")})
    remedy = "set tracking.uri=sqlite:///" if "uri" in which else "set tracking.experiment=NAME"
    with refused(UnusableError, remedy):
        check_tracking(config, tmp_path / "run")
    assert not [*tmp_path.iterdir()]
    job(OmegaConf.merge(config, {"tracking": {"send": "never"}}), tmp_path / "run", {1: 1.0})
    save_config(config, tmp_path / "run" / "config.yaml")
    assert track_sync([tmp_path / "run"]) == EXIT_USAGE
    assert remedy in capsys.readouterr().err


NAME = st.text("ab %25F.é#&=", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))


@given(NAME, st.booleans(), st.booleans())
def test_an_sqlite_address_means_the_file_that_sqlalchemy_opens(name: str, is_absolute: bool, has_query: bool) -> None:
    uri = f"sqlite:///{'/x/' if is_absolute else ''}{name}/m.db{'?timeout=5' if has_query else ''}"
    assert file_of(uri) == Path(str(make_url(uri).database))


def test_a_folder_with_a_percent_sign_is_read_in_one_way_and_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "a b", tmp_path / "a%2Fb"):
        folder.mkdir()
    check_store(f"sqlite:///{tmp_path}/a%20b/m.db")
    check_store(f"sqlite:///{tmp_path}/a%252Fb/m.db")
    with refused(UnusableError):
        check_store(f"sqlite:///{tmp_path}/a%2Fb/m.db")
    monkeypatch.chdir(tmp_path / "a b")
    assert warn_of_folder("sqlite:///m.db") is None
    monkeypatch.chdir(tmp_path / "a%2Fb")
    assert f"{tmp_path}/a/b/mlruns" in str(warn_of_folder("sqlite:///m.db"))
    assert warn_of_folder("http://mlflow.example") is None


@pytest.mark.parametrize("name", [METRICS_FILE, "history.jsonl", "starts.jsonl"])
def test_a_log_that_is_no_regular_file_is_refused(tmp_path: Path, name: str) -> None:
    """A read of a pipe would wait for ever."""
    path = tmp_path / name
    os.mkfifo(path)
    of_log: list[Callable[[Path], object]] = [read_points, read_header, partial(last_point, metric="loss")]
    for read in of_log if name == METRICS_FILE else [lambda path: read_json_lines(path, text, UnusableError)]:
        with refused(UnusableError):
            read(path)


def open_files(folder: Path) -> list[str]:
    """Return the files under a folder that this process has open."""
    names = [file.path for file in psutil.Process().open_files()]
    return [name for name in names if Path(name).is_relative_to(folder)]


def remove_log(run_dir: Path) -> Path:
    (run_dir / METRICS_FILE).unlink()
    return run_dir / METRICS_FILE


def damage_header(run_dir: Path) -> Path:
    (run_dir / METRICS_FILE).write_bytes(b"\xff\xfe{}\n")
    return run_dir / METRICS_FILE


def make_newer(run_dir: Path) -> Path:
    path = run_dir / METRICS_FILE
    path.write_text(f'{{"format_version": {FORMAT_VERSION + 1}, "another": "key"}}\n')
    return path


def damage_point(run_dir: Path) -> Path:
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write("no point\n")
    return run_dir / METRICS_FILE


@pytest.mark.parametrize("spoil", [remove_log, damage_header, make_newer, damage_point])
def test_run_directory_that_cannot_be_used_is_2_and_the_file_is_named(
    run_dir: Path, sqlite_uri: str, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], Path]
) -> None:
    """At `track sync` and, unless the log is not there, at the start of a training."""
    path = spoil(run_dir)
    assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_USAGE
    printed = capsys.readouterr().err
    assert str(path) in printed and ("format_version" in printed) == (spoil is make_newer)
    if spoil is not remove_log:
        with refused(UnusableError, path):
            start(config_for("http://mlflow.example", tracking={"send": "never"}), run_dir)
        assert open_files(run_dir) == []


def test_io_error_is_1(
    run_dir: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(reader: LogReader, size: int) -> list[Entry]:
        raise OSError(errno.EIO, "Input/output error", str(run_dir / METRICS_FILE))

    monkeypatch.setattr(LogReader, "batch", fail)
    assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_FAILED
    assert str(run_dir / METRICS_FILE) in capsys.readouterr().err


@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_disk_that_is_full_or_read_only_at_the_start_is_no_error_of_the_user(tmp_path: Path, options: str) -> None:
    """An OSError, which `run_error` sorts by its number; a ValueError would always be 2."""
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        (disk / "filler").write_bytes(bytes(1 << 20))
        remount(disk, options)
        with refused(OSError) as caught:
            start(config_for("http://mlflow.example", tracking={"send": "never"}), disk / "run")
        assert str(disk) in str(caught.value)
        assert run_error(caught.value).exit_code == EXIT_FAILED
        assert open_files(disk) == []
