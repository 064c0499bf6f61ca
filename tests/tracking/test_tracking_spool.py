"""Jobs that only write their log, because SQLite would break; their start, their end, and the id of their run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import save_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.runtime.files import file_system_of, is_network_file_system
from dist_mem.supervision import lease
from dist_mem.tracking.log import METRICS_FILE
from dist_mem.tracking.mlflow import store
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, check_tracking, choose_sending
from dist_mem.tracking.mlflow.sync import send_log
from tests.support.faults import small_disk
from tests.support.limits import limit, wait_until
from tests.support.messages import refused
from tests.support.mlflow_server import points_of
from tests.support.paths import ROOT
from tests.support.tracked import config_for, history, job, start, steps, track_sync

pytestmark = pytest.mark.servers


@pytest.fixture
def array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of a Slurm array."""
    job = {"JOB_ID": "1235", "JOB_NODELIST": "node[1-2]", "ARRAY_JOB_ID": "1234", "ARRAY_TASK_ID": "3"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


# When


@pytest.mark.parametrize(
    ("uri", "kind", "send", "is_on"),
    [
        ("sqlite:///mlflow.db", "ext4", "auto", True),
        ("sqlite:///mlflow.db", "nfs4", "auto", False),
        ("sqlite:////shared/mlflow.db", "lustre", "auto", False),
        ("sqlite:///mlflow.db", "fuse.sshfs", "auto", False),
        ("sqlite:///mlflow.db", "nfs4", "always", True),
        ("sqlite:///mlflow.db", "ext4", "never", False),
        ("https://mlflow.example", "nfs4", "auto", True),
        ("https://mlflow.example", "ext4", "never", False),
        ("postgresql://db.example/mlflow", "nfs4", "auto", True),
    ],
)
def test_nothing_is_sent_into_a_file_on_a_shared_disk(
    monkeypatch: pytest.MonkeyPatch, uri: str, kind: str, send: str, is_on: bool
) -> None:
    monkeypatch.setattr(store, "file_system_of", lambda folder: kind)
    sending = choose_sending(config_for(uri, tracking={"send": send}).tracking)
    assert sending.is_on is is_on
    assert uri in sending.message and "\n" not in sending.message
    if kind != "ext4" and uri.startswith("sqlite") and send == "auto":
        assert f"is on a network file system ({kind}), where SQLite breaks" in sending.message


def test_nothing_is_sent_into_a_file_from_an_array(array: None) -> None:
    assert (
        choose_sending(config_for("sqlite:///x.db").tracking).message.count("array 1234 would lock each other out") == 1
    )
    assert not choose_sending(config_for("sqlite:///x.db").tracking).is_on
    assert choose_sending(config_for("sqlite:///x.db", tracking={"send": "always"}).tracking).is_on
    assert choose_sending(config_for("http://mlflow.example:5000").tracking).is_on


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    """Also of a path that does not exist yet, and of a folder with a blank in its name."""
    outside = file_system_of(tmp_path)
    assert outside not in ("", "tmpfs") and not is_network_file_system(outside)
    assert file_system_of(Path("/proc/self/nothing")) == "proc"
    with small_disk(tmp_path / "a disk", "size=100k") as disk:
        assert file_system_of(disk / "runs" / "new") == "tmpfs"
        assert file_system_of(tmp_path / "a disk of another name") == outside


# Logs that are sent later

WITHOUT_MLFLOW = """
import sys
from pathlib import Path
from tests.support.tracked import config_for, job, steps
config = config_for("sqlite:///mlflow.db")
job(config, Path("run"), steps(1, 9))
job(config, Path("run"), {step: step + 0.5 for step in range(6, 12)}, first_step=5, status="FINISHED")
from dist_mem.config import save_config
save_config(config, Path("run") / "config.yaml")
assert not [name for name in sys.modules if name.split(".")[0] == "mlflow"], "mlflow is imported"
"""


def test_an_array_task_imports_no_mlflow_and_a_sync_sends_what_counts_once(
    array: None, sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that were made again are not there twice: the first ones were never sent."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WITHOUT_MLFLOW}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=limit(120))
    run_dir = tmp_path / "run"
    assert done.stderr.count("MLflow: nothing is sent to sqlite:///mlflow.db while the job runs, because ") == 2
    assert done.stderr.count("MLflow has received nothing of this job yet; send it with: dist-mem track sync run") == 2
    assert not (tmp_path / "mlflow.db").exists() and not (run_dir / RUN_ID_FILE).exists()
    for _ in range(2):
        assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_DONE
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert history(client, run_id, "loss") == [*steps(1, 5).items(), *((step, step + 0.5) for step in range(6, 12))]
    assert {name for name, *_ in points_of(client, run_id)} == {"train/loss", "train/seconds"}
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "MLflow has everything already" in capsys.readouterr().out


def test_every_start_is_remembered_with_its_job(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(sqlite_uri)
    job(config, tmp_path, steps(1, 5))
    for name, value in {"JOB_ID": "1234", "JOB_NODELIST": "node[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    job(config, tmp_path, steps(6, 9), first_step=5)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[3-4]")
    run_id = job(config, tmp_path, steps(10, 10), first_step=9).run_id
    tags = client.get_run(run_id).data.tags
    starts = [tags[name] for name in sorted(tags) if name.startswith("dist_mem.start_")]
    time_of_day = r", 20\d\d-\d\d-\d\d \d\d:\d\d UTC"
    for start_says, expected in zip(
        starts,
        [
            r"from step 0, on \S+",
            r"from step 5, job 1234, restart 0, node\[1-2\]",
            r"from step 9, job 1234, restart 1, node\[3-4\]",
        ],
        strict=True,
    ):
        assert re.fullmatch(expected + time_of_day, start_says)


# Ends

KILLED = """
import time
from pathlib import Path
from tests.support.tracked import config_for, start
from dist_mem.supervision.lease import Lease
lease = Lease(Path("run"))
tracker = start(config_for(sys.argv[1]), Path("run"))
tracker.log(1, {"loss": 1.0})
time.sleep(600)
"""


def test_a_job_killed_outright_is_no_longer_running_after_a_sync_or_its_next_start(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it lives, a sync leaves its status alone."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(config_for(sqlite_uri), run_dir / "config.yaml")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{KILLED}", sqlite_uri]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)

    def status() -> str:
        return str(client.get_run((run_dir / RUN_ID_FILE).read_text().strip()).info.status)

    try:
        wait_until(lambda: (run_dir / RUN_ID_FILE).exists() or process.poll() is not None, "the run")
        assert track_sync([run_dir]) == EXIT_DONE
        assert status() == "RUNNING"
    finally:
        process.kill()
        process.wait()
    monkeypatch.setattr(lease, "STALE_SECONDS", 1.0)
    assert track_sync([run_dir]) == EXIT_DONE
    assert status() == "KILLED"
    assert "its job was killed outright" in capsys.readouterr().out
    tracker = start(config_for(sqlite_uri), run_dir, first_step=1)
    wait_until(lambda: status() == "RUNNING", "the next start")
    tracker.close("FINISHED")
    assert status() == "FINISHED"


# What names the run


@pytest.mark.parametrize("text", ["", "../../etc", "two words", "\x00\xff", "abc\ndef", "a" * 300])
def test_invalid_run_id_is_refused_and_its_file_named(sqlite_uri: str, tmp_path: Path, text: str) -> None:
    tracker = start(config_for(sqlite_uri, tracking={"send": "never"}), tmp_path)
    tracker.close("KILLED")
    path = tmp_path / RUN_ID_FILE
    path.write_bytes(text.encode("latin-1"))
    config = config_for(sqlite_uri)
    printed = re.escape(str(path)) + r" is .*, but the id of an MLflow run has letters and digits only"
    for use in (lambda: start(config, tmp_path), lambda: check_tracking(config, tmp_path)):
        with pytest.raises(UnusableError, match=printed):
            use()
    with pytest.raises(UnusableError, match=printed):
        send_log(config.tracking, tmp_path, report=print)
    save_config(config, tmp_path / "config.yaml")
    assert track_sync([tmp_path]) == EXIT_USAGE
    assert (tmp_path / METRICS_FILE).exists()


def test_invalid_run_id_is_refused_and_its_variable_named(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "runs:/my run")
    for use in (start, check_tracking):
        with refused(UnusableError):
            use(config_for(sqlite_uri), tmp_path)
    assert not (tmp_path / RUN_ID_FILE).exists()
