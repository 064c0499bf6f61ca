"""Tracked jobs for tests, without training: log losses, and read them back from MLflow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.listing import newest_count
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, Entry, Header, new_uid, read_header, write_log
from dist_mem.tracking.mlflow import sync
from dist_mem.tracking.mlflow.run import Target
from dist_mem.tracking.mlflow.sender import Sender
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from dist_mem.tracking.mlflow.sync import send_log
from dist_mem.tracking.names import in_group
from dist_mem.tracking.start import start_tracking
from dist_mem.tracking.tracker import Tracker
from tests.support.configs import config_from


def config_for(uri: str, **overrides: Any) -> Any:
    return config_from({"name": "demo", "tracking": {"uri": uri, "system_metrics": False}}, overrides)


def track_sync(run_dirs: list[Path], overrides: list[str] | None = None) -> int:
    """Run `dist-mem track sync`."""
    return sync.run(run_dirs, overrides or [], count=newest_count)


def start(config: Any, run_dir: Path, *, first_step: int = 0, num_points: int | None = None) -> Tracker:
    counts = {"total_steps": 100, "first_step": first_step}
    return start_tracking(config, run_dir=run_dir, **counts, num_points=num_points, measurements={"seconds"})


def job(config: Any, run_dir: Path, losses: dict[int, float], *, status: str = "KILLED", **options: Any) -> Tracker:
    """Run a job from start to end that logs these losses."""
    tracker = start(config, run_dir, **options)
    for step, loss in losses.items():
        tracker.log(step, {"loss": loss, "seconds": time.perf_counter()})
    tracker.close(status)
    return tracker


def history(client: Any, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """Return the points (step, value) of a metric of metrics.jsonl, in the order of MLflow's history."""
    return [(point.step, point.value) for point in client.get_metric_history(run_id, in_group(name))]


def nested_runs(client: Any, run_id: str | None) -> list[Any]:
    """Return the runs nested in a run, the first one first."""
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run_id}'", order_by=["start_time"]))


def log_points(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Write a log that has these points and nothing else."""
    entries = [
        Entry("point", round(point["time"] * 1000), {"step": point["step"], "metrics": point["metrics"]})
        for point in points
    ]
    write_log(path, Header(new_uid(), "run", None), entries)


def steps(first: int, last: int) -> dict[int, float]:
    return {step: float(step) for step in range(first, last + 1)}


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
