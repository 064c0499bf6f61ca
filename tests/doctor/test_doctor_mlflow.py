"""The doctor's check of MLflow's store, and the exit code of faults that the preflight finds."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.cli.commands import load_checked
from dist_mem.doctor import consistency
from dist_mem.doctor.examine import examine
from dist_mem.doctor.preflight import preflight
from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from dist_mem.supervision.findings import FAIL, WARNING, Finding
from tests.support.jobs import write_config
from tests.support.mlflow_server import silent_address
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.servers, pytest.mark.ranks]

Pool = Callable[[int], RankPool]


def find_mlflow(world: World, config_file: Path, uri: str) -> Finding:
    """Return the finding of `dist-mem doctor` about MLflow."""
    config = load_checked([str(config_file), "tracking.mlflow=true", f"tracking.uri={uri}"])
    rounds = examine(config, world, is_thorough=True)
    (found,) = (finding for finding in next(rounds) if finding.what == "MLflow")
    rounds.close()
    return found


def start_error(world: World, config_file: Path, *overrides: str) -> str:
    """Return the name of the error with which the preflight ends a job, and its message; "" if the job starts."""
    try:
        preflight(load_checked([str(config_file), *overrides]), world)
    except (UnfitError, UnusableError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", ["drops", "accepts", "refuses"])
def test_server_that_is_down_is_a_warning(tmp_path: Path, books: Path, rank_pool: Pool, kind: str) -> None:
    config = write_config(tmp_path / "config.yaml", books, tmp_path / "run")
    if kind == "refuses":
        (found,) = rank_pool(1).run(find_mlflow, config, f"http://127.0.0.1:{free_port()}")
    else:
        with silent_address(accepting=kind == "accepts") as uri:
            (found,) = rank_pool(1).run(find_mlflow, config, uri)
    assert found.level == WARNING
    assert "does not answer" in found.found and "tracking.uri" in found.fix


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("ftp://mlflow.example", "kind 'ftp'"),
        ("http://[::1", "tracking.uri"),
        ("sqlite:////nowhere/at/all/mlflow.db", "/nowhere/at/all"),
    ],
)
def test_wrong_address_is_a_failure_that_no_restart_repairs(
    tmp_path: Path, books: Path, rank_pool: Pool, uri: str, named: str
) -> None:
    config = write_config(tmp_path / "config.yaml", books, tmp_path / "run")
    (error,) = rank_pool(1).run(start_error, config, "tracking.mlflow=true", f"tracking.uri='{uri}'")
    assert error.startswith("UnusableError") and "tracking.uri" in error and named in error


def fail_to_read(world: World, config_file: Path, code: int) -> str:
    def fail(config: object) -> None:
        raise OSError(code, "reading failed", "books/train/index.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "check_tars", fail)
        return start_error(world, config_file)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *(("UnfitError", code) for code in (errno.EIO, errno.ESTALE, errno.ENOSPC)),
        *(("UnusableError", code) for code in (errno.ENOENT, errno.EACCES)),
    ],
)
def test_fault_of_a_disk_may_pass_and_a_wrong_path_does_not(
    tmp_path: Path, books: Path, rank_pool: Pool, code: int, error: str
) -> None:
    config = write_config(tmp_path / "config.yaml", books, tmp_path / "run")
    (found,) = rank_pool(1).run(fail_to_read, config, code)
    assert found.startswith(error) and "books/train/index.json" in found and FAIL in found
