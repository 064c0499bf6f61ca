"""What a run's MLflow run holds, after resumes and rollbacks too; over SQLite, without a server."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from mlflow.exceptions import MlflowException
from sqlalchemy import Engine, event
from sqlalchemy.exc import InternalError

from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, Entry, find_entries, read_points
from dist_mem.tracking.mlflow import sender as sender_module
from dist_mem.tracking.mlflow.client import is_refusal
from dist_mem.tracking.mlflow.run import MlflowRun
from dist_mem.tracking.mlflow.sync import log_to_run
from dist_mem.tracking.names import in_group, valid_name
from tests.support.limits import wait_until
from tests.support.mlflow_server import points_of
from tests.support.tracked import Sent, config_for, nested_runs, start, steps

pytestmark = pytest.mark.servers


def test_what_is_logged_while_mlflow_is_switched_off_reaches_it_too(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and all; in the experiment of the first start that is tracked."""
    off: dict[str, Any] = {"tracking": {"mlflow": False}}
    sent.job(steps(1, 3), **off)
    assert [path.name for path in sent.run_dir.iterdir()] == [METRICS_FILE]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named later")
    sent.job(steps(3, 4), first_step=2)
    sent.job(steps(5, 6), first_step=4, **off)
    sent.job(steps(7, 7), first_step=6)
    assert sent.losses() == steps(1, 7)
    assert sent.client.get_experiment(sent.run.info.experiment_id).name == "named later"
    assert "name" in sent.run.data.params and "tracking.mlflow: False -> True" in sent.run.data.tags.values()


# What a run holds


def test_mlflow_gets_parameters_points_tags_data_files_and_the_end(sent: Sent) -> None:
    tracker = sent.start(data={"path": "x" * 600}, optimizer={"betas": [0.9, 0.95]})
    for step in range(1, 1501):
        tracker.log(step, {"loss": 1 / step, "lr": 0.1})
    tracker.log(1500, {"validation/word_perplexity": 50.0})
    (sent.run_dir / "config.yaml").write_text("name: demo\n")
    tracker.log_artifact("config.yaml")
    tracker.log_text("all good", "report.txt")
    tracker.log_tags({"mlflow.user": "ada"})
    tracker.log_datasets(
        [{"name": "x/train", "digest": "0" * 36, "source": "/x", "context": "training", "profile": {"tokens": 3}}]
    )
    before = time.time()
    tracker.close("FINISHED")
    run = sent.run
    assert sent.run_id == tracker.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert run.info.start_time <= run.info.end_time - 1
    assert abs(run.info.end_time - before * 1000) < 1000
    differing = {"name", "memory.kind", "tracking.uri", "tracking.system_metrics", "data.path", "optimizer.betas.1"}
    assert set(run.data.params) == differing
    assert (run.data.params["optimizer.betas.1"], run.data.params["data.path"]) == ("0.95", "x" * 500)
    assert run.data.tags["mlflow.user"] == "ada"
    assert sent.losses() == {step: 1 / step for step in range(1, 1501)}
    assert sent.losses(name="validation/word_perplexity") == {1500: 50.0}
    assert sent.files() == ["config.yaml", "report.txt"]
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest, dataset.tags[0].value) == ("x/train", "0" * 36, "training")
    assert json.loads(dataset.dataset.profile) == {"tokens": 3}


def test_pictures_and_evaluations_have_folders_and_the_end_says_where_the_run_is(
    sent: Sent, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = sent.start()
    tracker.log(1, {"loss": 2.0})
    for name in ("evaluations/test.json", "figures/passage.png"):
        (sent.run_dir / name).parent.mkdir()
        (sent.run_dir / name).touch()
        tracker.log_artifact(name)
    tracker.close("KILLED")
    assert sent.files("evaluations") + sent.files("plots") == ["evaluations/test.json", "plots/passage.png"]
    page = f"http://127.0.0.1:5000/#/experiments/{sent.run.info.experiment_id}/runs/{sent.run_id}"
    assert f"MLflow: mlflow ui --backend-store-uri {sent.uri}, then {page}\n" in capsys.readouterr().err


def test_refused_entry_is_named_and_the_rest_arrives(sent: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = sent.start()
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"no such name!": 1.0})
    tracker.log(3, {"loss": 3.0})
    tracker.log_artifact("missing.txt")
    tracker.log_text("there", "there.txt")
    tracker.close("FINISHED")
    assert sent.losses() == {1: 1.0, 3: 3.0} and sent.files() == ["there.txt"]
    printed = capsys.readouterr().err
    assert "MLflow refused missing.txt: " in printed and printed.count("MLflow refused") == 1
    assert sent.run.data.metrics[valid_name(in_group("no such name!"))] == 1.0


def test_a_store_that_takes_no_writing_for_a_time_gets_everything_later(sent: Sent) -> None:
    """MLflow reports a PostgreSQL that is read-only after a failover as a bad value, status 400; reads work."""
    sent.job_alone(steps(1, 2))
    sent.send()
    sent.job_alone(steps(3, 5), first_step=3)

    def refuse(connection: Any, cursor: Any, statement: str, *arguments: Any) -> None:
        if not statement.startswith(("SELECT", "PRAGMA")):
            raise InternalError(statement, None, Exception("cannot execute it in a read-only transaction"))

    event.listen(Engine, "before_cursor_execute", refuse)
    try:
        with pytest.raises(MlflowException, match="read-only") as caught:
            sent.send()
    finally:
        event.remove(Engine, "before_cursor_execute", refuse)
    assert is_refusal(caught.value)
    sent.send()
    assert sent.losses() == steps(1, 5)
    assert sent.run.info.status == find_entries(sent.log, "status")[-1].body["status"]


def test_a_store_of_files_that_is_down_does_not_hold_back_the_points(
    sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_folder").write_text("in the way")
    name = "files are down"
    sent.client.create_experiment(name, artifact_location=(tmp_path / "no_folder" / "files").as_uri())
    tracker = sent.start(tracking={"experiment": name})
    tracker.log_text("later", "later.txt")
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    assert (sent.losses(), sent.run.info.status) == ({1: 1.0}, "FINISHED")
    assert "dist-mem track sync" in capsys.readouterr().err
    (tmp_path / "no_folder").unlink()
    sent.send()
    assert sent.files() == ["later.txt"]


def test_a_server_too_slow_for_a_large_request_gets_small_ones(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow is slow to find out what it has already: a request that came too late once would always do."""
    real, too_late = MlflowRun.send_points, []

    def send_points(self: MlflowRun, entries: Sequence[Entry], run_id: str) -> None:
        real(self, entries, run_id)
        if len(entries) > 20:
            too_late.append(len(entries))
            raise TimeoutError

    monkeypatch.setattr(MlflowRun, "send_points", send_points)
    monkeypatch.setattr(sender_module, "FLUSH_SECONDS", 0.0)
    sent.job(steps(1, 300))
    sender = sent.sender()
    for _ in range(200):
        with suppress(TimeoutError):
            sender.send()
            break
    assert too_late and sent.losses() == steps(1, 300)


# Resumes and rollbacks


def half(first: int, last: int, more: float = 0.5) -> dict[int, float]:
    return {step: step + more for step in range(first, last + 1)}


class Past(NamedTuple):
    """Jobs that follow each other, and what MLflow then has of their losses."""

    jobs: list[tuple[bool, int, dict[int, float]]]  # whether MLflow can be reached, the step restored, the losses
    run: dict[int, float]
    nested: tuple[dict[int, float], ...] = ()  # of the runs nested in it: the steps that were made otherwise again


PASTS = {
    "killed at 7, restored at 5, so that 6 and 7 come again; twice": Past(
        [(True, 0, steps(1, 7)), (True, 5, steps(6, 9)), (True, 5, steps(6, 12))], steps(1, 12)
    ),
    "another branch": Past([(True, 0, steps(1, 9)), (True, 5, half(6, 12))], steps(1, 9) | half(10, 12), (half(6, 9),)),
    "a branch whose third start repeats its points and continues, and a third branch": Past(
        [(True, 0, steps(1, 9)), (True, 5, half(6, 7)), (True, 6, half(7, 8)), (True, 7, half(8, 11, 0.75))],
        steps(1, 9) | half(10, 11, 0.75),
        (half(6, 8), half(8, 9, 0.75)),
    ),
    "superseded before it was sent": Past([(False, 0, steps(1, 9)), (False, 5, half(6, 8))], steps(1, 5) | half(6, 8)),
    "another tracking.every, whose first steps contradict nothing": Past(
        [(False, 0, {10: 1.0, 20: 2.0, 30: 3.0}), (False, 10, {15: 1.5, 20: 2.5, 25: 2.6})],
        {10: 1.0, 15: 1.5, 20: 2.5, 25: 2.6},
    ),
}


def wait_for_another_time() -> None:
    """A log has milliseconds."""
    now = time.time_ns()
    wait_until(lambda: time.time_ns() > now + 2_000_000, "another time")


@pytest.mark.parametrize("past", PASTS)
def test_mlflow_has_every_step_that_counts_and_no_name_a_step_twice(sent: Sent, past: str) -> None:
    """The run and those nested in it have what counts: no chart zigzags, and nothing is missing.

    Also in the run that is made after its user deleted one with everything.
    """
    for is_up, first_step, losses in PASTS[past].jobs:
        config = sent.config() if is_up else config_for(f"http://127.0.0.1:{free_port()}")
        tracker = start(config, sent.run_dir, first_step=first_step)
        for step, loss in losses.items():
            tracker.log(step, {"loss": loss, "seconds": time.perf_counter()})
            wait_for_another_time()
        tracker.close("FINISHED")
    sent.send()
    assert list(sent.losses().items()) == list(PASTS[past].run.items())
    assert [sent.losses(run_id) for run_id in sent.nested()] == list(PASTS[past].nested)
    assert sum("dist_mem.branch" in name for name in sent.run.data.tags) == len(PASTS[past].nested)
    for is_deleted in (False, True):
        if is_deleted:
            sent.client.delete_run(sent.run_id)
            sent.send()
        runs = [sent.run_id, *sent.nested()]
        points = {run_id: points_of(sent.client, run_id) for run_id in runs}
        for run_id in runs:
            assert_every_point_is_there_once(sent, run_id)
        newest = {(name, step): found for run_id in runs for name, step, *found in points[run_id]}
        repeated = {entry.body["step"] for entry in find_entries(sent.log, "repeat")}  # with other times
        for point in (point for point in read_points(sent.log) if point.step not in repeated):
            for name, value in point.metrics.items():
                assert newest[in_group(name), point.step] == [round(point.time * 1000), value]
        assert sent.run.info.status == "FINISHED"


def test_a_rollback_is_told_with_what_has_changed(sent: Sent, capsys: pytest.CaptureFixture[str]) -> None:
    sent.job(steps(1, 9))
    sent.job(half(6, 12), first_step=5, train={"global_batch_size": 32})
    assert "train.global_batch_size" not in sent.run.data.params  # the default
    tags = sent.run.data.tags
    assert tags["dist_mem.changed_params.step_5"] == "train.global_batch_size: 16 -> 32"
    (nested,) = nested_runs(sent.client, sent.run_id)
    assert nested.info.run_name == "demo: steps 6 to 9 again"
    says = tags["dist_mem.branch_2"]
    assert says.startswith("steps 6 to 9 logged before 20")
    assert says.endswith(f"count no more; those that do are in the nested run {nested.info.run_id}")
    printed = says.replace(nested.info.run_id, "'demo: steps 6 to 9 again'")
    assert f"MLflow cannot delete points: {printed}" in capsys.readouterr().err


def test_what_mlflow_has_of_before_a_rollback_is_known_to_whoever_sends_the_rest(sent: Sent) -> None:
    """Of nine steps it got four; a sync sends a piece of the rest, and another sync, from a new client, the others."""
    sent.job(steps(1, 4))
    sent.job_alone(steps(5, 9), first_step=4)
    sent.job_alone(half(3, 11), first_step=2)
    for size in (1, 2, 3, 100):  # as if it was killed in between
        sender = sent.sender()
        sender._batch_size = size
        send_tags = failing_after(MlflowRun.send_tags, 9 if size < 100 else 10**9)
        with patch.object(MlflowRun, "send_tags", send_tags), suppress(ConnectionError):
            sender.send()
    (nested,) = sent.nested()
    assert sent.losses(nested) == half(3, 4)
    assert sent.losses() == steps(1, 4) | half(5, 11)


def failing_after(method: Callable[..., None], times: int) -> Callable[..., None]:
    """The method, which a dead network keeps from being called more often."""
    calls = itertools.count()

    def send(*arguments: Any) -> None:
        if next(calls) >= times:
            raise ConnectionError
        method(*arguments)

    return send


def test_a_server_that_fails_where_a_nested_run_is_made_gets_it_later(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the job runs: its points of the steps that MLflow has never go to the run itself."""
    sent.job(steps(1, 6))
    real, answers = type(sent.client).create_run, iter([False])

    def create_run(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        if next(answers, True):
            return made
        raise ConnectionError("the answer is lost")

    sender = sent.sender()
    sender.send()
    sent.job(half(5, 7), first_step=4, tracking={"send": "never"})
    monkeypatch.setattr(type(sent.client), "create_run", create_run)
    with pytest.raises(ConnectionError):
        sender.send()
    sender.send()
    (nested,) = sent.nested()
    assert sent.losses(nested) == half(5, 6)
    assert sent.losses() == steps(1, 6) | half(7, 7)


def test_system_metrics_count_on_over_resumes_and_are_no_points_of_the_training(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    for least in (2, 4):
        tracker = sent.start(tracking={"system_metrics": True})
        wait_until(lambda: sent.log.read_text().count("system/cpu_util") >= least, "samples")  # noqa: B023
        tracker.close("KILLED")
    counted = list(sent.losses(name="system/cpu_utilization_percentage"))
    assert counted == list(range(len(counted))) and len(counted) >= 4
    assert read_points(sent.log) == []


# Checkpoints, which are models of MLflow


def models_of(client: Any, run_id: str) -> dict[str, dict[str, float]]:
    """Return the metrics of every model of a run; each name stands once."""
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    assert len({model.name for model in found}) == len(found)
    assert {str(model.status) for model in found} <= {"READY"}
    listed = [output.model_id for output in client.get_run(run_id).outputs.model_outputs]
    assert sorted(listed) == sorted(model.model_id for model in found)
    return {model.name: {metric.key: metric.value for metric in model.metrics or []} for model in found}


def train(sent: Sent, *, first: int, last: int, shift: float = 0.0, **overrides: Any) -> None:
    """Log a loss every step, evaluate and save every second one, which is reported a step later."""
    tracker = sent.start(first_step=first, **overrides)
    for step in range(first + 1, last + 1):
        tracker.log(step, {"loss": step + shift, "mfu": 0.5})
        if step % 2 == 0:
            tracker.log(step, {"validation/word_perplexity": 10.0 * step + shift})
        elif step > 1:
            tracker.log_checkpoint(step - 1, sent.run_dir / f"step-{step - 1}")
    tracker.close("KILLED")


def assert_every_point_is_there_once(sent: Sent, run_id: str) -> None:
    assert max(Counter(point[:2] for point in points_of(sent.client, run_id).elements()).values()) == 1


def test_each_checkpoint_is_a_model_with_the_metrics_of_its_step_and_of_later_evaluations(sent: Sent) -> None:
    """One that is made again is a model of the nested run; every name has a step once."""

    def evaluate() -> None:
        figures = {"test/word_perplexity": 44.0}
        named = [f"tracking.uri={sent.uri}"]
        log_to_run(sent.config().tracking, run_dir=sent.run_dir, step=4, metrics=figures, files=[], overrides=named)

    train(sent, first=0, last=5)
    expected = {
        "step-00000002": {"train/loss": 2.0, "eval/validation/word_perplexity": 20.0},
        "step-00000004": {"train/loss": 4.0, "eval/validation/word_perplexity": 40.0},
    }
    assert models_of(sent.client, sent.run_id) == expected
    evaluate()
    evaluated = {"eval/test/word_perplexity": 44.0}
    expected["step-00000004"] |= evaluated
    assert models_of(sent.client, sent.run_id) == expected
    train(sent, first=2, last=7, shift=0.5)
    (nested,) = sent.nested()
    found = models_of(sent.client, sent.run_id)
    assert found.pop("step-00000006")["train/loss"] == 6.5
    assert found == expected
    evaluate()
    again = {"train/loss": 4.5, "eval/validation/word_perplexity": 40.5, **evaluated}
    assert models_of(sent.client, nested) == {"step-00000004": again}
    for run_id in (sent.run_id, nested):
        assert_every_point_is_there_once(sent, run_id)


class KilledError(Exception):
    """The sender dies here."""


def test_a_sender_that_dies_at_any_entry_leaves_every_model_and_point_once(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each request of a checkpoint, before MLflow's count of entries is written."""
    train(sent, first=0, last=5, tracking={"send": "never"})
    real = MlflowRun.send_checkpoint

    def send_until(last: str) -> Callable[..., None]:
        def send(self: MlflowRun, *arguments: Any) -> None:
            method = getattr(type(self._client), last)

            def then_die(*args: Any, **options: Any) -> None:
                method(*args, **options)
                raise KilledError

            with monkeypatch.context() as patch:
                patch.setattr(type(self._client), last, then_die)
                real(self, *arguments)

        return send

    for request in ("search_logged_models", "create_logged_model", "finalize_logged_model", "log_outputs", "log_batch"):
        with monkeypatch.context() as patch:
            patch.setattr(MlflowRun, "send_checkpoint", send_until(request))
            with pytest.raises(KilledError):
                sent.sender().send()
    assert sender_module.SENT_TAG not in sent.run.data.tags
    for _ in range(2):
        sent.send()
    found = models_of(sent.client, sent.run_id)
    assert sorted(found) == ["step-00000002", "step-00000004"]
    assert found["step-00000002"] == {"train/loss": 2.0, "eval/validation/word_perplexity": 20.0}
    assert_every_point_is_there_once(sent, sent.run_id)
