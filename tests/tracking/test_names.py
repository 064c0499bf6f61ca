"""Whatever a task, a memory or a user calls something, MLflow has it; what it refuses costs that name alone."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.utils import validation

from dist_mem.config import save_config
from dist_mem.errors import EXIT_FAILED
from dist_mem.tracking.log import METRICS_FILE
from dist_mem.tracking.mlflow.sync import log_to_run
from dist_mem.tracking.names import in_group, valid_name
from tests.support.messages import said_line
from tests.support.tracked import config_for, job, track_sync

ANY_NAME = st.text(st.characters() | st.sampled_from("/.@|\n\0\ud800"), max_size=40) | st.text("ab./", max_size=600)


def is_taken(name: str) -> bool:
    """Whether MLflow's own checks accept a name for a metric, a parameter and a tag."""
    try:
        validation._validate_metric(name, 1.0, 1, 1)
        validation._validate_param(name, "x")
        validation._validate_tag(name, "x")
    except (MlflowException, UnicodeError):
        return False
    return True


@settings(deadline=None)
@given(st.lists(ANY_NAME, unique=True, min_size=1, max_size=5))
def test_every_name_is_made_valid_and_no_two_become_one(names: list[str]) -> None:
    made = [valid_name(name) for name in names]
    assert all(map(is_taken, made)), made
    assert len(set(made)) == len(names)
    assert all(valid_name(name) == name for name in made)
    kept = [old for old in names if is_taken(old) and not old.endswith("\n")]  # which a `$` of MLflow's lets pass
    assert set(kept) <= set(made)


def test_the_group_of_a_name_stays() -> None:
    """What is in which group: tests/project/test_metrics_page.py."""
    names = ["train/loss", "eval/test/nll", "memory/gain", "system/mfu", "recall_ppl/nll", "recall_accuracy/test/a"]
    assert [in_group(name) for name in names] == names
    made = valid_name("lm_eval/q@5 (v1)|x/acc")
    assert made.startswith("lm_eval/q_5 _v1__x_") and made.endswith("/acc")


def refusing(client_class: Any, name: str) -> Any:
    """`log_batch` of a client whose server refuses one name, as one of a later version may."""
    log_batch = client_class.log_batch

    def log(self: Any, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), **options: Any) -> Any:
        if any(item.key == name for item in (*metrics, *params, *tags)):
            raise MlflowException.invalid_parameter_value(f"no {name} here")
        return log_batch(self, run_id, metrics=metrics, params=params, tags=tags, **options)

    return log


def test_a_refusal_concerns_one_name_and_is_printed(
    tmp_path: Path, sqlite_uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sqlite_uri)
    run_dir = tmp_path / "run"
    tracker = job(config, run_dir, {1: 3.0})
    save_config(config, run_dir / "config.yaml")
    monkeypatch.setattr(type(client), "log_batch", refusing(type(client), "eval/test/b"))
    metrics = {"test/a": 1.0, "test/b": 2.0, "test/c@|": 3.0}
    files = [run_dir / METRICS_FILE, run_dir / "gone.html"]
    given: dict[str, Any] = {"metrics": metrics, "files": files, "overrides": [f"tracking.uri={sqlite_uri}"]}
    printed = log_to_run(config.tracking, run_dir=run_dir, step=1, **given)
    assert printed is not None and printed.count("MLflow refused metric 'eval/test/b'") == 1
    assert printed.count("MLflow refused gone.html: ") == 1
    assert "no eval/test/b here" in printed
    found = client.get_run(tracker.run_id).data.metrics
    assert (found["eval/test/a"], found[valid_name("eval/test/c@|")]) == (1.0, 3.0)
    assert "eval/test/b" not in found
    job(config_for(sqlite_uri, tracking={"send": "never"}), tmp_path / "late", {1: 1.0, 2: 2.0})
    save_config(config, tmp_path / "late" / "config.yaml")
    monkeypatch.setattr(type(client), "log_batch", refusing(type(client), "train/seconds"))
    assert track_sync([tmp_path / "late"], [f"tracking.uri={sqlite_uri}"]) == EXIT_FAILED
    said = capsys.readouterr()
    said_line(said.out, "'train/seconds'")
    assert "MLflow refused 1 name, " in said.err
