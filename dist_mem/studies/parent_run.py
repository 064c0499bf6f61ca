"""The parent run of a table in MLflow, which contains the table and groups the runs of its trainings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_mem.config import Config
from dist_mem.runtime.files import write_text
from dist_mem.tracking.mlflow.run import connect
from dist_mem.tracking.mlflow.stores import experiment_of, store_uri

_FILE = "mlflow_run_id"
# Tags that MLflow's clients set on a run they start, here its parent. dist_mem gets them from MLflow.
CONTEXT = "MLFLOW_RUN_CONTEXT"


class ParentRun:
    """A run in MLflow that contains the table and the runs of its trainings."""

    def __init__(self, config: Config, out: Path, *, name: str, tags: Mapping[str, str]) -> None:
        """Reuse the run of an earlier call, or create one. Raises the exceptions of MLflow's client."""
        self._client = connect(store_uri(config))
        path = out / _FILE
        if path.exists():
            self.run_id = path.read_text(encoding="utf-8").strip()
        else:
            self.run_id = self._create(experiment_of(config), name, tags)
            write_text(path, f"{self.run_id}\n")
        self._client.update_run(self.run_id, status="RUNNING")

    def _create(self, experiment: Mapping[str, str], name: str, tags: Mapping[str, str]) -> str:
        experiment_id = experiment.get("id")
        if experiment_id is None:
            found = self._client.get_experiment_by_name(experiment["name"])
            experiment_id = found.experiment_id if found else self._client.create_experiment(experiment["name"])
        run = self._client.create_run(experiment_id, run_name=name, tags=dict(tags))
        return str(run.info.run_id)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of its children."""
        return {CONTEXT: json.dumps({"mlflow.parentRunId": self.run_id})}

    def close(self, figures: Mapping[str, float], files: Sequence[Path], *, status: str) -> None:
        """Log the figures and files and end the run with status FINISHED, KILLED or FAILED."""
        for name, value in figures.items():
            self._client.log_metric(self.run_id, name, value)
        for path in files:
            self._client.log_artifact(self.run_id, str(path))
        self._client.set_terminated(self.run_id, status=status)
