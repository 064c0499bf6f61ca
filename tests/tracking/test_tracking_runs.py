"""Which MLflow run a run directory belongs to, what evaluations and syncs add to it, and jobs that only keep a log."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import environment_variables
from mlflow.environment_variables import _EnvironmentVariable as Variable

from dist_mem.config import ConfigError, save_config
from dist_mem.errors import EXIT_DONE, EXIT_USAGE, UnusableError
from dist_mem.runtime.file_systems import file_system_of, is_network_file_system
from dist_mem.runtime.network_interface import free_port
from dist_mem.supervision import lease
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, new_uid, read_header, write_log
from dist_mem.tracking.mlflow import store
from dist_mem.tracking.mlflow.run import MlflowRun, target_of
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, check_tracking, choose_sending
from dist_mem.tracking.mlflow.sync import log_to_run
from tests.support.faults import small_disk
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said_line
from tests.support.mlflow_server import points_of
from tests.support.paths import ROOT
from tests.support.tracked import Sent, config_for, job, start, steps, track_sync

# Which run


def test_a_run_deleted_while_the_job_runs_is_replaced_by_one_with_everything(sent: Sent) -> None:
    sent.job(steps(1, 1))
    first, sender = sent.run_id, sent.sender()
    sender.send()
    sent.client.delete_run(first)
    with sent.log.open("a") as file:
        file.write('{"kind": "point", "time": 9000000000000, "body": {"step": 2, "metrics": {"loss": 2.0}}}\n')
    with refused(Exception, "MlflowException", "deleted"):  # the delivery thread calls again then
        sender.send()
    sender.send()
    assert first != sent.run_id == sender.run.run_id
    assert sent.losses() == steps(1, 2)


def test_run_with_an_unrecorded_id_is_found_again(sent: Sent) -> None:
    """Its answer was lost, or the job was killed before it wrote the file."""
    first = sent.job(steps(1, 3)).run_id
    (sent.run_dir / RUN_ID_FILE).unlink()
    sent.job(steps(4, 4), first_step=3)
    assert sent.run_id == first and sent.losses() == steps(1, 4)


def test_threads_that_ask_at_once_make_one_run(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ended before MLflow answered leaves its thread; another job of the directory begins."""
    sent.run_dir.mkdir()
    write_log(sent.log, Header(new_uid(), "demo", {"name": "dist_mem"}))
    search = type(sent.client).search_runs

    def slow_search(*arguments: Any, **options: Any) -> Any:
        found = search(*arguments, **options)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(type(sent.client), "search_runs", slow_search)
    senders = [sent.sender() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda sender: sender.send(), senders))
    assert senders[0].run.run_id == senders[1].run.run_id


def test_run_of_the_environment_is_continued(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sent.client.create_run(sent.client.create_experiment("a wrapper's"), tags={"mine": "kept"}).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", made)
    assert sent.job(steps(1, 2)).run_id == made == sent.run_id
    assert sent.run.data.tags["mine"] == "kept"
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    assert sent.job(steps(3, 3), first_step=2).run_id == made
    assert capsys.readouterr().err.count(f"MLFLOW_RUN_ID is {'0' * 32}, but") == 1


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_the_experiment_of_the_environment_is_used_unless_the_configuration_names_one(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    experiment_id = sent.client.create_experiment(variable)
    monkeypatch.setenv(variable, experiment_id if variable.endswith("ID") else variable)
    sent.job(steps(1, 1))
    assert sent.run.info.experiment_id == experiment_id
    named = sent._replace(run_dir=tmp_path / "configuration")
    named.job(steps(1, 1), tracking={"experiment": "dist_mem"})
    assert named.run.info.experiment_id == sent.client.get_experiment_by_name("dist_mem").experiment_id


def test_missing_experiment_can_be_corrected_at_the_next_start(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "999")
    assert sent.job(steps(1, 1)).run_id is None
    assert "there is no experiment with the id '999'" in capsys.readouterr().err
    sent.job(steps(2, 2), first_step=1, tracking={"experiment": "mended"})
    assert sent.losses() == steps(1, 2)


def test_credentials_in_the_address_are_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a job nor by a sync that fails."""
    config = config_for(f"http://ada:secret@127.0.0.1:{free_port()}")
    save_config(config, tmp_path / "config.yaml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.tracking.uri)
    job(config, tmp_path, steps(1, 1))
    printed = ["".join(capsys.readouterr())]
    assert track_sync([tmp_path]) == 1
    for text in [*printed, "".join(capsys.readouterr())]:
        assert "http://127.0.0.1:" in text and "secret" not in text and "ada" not in text


@pytest.mark.parametrize("named_by", ["the file", "MLFLOW_RUN_ID"])
def test_a_run_of_another_log_gets_nothing(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named_by: str
) -> None:
    """At every start, sync and evaluation; nothing is lost, and the remedy works."""
    theirs, path = sent._replace(run_dir=sent.run_dir.with_name("theirs")), sent.run_dir / RUN_ID_FILE
    theirs.job(steps(1, 3))
    before, tags = points_of(sent.client, theirs.run_id), theirs.run.data.tags
    sent.job(steps(1, 2), tracking={"send": "never"})
    save_config(sent.config(), sent.run_dir / "config.yaml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sent.uri)
    if named_by == "the file":
        path.write_text(f"{theirs.run_id}\n")
    else:
        monkeypatch.setenv("MLFLOW_RUN_ID", theirs.run_id)
    with refused(UnusableError, theirs.run_id, path if named_by == "the file" else "unset MLFLOW_RUN_ID"):
        check_tracking(sent.config().tracking, sent.run_dir)
    sent.job(steps(3, 3), first_step=2)  # without a preflight, it trains on
    assert "nothing waits for it" in capsys.readouterr().err
    evaluation: dict[str, Any] = {"run_dir": sent.run_dir, "step": 3, "metrics": {"test/nll": 1.0}, "files": []}
    for use in (sent.send, partial(log_to_run, sent.config().tracking, **evaluation)):
        with refused(UnusableError, theirs.run_id, path):
            use()
    assert track_sync([sent.run_dir]) == EXIT_USAGE
    assert points_of(sent.client, theirs.run_id) == before and theirs.run.data.tags == tags
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    path.unlink()
    assert track_sync([sent.run_dir]) == EXIT_DONE
    assert sent.losses() == steps(1, 3) and sent.losses(name="test/nll") == {3: 1.0}


def test_a_run_without_a_log_belongs_to_whoever_is_named_by_the_user(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file alone may name anybody's run, as one that another program has made."""
    theirs = sent.client.create_run("0", tags={"mine": "kept"}).info.run_id
    sent.job(steps(1, 2), tracking={"send": "never"})
    (sent.run_dir / RUN_ID_FILE).write_text(f"{theirs}\n")
    for use in (sent.send, partial(check_tracking, sent.config().tracking, sent.run_dir)):
        with refused(UnusableError, f"MLFLOW_RUN_ID={theirs}", sent.run_dir / RUN_ID_FILE):
            use()
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
    sent.send()
    monkeypatch.delenv("MLFLOW_RUN_ID")
    sent.job(steps(3, 3), first_step=2)
    assert sent.run_id == theirs and sent.losses() == steps(1, 3) and sent.run.data.tags["mine"] == "kept"


# Evaluations and syncs


def test_an_evaluation_adds_to_the_run_and_leaves_its_status(sent: Sent) -> None:
    report = sent.run_dir / "evaluations" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text("{}")
    given: dict[str, Any] = {"run_dir": sent.run_dir, "step": 9, "metrics": {"test/word_perplexity": 60.0}}
    complaint = log_to_run(sent.config().tracking, **given, files=[report])
    assert complaint is not None and "the run has recorded nothing" in complaint
    sent.job({})
    named = [f"tracking.uri={sent.uri}"]
    assert log_to_run(sent.config().tracking, **given, files=[report], overrides=named) is None
    assert sent.losses(name="test/word_perplexity") == {9: 60.0}
    assert sent.files("evaluations") == ["evaluations/report.json"]
    assert sent.run.info.status == "KILLED"
    assert not [*(sent.run_dir / "mlflow").iterdir()]


def test_a_sync_sends_a_run_to_another_store_whole_and_once(sent: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(f"http://127.0.0.1:{free_port()}")
    save_config(config, sent.run_dir / "config.yaml")
    job(config, sent.run_dir, steps(1, 3), status="FINISHED")
    figures = {"test/nll": 2.0}
    assert log_to_run(config.tracking, run_dir=sent.run_dir, step=3, metrics=figures, files=[]) is not None
    assert track_sync([sent.run_dir], [f"tracking.uri={config.tracking.uri}"]) == 1
    said_line(capsys.readouterr().err, f"error: {sent.run_dir}: ", "MlflowException")
    for _ in range(2):
        assert track_sync([sent.run_dir], [f"tracking.uri={sent.uri}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "entries sent; MLflow has everything" in said[1] and said[-1].endswith("MLflow has everything already")
    assert (sent.losses(), sent.losses(name="test/nll")) == (steps(1, 3), {3: 2.0})
    assert sent.run.info.status == "FINISHED"


def test_sync_refuses_other_folders_and_unknown_keys(tmp_path: Path) -> None:
    with refused(UnusableError, "config.yaml"):
        track_sync([tmp_path])
    with refused(ConfigError, "tracking.ury"):
        track_sync([tmp_path], ["tracking.ury=x"])
    with refused(UnusableError, "give the directories"):
        track_sync([])


def test_parameters_that_another_job_of_the_run_has_sent_meanwhile_are_no_refusal(sent: Sent) -> None:
    """A suspended job and the one that took its run directory over may send them at once."""
    sent.job(steps(1, 2))
    run = MlflowRun(target_of(sent.config().tracking, sent.run_dir, read_header(sent.log)), report=print)
    run.open(None)
    sent.client.log_param(sent.run_id, "sent", "by another job")
    params = {"sent": "by this one", "new": "too"}
    run.send(Entry("params", 0, {"params": params, "changes": "", "step": 2}))
    found = sent.run.data.params
    assert {name: found[name] for name in params} == {"sent": "by another job", "new": "too"}


@pytest.fixture
def array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of a Slurm array."""
    set_slurm(monkeypatch, JOB_ID="1235", JOB_NODELIST="node[1-2]", ARRAY_JOB_ID="1234", ARRAY_TASK_ID="3")


def set_slurm(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


# Jobs that only keep a log, because SQLite would break: when


FILE = "sqlite:///mlflow.db"


@pytest.mark.parametrize(
    ("uri", "kind", "send", "is_on"),
    [
        *((FILE, "ext4", "auto", True), (FILE, "ext4", "never", False)),
        *((FILE, "nfs4", "auto", False), (FILE, "nfs4", "always", True), (FILE, "fuse.sshfs", "auto", False)),
        ("sqlite:////shared/mlflow.db", "lustre", "auto", False),
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


def test_variables_of_mlflow_that_are_set_to_empty_are_as_if_unset(sent: Sent, tmp_path: Path) -> None:
    """All of them: MLflow reads most as numbers or booleans."""
    names = [found.name for found in vars(environment_variables).values() if isinstance(found, Variable)]
    empty = dict.fromkeys((name for name in names if name.startswith("MLFLOW_")), "")
    assert len(empty) > 100
    sent.job(steps(1, 3), tracking={"send": "never"})
    save_config(sent.config(), sent.run_dir / "config.yaml")
    command = [sys.executable, "-m", "dist_mem", "track", "sync", str(sent.run_dir), f"tracking.uri={sent.uri}"]
    environment = {**os.environ, **empty, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=limit(120))
    assert sent.losses() == steps(1, 3)


def test_every_start_is_remembered_with_its_job(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    sent.job(steps(1, 5))
    set_slurm(monkeypatch, JOB_ID="1234", JOB_NODELIST="node[1-2]")
    sent.job(steps(6, 9), first_step=5)
    set_slurm(monkeypatch, RESTART_COUNT="1", JOB_NODELIST="node[3-4]")
    sent.job(steps(10, 10), first_step=9)
    tags = sent.run.data.tags
    starts = [tags[name] for name in sorted(tags) if name.startswith("dist_mem.start_")]
    assert [re.sub(r"(on \S+)?, 20[\d-]+ [\d:]+ UTC$", "", text) for text in starts] == [
        "from step 0, ",
        "from step 5, job 1234, restart 0, node[1-2]",
        "from step 9, job 1234, restart 1, node[3-4]",
    ]


# Ends

KILLED = """
import time
from pathlib import Path
from tests.support.tracked import Sent, config_for, start
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
        assert track_sync([run_dir], [f"tracking.uri={sent.uri}"]) == EXIT_DONE
        assert status() == "RUNNING"
    finally:
        process.kill()
        process.wait()
    monkeypatch.setattr(lease, "STALE_SECONDS", 1.0)
    assert track_sync([run_dir], [f"tracking.uri={sent.uri}"]) == EXIT_DONE
    assert status() == "KILLED"
    assert "its job was killed outright" in capsys.readouterr().out
    tracker = sent.start(first_step=1)
    wait_until(lambda: status() == "RUNNING", "the next start")
    tracker.close("FINISHED")
    assert status() == "FINISHED"


def test_disk_that_is_full_at_the_end_is_reported_and_raises_nothing(
    sqlite_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "size=100k") as disk:
        tracker = start(config_for(sqlite_uri), disk / "run")
        with suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with refused(OSError, disk / "run" / METRICS_FILE):
            for step in range(1, 1000):
                tracker.log(step, {"loss": 1.0})
        with refused(OSError, "[Errno 28]", METRICS_FILE):
            for _ in range(100):
                tracker.log_tags({"a": "x" * 100})
        tracker.close("FAILED")
        assert "it does not say that the job is FAILED, nor will MLflow" in capsys.readouterr().err


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
    uses: list[Callable[[], object]] = [sent.start, partial(check_tracking, config.tracking, run_dir)]
    for use in [*uses, sent.send] if is_written else uses:
        with refused(UnusableError, path if is_written else "MLFLOW_RUN_ID"):
            use()
    assert path.exists() == is_written and sent.log.exists()
    assert not is_written or track_sync([run_dir], [f"tracking.uri={sent.uri}"]) == EXIT_USAGE
