"""A run directory, and the store of MLflow that it is sent to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, read_header
from dist_mem.tracking.mlflow.run import Target
from dist_mem.tracking.mlflow.sender import Sender
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.mlflow.sync import send_log
from dist_mem.tracking.tracker import Tracker
from tests.support.tracked import config_for, history, job, nested_runs, start


class Sent(NamedTuple):
    uri: str
    client: Any
    run_dir: Path

    @property
    def log(self) -> Path:
        return self.run_dir / METRICS_FILE

    @property
    def run_id(self) -> str:
        return (self.run_dir / RUN_ID_FILE).read_text().strip()

    @property
    def run(self) -> Any:
        return self.client.get_run(self.run_id)

    def config(self, **overrides: Any) -> Any:
        return config_for(self.uri, **overrides)

    def start(self, first_step: int = 0, **overrides: Any) -> Tracker:
        return start(self.config(**overrides), self.run_dir, first_step=first_step)

    def job(self, losses: dict[int, float], first_step: int = 0, **overrides: Any) -> Tracker:
        """Run a job from start to end, as `tests.support.tracked.job`, with these changes of its configuration."""
        return job(self.config(**overrides), self.run_dir, losses, first_step=first_step)

    def job_alone(self, losses: dict[int, float], first_step: int = 0) -> None:
        """Run a job while MLflow is down."""
        job(config_for(f"http://127.0.0.1:{free_port()}"), self.run_dir, losses, first_step=first_step)

    def sender(self) -> Sender:
        return Sender(Target(self.uri, self.run_dir, read_header(self.log)), self.log, report=print)

    def send(self) -> None:
        """Send what MLflow does not have yet."""
        send_log(self.config().tracking, self.run_dir, report=print)

    def losses(self, run_id: str | None = None, name: str = "loss") -> dict[int, float]:
        """A metric by step, in the order of MLflow's history, which has each step once."""
        points = history(self.client, run_id or self.run_id, name)
        assert len({step for step, _ in points}) == len(points)
        return dict(points)

    def nested(self) -> list[str]:
        """The ids of the runs nested in it, the first one first."""
        return [run.info.run_id for run in nested_runs(self.client, self.run_id)]

    def files(self, folder: str | None = None) -> list[str]:
        return [file.path for file in self.client.list_artifacts(self.run_id, folder)]


@pytest.fixture
def sent(sqlite_uri: str, client: Any, tmp_path: Path) -> Sent:
    return Sent(sqlite_uri, client, tmp_path / "run")
