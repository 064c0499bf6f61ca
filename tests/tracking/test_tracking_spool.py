"""Jobs that only write their log, because SQLite would break; their start, their end, and the id of their run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dist_mem.config import save_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.runtime.files import file_system_of, is_network_file_system
from dist_mem.supervision import lease
from dist_mem.tracking.mlflow import store
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, check_tracking, choose_sending
from tests.support.faults import small_disk
from tests.support.limits import limit, wait_until
from tests.support.messages import refused
from tests.support.mlflow_server import points_of
from tests.support.paths import ROOT
from tests.support.tracked import config_for, steps, track_sync
from tests.tracking.conftest import Sent

pytestmark = pytest.mark.servers


@pytest.fixture
def array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of a Slurm array."""
    set_slurm(monkeypatch, JOB_ID="1235", JOB_NODELIST="node[1-2]", ARRAY_JOB_ID="1234", ARRAY_TASK_ID="3")


def set_slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
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
    sending = choose_sending(config_for("sqlite:///x.db").tracking)
    assert not sending.is_on and "array 1234" in sending.message
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
from tests.tracking.conftest import Sent
from tests.support.tracked import config_for, job, steps
config = config_for("sqlite:///mlflow.db")
job(config, Path("run"), steps(1, 9))
job(config, Path("run"), {step: step + 0.5 for step in range(6, 12)}, first_step=5, status="FINISHED")
from dist_mem.config import save_config
save_config(config, Path("run") / "config.yaml")
assert not [name for name in sys.modules if name.split(".")[0] == "mlflow"], "mlflow is imported"
"""


def test_an_array_task_imports_no_mlflow_and_a_sync_sends_what_counts_once(
    array: None, sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that were made again are not there twice: the first ones were never sent."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WITHOUT_MLFLOW}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=limit(120))
    assert done.stderr.count("MLflow: nothing is sent to sqlite:///mlflow.db while the job runs, because ") == 2
    assert done.stderr.count("MLflow has received nothing of this job yet; send it with: dist-mem track sync run") == 2
    assert not (tmp_path / "mlflow.db").exists() and not (sent.run_dir / RUN_ID_FILE).exists()
    for _ in range(2):
        assert track_sync([sent.run_dir], [f"tracking.uri={sent.uri}"]) == EXIT_DONE
    assert sent.losses() == steps(1, 5) | {step: step + 0.5 for step in range(6, 12)}
    assert {name for name, *_ in points_of(sent.client, sent.run_id)} == {"train/loss", "train/seconds"}
    assert sent.run.info.status == "FINISHED"
    assert "MLflow has everything already" in capsys.readouterr().out


def test_every_start_is_remembered_with_its_job(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    sent.job(steps(1, 5))
    set_slurm(monkeypatch, JOB_ID="1234", JOB_NODELIST="node[1-2]")
    sent.job(steps(6, 9), first_step=5)
    set_slurm(monkeypatch, RESTART_COUNT="1", JOB_NODELIST="node[3-4]")
    sent.job(steps(10, 10), first_step=9)
    tags = sent.run.data.tags
    starts = [tags[name] for name in sorted(tags) if name.startswith("dist_mem.start_")]
    assert [re.sub(r"(on \S+)?, 20[\d-]+ [\d:]+ UTC$", "", text) for text in starts] == [
        *(
            "from step 0, ",
            "from step 5, job 1234, restart 0, node[1-2]",
            "from step 9, job 1234, restart 1, node[3-4]",
        ),
    ]


# Ends

KILLED = """
import time
from pathlib import Path
from tests.tracking.conftest import Sent
from tests.support.tracked import config_for, start
from dist_mem.supervision.lease import Lease
lease = Lease(Path("run"))
tracker = start(config_for(sys.argv[1]), Path("run"))
tracker.log(1, {"loss": 1.0})
time.sleep(600)
"""


def test_a_job_killed_outright_is_no_longer_running_after_a_sync_or_its_next_start(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it lives, a sync leaves its status alone."""
    run_dir = sent.run_dir
    run_dir.mkdir()
    save_config(sent.config(), run_dir / "config.yaml")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{KILLED}", sent.uri]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)

    def status() -> str:
        return str(sent.run.info.status)

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
    tracker = sent.start(first_step=1)
    wait_until(lambda: status() == "RUNNING", "the next start")
    tracker.close("FINISHED")
    assert status() == "FINISHED"


# What names the run


@pytest.mark.parametrize("text", ["", "../../etc", "two words", "\x00\xff", "abc\ndef", "a" * 300, "of the variable"])
def test_invalid_run_id_is_refused_and_its_place_named(sent: Sent, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    config, run_dir, path = sent.config(), sent.run_dir, sent.run_dir / RUN_ID_FILE
    sent.start(tracking={"send": "never"}).close("KILLED")
    save_config(config, run_dir / "config.yaml")
    if text == "of the variable":
        monkeypatch.setenv("MLFLOW_RUN_ID", "runs:/my run")
    else:
        path.write_bytes(text.encode("latin-1"))
    is_written = path.exists()
    uses: list[Callable[[], object]] = [sent.start, partial(check_tracking, config, run_dir)]
    for use in [*uses, sent.send] if is_written else uses:
        with refused(UnusableError, path if is_written else "MLFLOW_RUN_ID"):
            use()
    assert path.exists() == is_written and sent.log.exists()
    assert not is_written or track_sync([run_dir]) == EXIT_USAGE
