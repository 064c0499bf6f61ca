"""Tracked jobs for tests, without training: log losses, and read them back from MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.listing import newest_count
from dist_mem.config import config_from
from dist_mem.tracking.log import Entry, Header, new_uid, write_log
from dist_mem.tracking.mlflow import sync
from dist_mem.tracking.names import in_group
from dist_mem.tracking.start import start_tracking
from dist_mem.tracking.tracker import Tracker


def config_for(uri: str, **overrides: Any) -> Any:
    return config_from({"name": "demo", "tracking": {"uri": uri, "system_metrics": False}}, overrides)


def track_sync(run_dirs: list[Path], overrides: list[str] | None = None) -> int:
    """Run `dist-mem track sync`."""
    return sync.run(run_dirs, overrides or [], count=newest_count)


def start(config: Any, run_dir: Path, *, first_step: int = 0) -> Tracker:
    return start_tracking(
        config,
        run_dir=run_dir,
        total_steps=100,
        first_step=first_step,
        measurements={"seconds"},
    )


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
