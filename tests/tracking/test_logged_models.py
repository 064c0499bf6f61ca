"""The checkpoints of a run as models in MLflow; over SQLite, without a server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dist_mem.tracking.log import METRICS_FILE, read_header
from dist_mem.tracking.mlflow import sender as sender_module
from dist_mem.tracking.mlflow.run import MlflowRun, Target
from dist_mem.tracking.mlflow.sender import Sender
from dist_mem.tracking.mlflow.sync import log_to_run, send_log
from tests.support.mlflow_server import points_of
from tests.support.tracked import config_for, nested_runs, start

pytestmark = pytest.mark.servers


def models_of(client: Any, run_id: str) -> dict[str, dict[str, float]]:
    """Return the metrics of every model of a run; each name stands once."""
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    assert len({model.name for model in found}) == len(found)
    assert {str(model.status) for model in found} <= {"READY"}
    listed = [output.model_id for output in client.get_run(run_id).outputs.model_outputs]
    assert sorted(listed) == sorted(model.model_id for model in found)
    return {model.name: {metric.key: metric.value for metric in model.metrics or []} for model in found}


def train(config: Any, run_dir: Path, *, first: int, last: int, shift: float = 0.0) -> None:
    """Log a loss every step, evaluate and save every second one, which is reported a step later."""
    tracker = start(config, run_dir, first_step=first)
    for step in range(first + 1, last + 1):
        tracker.log(step, {"loss": step + shift, "mfu": 0.5})
        if step % 2 == 0:
            tracker.log(step, {"validation/word_perplexity": 10.0 * step + shift})
        elif step > 1:
            tracker.log_checkpoint(step - 1, run_dir / f"step-{step - 1}")
    tracker.close("KILLED")


def test_each_checkpoint_is_a_model_with_the_metrics_of_its_step_and_of_later_evaluations(
    sqlite_uri: str, client: Any, tmp_path: Path
) -> None:
    """One that is made again is a model of the nested run; every name has a step once."""
    config = config_for(sqlite_uri)

    def evaluate() -> None:
        log_to_run(config.tracking, run_dir=tmp_path, step=4, metrics={"test/word_perplexity": 44.0}, files=[])

    train(config, tmp_path, first=0, last=5)
    run_id = (tmp_path / "mlflow_run_id").read_text().strip()
    expected = {
        "step-00000002": {"train/loss": 2.0, "eval/validation/word_perplexity": 20.0},
        "step-00000004": {"train/loss": 4.0, "eval/validation/word_perplexity": 40.0},
    }
    assert models_of(client, run_id) == expected
    evaluate()
    evaluated = {"eval/test/word_perplexity": 44.0}
    expected["step-00000004"] |= evaluated
    assert models_of(client, run_id) == expected
    train(config, tmp_path, first=2, last=7, shift=0.5)
    (nested,) = nested_runs(client, run_id)
    found = models_of(client, run_id)
    assert found.pop("step-00000006")["train/loss"] == 6.5
    assert found == expected
    evaluate()
    again = {"train/loss": 4.5, "eval/validation/word_perplexity": 40.5, **evaluated}
    assert models_of(client, nested.info.run_id) == {"step-00000004": again}
    for one in (run_id, nested.info.run_id):
        counts = Counter((name, step) for name, step, _, _ in points_of(client, one).elements())
        assert max(counts.values()) == 1


class KilledError(Exception):
    """The sender dies here."""


def test_a_sender_that_dies_at_any_entry_leaves_every_model_and_point_once(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each request of a checkpoint, before MLflow's count of entries is written."""
    config = config_for(sqlite_uri, tracking={"send": "never"})
    train(config, tmp_path, first=0, last=5)
    target = Target(sqlite_uri, tmp_path, read_header(tmp_path / METRICS_FILE))
    real, requests = (
        MlflowRun.send_checkpoint,
        ("search_logged_models", "create_logged_model", "finalize_logged_model", "log_outputs", "log_batch"),
    )
    for request in requests:
        sender = Sender(target, tmp_path / METRICS_FILE, report=print)

        def send(self: MlflowRun, *arguments: Any, last: str = request) -> None:
            with monkeypatch.context() as patch:
                method = getattr(type(self._client), last)

                def then_die(*args: Any, **options: Any) -> None:
                    method(*args, **options)
                    raise KilledError

                patch.setattr(type(self._client), last, then_die)
                real(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(MlflowRun, "send_checkpoint", send)
            with pytest.raises(KilledError):
                sender.send()
    assert sender_module.SENT_TAG not in client.get_run(sender.run.run_id).data.tags
    for _ in range(2):
        send_log(config.tracking, tmp_path, report=print)
    found = models_of(client, str(sender.run.run_id))
    assert sorted(found) == ["step-00000002", "step-00000004"]
    assert found["step-00000002"] == {"train/loss": 2.0, "eval/validation/word_perplexity": 20.0}
    points = points_of(client, str(sender.run.run_id))
    assert max(Counter((name, step) for name, step, _, _ in points.elements()).values()) == 1
