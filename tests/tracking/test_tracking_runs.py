"""Which MLflow run a run directory belongs to, and what evaluations and syncs add to it."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import ConfigError, save_config
from dist_mem.errors import UnusableError
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import Entry, Header, new_uid, read_header, write_log
from dist_mem.tracking.mlflow.run import MlflowRun, target_of
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.mlflow.sync import log_to_run
from tests.support.messages import refused, said_line
from tests.support.tracked import config_for, job, steps, track_sync
from tests.tracking.conftest import Sent

# Which run


def test_a_run_deleted_while_the_job_runs_is_replaced_by_one_with_everything(sent: Sent) -> None:
    sent.job(steps(1, 1))
    first, sender = sent.run_id, sent.sender()
    sender.send()
    sent.client.delete_run(first)
    with sent.log.open("a") as file:
        file.write('{"kind": "point", "time": 9000000000000, "body": {"step": 2, "metrics": {"loss": 2.0}}}\n')
    with refused(Exception):  # the delivery thread calls again then
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
    threads = [threading.Thread(target=sender.send) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def test_files_of_a_run_that_had_another_log_are_sent_even_late(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run directory is deleted and begun again with the same MLFLOW_RUN_ID."""
    (tmp_path / "no_folder").write_text("in the way")
    experiment = sent.client.create_experiment("x", artifact_location=(tmp_path / "no_folder" / "files").as_uri())
    tags = {"dist_mem.uid": "another", "dist_mem.sent": "3", "dist_mem.sent_files": "3"}
    monkeypatch.setenv("MLFLOW_RUN_ID", sent.client.create_run(experiment, tags=tags).info.run_id)
    tracker = sent.start()
    tracker.log_text("later", "later.txt")
    tracker.close("FINISHED")
    (tmp_path / "no_folder").unlink()
    sent.send()
    assert sent.files() == ["later.txt"]


# Evaluations and syncs


def test_an_evaluation_adds_to_the_run_and_leaves_its_status(sent: Sent) -> None:
    report = sent.run_dir / "evaluations" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text("{}")
    given: dict[str, Any] = {"run_dir": sent.run_dir, "step": 9, "metrics": {"test/word_perplexity": 60.0}}
    complaint = log_to_run(sent.config().tracking, **given, files=[report])
    assert complaint is not None and "the run has recorded nothing" in complaint
    sent.job({})
    assert log_to_run(sent.config().tracking, **given, files=[report]) is None
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
    line = re.sub("MlflowException: .*", "MlflowException: ...", capsys.readouterr().err)
    said_line(1, line, f"error: {sent.run_dir}: ", "MlflowException")
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
    with refused(UnusableError):
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
