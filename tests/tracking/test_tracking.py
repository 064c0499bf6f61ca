"""What a run's MLflow run holds, after resumes and rollbacks too; over SQLite, without a server."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, Entry, read_header, read_points
from dist_mem.tracking.mlflow import sender as sender_module
from dist_mem.tracking.mlflow.run import NOTE_TAG, MlflowRun, Target, description
from dist_mem.tracking.mlflow.sender import Sender
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.mlflow.sync import send_log
from dist_mem.tracking.names import in_group, valid_name
from tests.support.faults import small_disk
from tests.support.limits import limit, wait_until
from tests.support.messages import refused
from tests.support.mlflow_server import points_of
from tests.support.paths import ROOT
from tests.support.tracked import config_for, history, job, nested_runs, start, steps

pytestmark = pytest.mark.servers

# Without MLflow


def test_without_mlflow_there_is_the_log_and_nothing_else_until_it_is_sent(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    config = config_for(sqlite_uri, tracking={"mlflow": False})
    job(config, tmp_path, steps(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]
    assert [point.step for point in read_points(tmp_path / METRICS_FILE)] == [1, 2]
    send_log(config.tracking, tmp_path, report=print)
    assert history(client, (tmp_path / RUN_ID_FILE).read_text().strip(), "loss") == [(1, 1.0), (2, 2.0)]


def test_what_is_logged_while_mlflow_is_switched_off_reaches_it_too(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and all; in the experiment of the first start that is tracked."""
    off = config_for(sqlite_uri, tracking={"mlflow": False})
    job(off, tmp_path, steps(1, 3))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named later")
    job(config_for(sqlite_uri), tmp_path, steps(3, 4), first_step=2)
    job(off, tmp_path, steps(5, 6), first_step=4)
    tracker = job(config_for(sqlite_uri), tmp_path, steps(7, 7), first_step=6)
    run = client.get_run(tracker.run_id)
    assert history(client, tracker.run_id, "loss") == list(steps(1, 7).items())
    assert client.get_experiment(run.info.experiment_id).name == "named later"
    assert "name" in run.data.params and "tracking.mlflow: False -> True" in run.data.tags.values()


TELEMETRY = """
from dist_mem.tracking.mlflow.client import import_mlflow_quietly
import_mlflow_quietly()
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None, "telemetry is on"
"""


def test_mlflow_sends_no_usage_figures_home(tmp_path: Path) -> None:
    """In a process of its own, because MLflow has no telemetry under pytest."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", TELEMETRY], env=environment, cwd=tmp_path, check=True, timeout=limit(120))
    assert not (tmp_path / ".config" / "mlflow").exists()


# What a run holds


def test_mlflow_gets_parameters_points_tags_data_files_and_the_end(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    config = config_for(sqlite_uri, data={"path": "x" * 600}, optimizer={"betas": [0.9, 0.95]})
    tracker = start(config, tmp_path)
    for step in range(1, 1501):
        tracker.log(step, {"loss": 1 / step, "lr": 0.1})
    tracker.log(1500, {"validation/word_perplexity": 50.0})
    (tmp_path / "config.yaml").write_text("name: demo\n")
    tracker.log_artifact("config.yaml")
    tracker.log_text("all good", "report.txt")
    tracker.log_tags({"mlflow.user": "ada"})
    tracker.log_datasets(
        [{"name": "x/train", "digest": "0" * 36, "source": "/x", "context": "training", "profile": {"tokens": 3}}]
    )
    before = time.time()
    tracker.close("FINISHED")
    run = client.get_run(tracker.run_id)
    assert (tmp_path / RUN_ID_FILE).read_text().strip() == tracker.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert run.info.start_time <= run.info.end_time - 1
    assert abs(run.info.end_time - before * 1000) < 1000
    differing = {"name", "tracking.uri", "tracking.system_metrics", "data.path", "optimizer.betas.1"}
    assert set(run.data.params) == differing
    assert run.data.params["optimizer.betas.1"] == "0.95"
    assert run.data.params["data.path"] == "x" * 500
    assert run.data.tags["mlflow.user"] == "ada"
    assert history(client, tracker.run_id, "loss") == [(step, 1 / step) for step in range(1, 1501)]
    assert history(client, tracker.run_id, "validation/word_perplexity") == [(1500, 50.0)]
    assert {file.path for file in client.list_artifacts(tracker.run_id)} == {"config.yaml", "report.txt"}
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest, dataset.tags[0].value) == ("x/train", "0" * 36, "training")
    assert json.loads(dataset.dataset.profile) == {"tokens": 3}


def test_pages_of_mlflow_have_the_results_in_a_table_pictures_in_a_folder_and_an_address(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = start(config_for(sqlite_uri), tmp_path)
    tracker.log(1, {"loss": 2.0, "lr": 0.1})
    tracker.log(1, {"validation/word_perplexity": 50.25})
    for name in ("evaluations/test.json", "figures/passage.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
        tracker.log_artifact(name)
    tracker.close("KILLED")
    run_id = str(tracker.run_id)
    note = client.get_run(run_id).data.tags[NOTE_TAG]
    assert f"[train/loss](#/metric?runs=%5B%22{run_id}%22%5D&" in note  # the address of its chart
    assert re.sub(r"\[(\S+)\]\(\S+\)", r"\1", note).splitlines()[2:] == [
        "| metric | value |",
        "|---|---|",
        "| train/loss | 2 |",
        "| eval/validation/word_perplexity | 50.25 |",
        "",
        "!passage",
    ]
    picture = f"![passage](get-artifact?path=plots%2Fpassage.png&run_uuid={run_id})"
    assert note.endswith(picture)
    job(config_for(sqlite_uri), tmp_path, steps(2, 2), first_step=1)
    assert client.get_run(run_id).data.tags[NOTE_TAG].endswith(picture), "a new table keeps the picture"
    folders = [file.path for name in ("evaluations", "plots") for file in client.list_artifacts(run_id, name)]
    assert folders == ["evaluations/test.json", "plots/passage.png"]
    page = f"/#/experiments/{client.get_run(run_id).info.experiment_id}/runs/{run_id}/model-metrics?workflowType="
    command = f"curves: mlflow ui --backend-store-uri {sqlite_uri}, then http://127.0.0.1:5000{page}"
    assert command in capsys.readouterr().err
    client.set_tag(run_id, NOTE_TAG, "Mine.")
    job(config_for(sqlite_uri), tmp_path, steps(3, 3), first_step=2)
    assert client.get_run(run_id).data.tags[NOTE_TAG] == "Mine."


def test_the_description_has_the_newest_picture_and_is_cut_between_metrics() -> None:
    page = {"experiment_id": "1", "run_id": "a"}
    metrics = {"train/loss": 2.0} | {f"eval/validation/{number:03}": 1.0 for number in range(100)}
    first = description(metrics, None, picture="plots/first.png", **page)
    assert first is not None and len(first) <= 5000 and first.endswith("?path=plots%2Ffirst.png&run_uuid=a)")
    *rows, empty, _ = first.splitlines()
    assert (rows[-1].endswith("| 1 |"), empty) == (True, "")
    second = description(metrics, first, picture="plots/second.png", **page)
    assert second is not None and second.count("get-artifact") == 1 and "plots%2Fsecond.png" in second
    assert description(metrics, second, **page) == second


def test_refused_entry_is_named_and_the_rest_arrives(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = start(config_for(sqlite_uri), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"no such name!": 1.0})
    tracker.log(3, {"loss": 3.0})
    tracker.log_artifact("missing.txt")
    tracker.log_text("there", "there.txt")
    tracker.close("FINISHED")
    assert history(client, tracker.run_id, "loss") == [(1, 1.0), (3, 3.0)]
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["there.txt"]
    printed = capsys.readouterr().err
    assert "MLflow refused missing.txt: " in printed and printed.count("MLflow refused") == 1
    assert client.get_run(tracker.run_id).data.metrics[valid_name(in_group("no such name!"))] == 1.0


def test_a_store_of_files_that_is_down_does_not_hold_back_the_points(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_folder").write_text("in the way")
    name = "files are down"
    client.create_experiment(name, artifact_location=(tmp_path / "no_folder" / "files").as_uri())
    tracker = start(config_for(sqlite_uri, tracking={"experiment": name}), tmp_path)
    tracker.log_text("later", "later.txt")
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
    assert history(client, run_id, "loss") == [(1, 1.0)]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert "dist-mem track sync" in capsys.readouterr().err
    (tmp_path / "no_folder").unlink()
    send_log(config_for(sqlite_uri).tracking, tmp_path, report=print)
    assert [file.path for file in client.list_artifacts(run_id)] == ["later.txt"]


def test_a_server_too_slow_for_a_large_request_gets_small_ones(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow is slow to find out what it has already: a request that came too late once would always do."""
    real, too_late = MlflowRun.send_points, []

    def send_points(self: MlflowRun, entries: Sequence[Entry], run_id: str) -> None:
        real(self, entries, run_id)
        if len(entries) > 20:
            too_late.append(len(entries))
            raise TimeoutError

    monkeypatch.setattr(MlflowRun, "send_points", send_points)
    monkeypatch.setattr(sender_module, "FLUSH_SECONDS", 0.0)
    job(config_for(sqlite_uri), tmp_path, steps(1, 300))
    sender = Sender(
        Target(sqlite_uri, tmp_path, read_header(tmp_path / METRICS_FILE)), tmp_path / METRICS_FILE, report=print
    )
    for _ in range(200):
        with suppress(TimeoutError):
            sender.send()
            break
    assert too_late
    assert history(client, sender.run.run_id, "loss") == list(steps(1, 300).items())


# Resumes and rollbacks


def test_an_exact_resume_has_every_step_once(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    """Killed at 7, restored at 5, so that 6 and 7 come again; twice."""
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 7))
    for last, status in ((9, "KILLED"), (12, "FINISHED")):
        resumed = job(
            config_for(sqlite_uri), tmp_path, steps(6, last), first_step=5, status=status, run_id="of the checkpoint"
        )
        assert resumed.run_id == tracker.run_id
    assert history(client, tracker.run_id, "loss") == [(step, float(step)) for step in range(1, 13)]
    assert len(history(client, tracker.run_id, "seconds")) == 12
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert not any("dist_mem.branch" in name for name in run.data.tags)


def test_a_rollback_to_another_branch_has_every_step_of_it_and_no_name_a_step_twice(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run and the one nested in it have what counts: no chart zigzags, and nothing is missing."""
    tracker = job(config_for(sqlite_uri), tmp_path, steps(1, 9))
    other = {step: step + 0.5 for step in range(6, 13)}
    job(config_for(sqlite_uri, train={"global_batch_size": 32}), tmp_path, other, first_step=5)
    run = client.get_run(tracker.run_id)
    assert "train.global_batch_size" not in run.data.params  # the default
    assert run.data.tags["dist_mem.changed_params.step_5"] == "train.global_batch_size: 16 -> 32"
    (nested,) = nested_runs(client, tracker.run_id)
    assert (nested.info.run_name, nested.info.status) == ("demo: steps 6 to 9 again", "FINISHED")
    says = run.data.tags["dist_mem.branch_2"]
    assert says.startswith("steps 6 to 9 logged before 20")
    assert says.endswith(f"count no more; those that do are in the nested run {nested.info.run_id}")
    printed = says.replace(nested.info.run_id, "'demo: steps 6 to 9 again'")
    assert f"MLflow cannot delete points: {printed}" in capsys.readouterr().err
    points, again = (points_of(client, str(run_id)) for run_id in (tracker.run_id, nested.info.run_id))
    for found in (points, again):
        assert max(Counter((name, step) for name, step, _, _ in found.elements()).values()) == 1
    assert history(client, tracker.run_id, "loss") == [*steps(1, 9).items(), (10, 10.5), (11, 11.5), (12, 12.5)]
    valid = [point for point in points if not 6 <= point[1] <= 9] + [*again]
    logged = [
        (in_group(name), point.step, round(point.time * 1000), value)
        for point in read_points(tmp_path / METRICS_FILE)
        for name, value in point.metrics.items()
    ]
    for (name, step, sent, value), (*kept, kept_time, kept_value) in zip(sorted(valid), sorted(logged), strict=True):
        assert ([name, step], value) == (kept, kept_value)
        assert sent == kept_time


def test_branch_continues_after_crashes_and_ends_where_mlflow_has_no_older_point(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    """The job of the second branch dies, its third start repeats its points and continues; then a third branch."""
    config = config_for(sqlite_uri)
    run_id = job(config, tmp_path, steps(1, 9)).run_id
    job(config, tmp_path, {6: 6.5, 7: 7.5}, first_step=5)
    job(config, tmp_path, {7: 7.5, 8: 8.5}, first_step=6)
    second = nested_runs(client, run_id)[0].info.run_id
    assert history(client, second, "loss") == [(6, 6.5), (7, 7.5), (8, 8.5)]
    job(config, tmp_path, {step: step + 0.75 for step in range(8, 12)}, first_step=7)
    assert [run.info.run_id for run in nested_runs(client, run_id)][:1] == [second]
    assert history(client, second, "loss") == [(6, 6.5), (7, 7.5), (8, 8.5)]
    assert history(client, nested_runs(client, run_id)[1].info.run_id, "loss") == [(8, 8.75), (9, 9.75)]
    assert history(client, run_id, "loss") == [*steps(1, 9).items(), (10, 10.75), (11, 11.75)]


def test_what_mlflow_has_of_before_a_rollback_is_known_to_whoever_sends_the_rest(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    """Of nine steps it got four; a sync sends a piece of the rest, and another sync, from a new client, the others."""
    config, down = config_for(sqlite_uri), config_for(f"http://127.0.0.1:{free_port()}")
    run_id = job(config, tmp_path, steps(1, 4)).run_id
    job(down, tmp_path, steps(5, 9), first_step=4)
    job(down, tmp_path, {step: step + 0.5 for step in range(3, 12)}, first_step=2)
    log = tmp_path / METRICS_FILE
    for size in (1, 2, 3, 100):  # as if it was killed in between
        sender = Sender(Target(sqlite_uri, tmp_path, read_header(log)), log, report=print)
        sender._batch_size = size
        send_tags = failing_after(MlflowRun.send_tags, 9 if size < 100 else 10**9)
        with patch.object(MlflowRun, "send_tags", send_tags), suppress(ConnectionError):
            sender.send()
    (nested,) = nested_runs(client, run_id)
    assert history(client, nested.info.run_id, "loss") == [(3, 3.5), (4, 4.5)]
    assert history(client, run_id, "loss") == [*steps(1, 4).items(), *((step, step + 0.5) for step in range(5, 12))]


def test_a_server_that_fails_where_a_nested_run_is_made_gets_it_later(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the job runs: its points of the steps that MLflow has never go to the run itself."""
    run_id = job(config_for(sqlite_uri), tmp_path, steps(1, 6)).run_id
    real, lost = type(client).create_run, [True]

    def create_run(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        if lost.pop():
            lost.append(False)
            raise ConnectionError("the answer is lost")
        lost.append(False)
        return made

    log = tmp_path / METRICS_FILE
    sender = Sender(Target(sqlite_uri, tmp_path, read_header(log)), log, report=print)
    sender.send()
    job(config_for(sqlite_uri, tracking={"send": "never"}), tmp_path, {5: 5.5, 6: 6.5, 7: 7.5}, first_step=4)
    monkeypatch.setattr(type(client), "create_run", create_run)
    with pytest.raises(ConnectionError):
        sender.send()
    sender.send()
    (nested,) = nested_runs(client, run_id)
    assert history(client, nested.info.run_id, "loss") == [(5, 5.5), (6, 6.5)]
    assert history(client, run_id, "loss") == [*steps(1, 6).items(), (7, 7.5)]


def failing_after(method: Callable[..., None], times: int) -> Callable[..., None]:
    """The method, which a dead network keeps from being called more often."""
    calls = itertools.count()

    def send(*arguments: Any) -> None:
        if next(calls) >= times:
            raise ConnectionError
        method(*arguments)

    return send


def test_point_superseded_before_it_was_sent_is_never_sent(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    """So that MLflow's curve is that of metrics.jsonl; also in the run made after its user deleted one with both."""
    down = config_for(f"http://127.0.0.1:{free_port()}")
    job(down, tmp_path, steps(1, 9))
    job(down, tmp_path, {step: step + 0.5 for step in range(6, 9)}, first_step=5)
    for _ in range(2):
        send_log(config_for(sqlite_uri).tracking, tmp_path, report=print)
        run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
        assert history(client, run_id, "loss") == [*steps(1, 5).items(), (6, 6.5), (7, 7.5), (8, 8.5)]
        client.delete_run(run_id)


def test_a_rollback_to_other_steps_loses_none_of_them_before_they_are_sent(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    """With another tracking.every, the first steps contradict nothing that was logged before."""
    down = config_for(f"http://127.0.0.1:{free_port()}")
    job(down, tmp_path, {10: 1.0, 20: 2.0, 30: 3.0})
    tracker = start(down, tmp_path, first_step=10)
    for step, loss in {15: 1.5, 20: 2.5, 25: 2.6}.items():
        tracker.log(step, {"loss": loss})
        now = time.time_ns()
        wait_until(lambda logged=now: time.time_ns() > logged + 2_000_000, "another time: a log counts milliseconds")
    tracker.close("KILLED")
    send_log(config_for(sqlite_uri).tracking, tmp_path, report=print)
    run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
    assert history(client, run_id, "loss") == [(10, 1.0), (15, 1.5), (20, 2.5), (25, 2.6)]


def test_disk_that_is_full_at_the_end_is_reported_and_raises_nothing(
    sqlite_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "size=100k") as disk:
        tracker = start(config_for(sqlite_uri), disk / "run")
        with suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with refused(OSError):
            for step in range(1, 1000):
                tracker.log(step, {"loss": 1.0})
        with refused(OSError):
            for _ in range(100):
                tracker.log_tags({"a": "x" * 100})
        tracker.close("FAILED")
        assert "it does not say that the job is FAILED, nor will MLflow" in capsys.readouterr().err


def test_system_metrics_count_on_over_resumes_and_are_no_points_of_the_training(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    config = config_for(sqlite_uri, tracking={"system_metrics": True})
    for least in (2, 4):
        tracker = start(config, tmp_path)
        wait_until(lambda: (tmp_path / METRICS_FILE).read_text().count("system/cpu_util") >= least, "samples")  # noqa: B023
        tracker.close("KILLED")
    counted = [step for step, _ in history(client, tracker.run_id, "system/cpu_utilization_percentage")]
    assert counted == list(range(len(counted))) and len(counted) >= 4
    assert read_points(tmp_path / METRICS_FILE) == []
