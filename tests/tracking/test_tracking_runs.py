"""Which MLflow run a run directory belongs to, and what evaluations and syncs add to it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError, save_config
from dist_mem.errors import UnusableError
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, new_uid, read_header, write_log
from dist_mem.tracking.mlflow.run import MlflowRun, Target, target_of
from dist_mem.tracking.mlflow.sender import Sender
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.mlflow.sync import log_to_run, send_log
from tests.support.messages import refused
from tests.support.tracked import config_for, history, job, start, steps, track_sync

# Which run


def test_a_deleted_run_is_replaced_by_one_with_everything(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 1))
    client.delete_run(tracker.run_id)
    resumed = job(config_for(sqlite_uri), tmp_path, steps(2, 2), first_step=1)
    assert resumed.run_id != tracker.run_id
    assert history(client, resumed.run_id, "loss") == [(1, 1.0), (2, 2.0)]
    assert f"has no run {tracker.run_id}: creating a new one" in capsys.readouterr().err


def test_a_run_deleted_while_the_job_runs_is_replaced_too(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    log = tmp_path / METRICS_FILE
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 1))
    target = Target(sqlite_uri, tmp_path, read_header(log))
    sender = Sender(target, log, report=print)
    sender.send()
    client.delete_run(tracker.run_id)
    with log.open("a") as file:
        file.write('{"kind": "point", "time": 9000000000000, "body": {"step": 2, "metrics": {"loss": 2.0}}}\n')
    with refused(Exception):  # the delivery thread calls again then
        sender.send()
    sender.send()
    assert sender.run.run_id != tracker.run_id
    assert history(client, sender.run.run_id, "loss") == [(1, 1.0), (2, 2.0)]


def test_run_with_an_unrecorded_id_is_found_again(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    """Its answer was lost, or the job was killed before it wrote the file."""
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 3))
    (tmp_path / RUN_ID_FILE).unlink()
    resumed = job(config_for(sqlite_uri), tmp_path, steps(4, 4), first_step=3)
    assert resumed.run_id == tracker.run_id
    assert history(client, resumed.run_id, "loss") == [(step, float(step)) for step in range(1, 5)]


def test_threads_that_ask_at_once_make_one_run(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ended before MLflow answered leaves its thread; another job of the directory begins."""
    log = tmp_path / METRICS_FILE
    write_log(log, Header(new_uid(), "demo", {"name": "dist_mem"}))
    target = Target(sqlite_uri, tmp_path, read_header(log))
    search = type(client).search_runs

    def slow_search(*arguments: Any, **options: Any) -> Any:
        found = search(*arguments, **options)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(type(client), "search_runs", slow_search)
    senders = [Sender(target, log, report=print) for _ in range(2)]
    threads = [threading.Thread(target=sender.send) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert senders[0].run.run_id == senders[1].run.run_id


def test_run_of_the_environment_is_continued(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = client.create_run(client.create_experiment("a wrapper's"), tags={"mine": "kept"})
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 2))
    assert tracker.run_id == made.info.run_id
    assert client.get_run(made.info.run_id).data.tags["mine"] == "kept"
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    assert job(config_for(sqlite_uri), tmp_path, steps(3, 3), first_step=2).run_id == made.info.run_id
    assert capsys.readouterr().err.count(f"MLFLOW_RUN_ID is {'0' * 32}, but") == 1


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_the_experiment_of_the_environment_is_used_unless_the_configuration_names_one(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    experiment_id = client.create_experiment(variable)
    monkeypatch.setenv(variable, experiment_id if variable.endswith("ID") else variable)
    run_id = job(config_for(sqlite_uri), tmp_path / "environment", steps(1, 1)).run_id
    assert client.get_run(run_id).info.experiment_id == experiment_id
    config = config_for(sqlite_uri, tracking={"experiment": "dist_mem"})
    run_id = job(config, tmp_path / "configuration", steps(1, 1)).run_id
    assert client.get_run(run_id).info.experiment_id == client.get_experiment_by_name("dist_mem").experiment_id


def test_missing_experiment_can_be_corrected_at_the_next_start(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "999")
    assert job(config_for(sqlite_uri), tmp_path, steps(1, 1)).run_id is None
    assert "there is no experiment with the id '999'" in capsys.readouterr().err
    tracker = job(config_for(sqlite_uri, tracking={"experiment": "mended"}), tmp_path, steps(2, 2), first_step=1)
    assert history(client, tracker.run_id, "loss") == [(1, 1.0), (2, 2.0)]


def test_credentials_in_the_address_are_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(config_for(f"http://ada:secret@127.0.0.1:{free_port()}"), tmp_path, steps(1, 1))
    printed = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:" in printed and "secret" not in printed and "ada" not in printed


def test_nor_by_a_sync_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(f"http://ada:secret@127.0.0.1:{free_port()}")
    save_config(config, tmp_path / "config.yaml")
    job(config, tmp_path, steps(1, 1))
    capsys.readouterr()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.tracking.uri)
    assert track_sync([tmp_path]) == 1
    printed = "".join(capsys.readouterr())
    assert "http://127.0.0.1:" in printed and "secret" not in printed and "ada" not in printed


def test_files_of_a_run_that_had_another_log_are_sent_even_late(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run directory is deleted and begun again with the same MLFLOW_RUN_ID."""
    (tmp_path / "no_folder").write_text("in the way")
    experiment = client.create_experiment("x", artifact_location=(tmp_path / "no_folder" / "files").as_uri())
    tags = {"dist_mem.uid": "another", "dist_mem.sent": "3", "dist_mem.sent_files": "3"}
    run_id = client.create_run(experiment, tags=tags).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    tracker = start(config_for(sqlite_uri), tmp_path / "run")
    tracker.log_text("later", "later.txt")
    tracker.close("FINISHED")
    (tmp_path / "no_folder").unlink()
    send_log(config_for(sqlite_uri).tracking, tmp_path / "run", report=print)
    assert [file.path for file in client.list_artifacts(run_id)] == ["later.txt"]


# Evaluations and syncs


def test_an_evaluation_adds_to_the_run_and_leaves_its_status(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    config = config_for(sqlite_uri)
    report = tmp_path / "evaluations" / "report.json"
    report.parent.mkdir()
    report.write_text("{}")
    figures = {"test/word_perplexity": 60.0}
    complaint = log_to_run(config.tracking, run_dir=tmp_path, step=9, metrics=figures, files=[report])
    assert complaint is not None and "the run has recorded nothing" in complaint
    tracker = job(config, tmp_path, {})
    assert log_to_run(config.tracking, run_dir=tmp_path, step=9, metrics=figures, files=[report]) is None
    assert history(client, tracker.run_id, "test/word_perplexity") == [(9, 60.0)]
    assert [file.path for file in client.list_artifacts(tracker.run_id, "evaluations")] == ["evaluations/report.json"]
    assert client.get_run(tracker.run_id).info.status == "KILLED"
    assert not [*(tmp_path / "mlflow").iterdir()]


def test_a_sync_sends_a_run_to_another_store_whole_and_once(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    config = config_for(f"http://127.0.0.1:{free_port()}")
    save_config(config, run_dir / "config.yaml")
    tracker = start(config, run_dir)
    for step, loss in steps(1, 3).items():
        tracker.log(step, {"loss": loss})
    tracker.close("FINISHED")
    assert log_to_run(config.tracking, run_dir=run_dir, step=3, metrics={"test/nll": 2.0}, files=[]) is not None
    assert track_sync([run_dir], [f"tracking.uri={config.tracking.uri}"]) == 1
    assert "MLflow does not have everything" in capsys.readouterr().err
    for _ in range(2):
        assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "entries sent; MLflow has everything" in said[1] and said[-1].endswith("MLflow has everything already")
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert history(client, run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert history(client, run_id, "test/nll") == [(3, 2.0)]
    assert client.get_run(run_id).info.status == "FINISHED"


def test_sync_refuses_other_folders_and_unknown_keys(tmp_path: Path) -> None:
    with refused(UnusableError, "config.yaml"):
        track_sync([tmp_path])
    with refused(ConfigError, "tracking.ury"):
        track_sync([tmp_path], ["tracking.ury=x"])
    with refused(UnusableError):
        track_sync([])


def test_parameters_that_another_job_of_the_run_has_sent_meanwhile_are_no_refusal(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    """A suspended job and the one that took its run directory over may send them at once."""
    config = config_for(sqlite_uri)
    run_id = job(config, tmp_path, steps(1, 2)).run_id
    run = MlflowRun(target_of(config.tracking, tmp_path, read_header(tmp_path / METRICS_FILE)), report=print)
    run.open(None)
    client.log_param(run_id, "sent", "by another job")
    params = {"sent": "by this one", "new": "too"}
    run.send(Entry("params", 0, {"params": params, "changes": "", "step": 2}))
    found = client.get_run(run_id).data
    assert {name: found.params[name] for name in params} == {"sent": "by another job", "new": "too"}
