"""`dist_mem.load` of an export that MLflow stores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_mem
from dist_mem.errors import UnusableError
from dist_mem.evaluation.export import run as export
from tests.support.messages import refused

pytestmark = pytest.mark.ranks


def test_an_export_is_loaded_from_a_run_and_from_the_registry(
    api_folder: Path, tmp_path: Path, client: Any, sqlite_uri: str
) -> None:
    assert export(api_folder / "runs" / "demo", out=tmp_path / "demo") == 0
    experiment = client.get_experiment_by_name("dist_mem").experiment_id
    run_id = client.create_run(experiment).info.run_id
    client.log_artifacts(run_id, str(tmp_path / "demo"), "model")
    client.create_registered_model("api_demo")
    version = client.create_model_version("api_demo", f"runs:/{run_id}/model", run_id).version
    client.set_registered_model_alias("api_demo", "champion", version)
    expected = dist_mem.load(api_folder / "runs" / "demo").score("ba ko mi").nll
    store = f"tracking.uri={sqlite_uri}"
    for address in (f"runs:/{run_id}/model", f"runs:/{run_id}/", "models:/api_demo@champion"):
        assert torch.equal(dist_mem.load(address, store).score("ba ko mi").nll, expected), address
    with refused(UnusableError, "api_demo", "tracking.uri"):
        dist_mem.load("models:/api_demo@nobody", store)
    client.log_text(run_id, "no model", "notes/a.txt")
    with refused(UnusableError, "manifest.json"):
        dist_mem.load(f"runs:/{run_id}/notes", store)


def test_without_mlflow_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as Python reports a module that is not there
    with refused(UnusableError):
        dist_mem.load("models:/a@b")
