"""Tracking of a run: metrics.jsonl, a progress bar, MLflow. The only door to mlflow; only rank 0 goes through it.

    tracker = start_tracking(config, rank=world.rank, run_dir=run_dir, run_id=None, first_step=0, total_steps=1000)
    tracker.log(10, {"loss": 5.1})            # a file write and a queue: tens of microseconds
    tracker.close("FINISHED")                 # at most FLUSH_SECONDS

MLflow may be slow, down or wrong: one thread talks to it, and training neither waits nor stops. What the thread could
not deliver is not lost, because metrics.jsonl has every point: MLflow keeps, as tags written after the points, the last
step it took of training and of each evaluated split, and a resumed run first sends what is missing. MLflow cannot
delete points, so a step that it already has is not sent again when a resumed run repeats it.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from dist_mem.delivery import Delivery, Request, brief
from dist_mem.distributed import quiet_tracking_environment, tracking_uri_from_environment
from dist_mem.files import write_text
from dist_mem.progress import progress_sink
from dist_mem.sinks import METRICS_FILE, MetricsFile, Point, Sink, Tracker

RUN_ID_FILE = "mlflow_run_id"  # in the run directory
FLUSH_SECONDS = 8.0  # how long `close` waits for MLflow
DEFAULT_URI = "sqlite:///mlflow.db"
_METRICS_PER_REQUEST = 900  # MLflow takes 1000 metrics, parameters and tags together
_PARAMS_PER_REQUEST = 100
_PARAM_CHARS = 500  # mlflow 3 takes 6000, the servers of earlier versions 500; the whole configuration is an artifact
_TAG_CHARS = 5000  # likewise 8000 and 5000
_SENT_TAG = "dist_mem.sent."  # + "train" or split: last step that MLflow has of it


def start_tracking(
    config: Any, *, rank: int, run_dir: Path, run_id: str | None, total_steps: int, first_step: int
) -> Tracker:
    """The tracker of this rank.

    Args:
        run_id: MLflow run to go on with, from the checkpoint; the file in `run_dir`, which is never older, comes first.
        first_step: the step training continues from, 0 for a fresh start; recorded points past it are superseded.
    """
    if rank != 0:
        return Tracker()
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_file = MetricsFile(run_dir / METRICS_FILE, first_step=first_step)
    progress = progress_sink(total_steps=total_steps, first_step=first_step, every=config.tracking.every)
    sinks: list[Sink] = [metrics_file]
    if config.tracking.mlflow:
        target = _target(config, run_dir, run_id)
        sinks.append(MlflowSink(target, backlog=metrics_file.kept, first_step=first_step, report=progress.message))
    tracker = Tracker([*sinks, progress])  # the progress last: others report through it until they are closed
    # Unresolved: a value taken from the environment may be a secret.
    tree: Any = OmegaConf.to_container(config, resolve=False)
    tracker.log_params(tree)
    return tracker


def log_to_run(
    config: Any, *, run_dir: Path, step: int, metrics: Mapping[str, float], files: Sequence[Path]
) -> str | None:
    """Add figures and files to a run that may be running or over, at once; its status stays.

    Returns:
        What MLflow objected to, or None if all is recorded; no error, because the report of an evaluation is on disk.
    """
    target = _target(config, run_dir, None)
    if target.run_id is None:
        return f"{run_dir / RUN_ID_FILE} is missing: the run was never recorded in MLflow"
    try:
        client = _connect(target.uri)
        _send_points(client, target.run_id, [Point(step, time.time(), metrics)], mark=False)
        for path in files:
            client.log_artifact(target.run_id, str(path))
    except Exception as error:  # any of the many libraries under MLflow's stores
        return f"MLflow at {target.uri} did not take the figures: {brief(error)}"
    return None


class Target(NamedTuple):
    """Which MLflow run to write to."""

    uri: str
    experiment: str
    run_name: str
    run_id: str | None  # None: a new run
    id_file: Path


def _target(config: Any, run_dir: Path, run_id: str | None) -> Target:
    id_file = run_dir / RUN_ID_FILE
    if id_file.exists():
        run_id = id_file.read_text(encoding="utf-8").strip()
    uri = config.tracking.uri or tracking_uri_from_environment() or DEFAULT_URI
    return Target(uri, config.tracking.experiment, config.tracking.run_name or config.name, run_id, id_file)


def _connect(uri: str) -> Any:
    """An MlflowClient; creates the tables of a new SQLite store (1 to 7 s)."""
    _import_mlflow_quietly()
    from mlflow import MlflowClient

    return MlflowClient(uri)


def _import_mlflow_quietly() -> None:
    """Import mlflow (about 1 s), without its noise, each for a reason."""
    quiet_tracking_environment()
    import mlflow  # noqa: F401

    # "Creating initial MLflow database tables", "Updating database tables": nothing for the user to know or do.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    # MLflow's own table definitions use a deprecated SQLAlchemy option.
    warnings.filterwarnings(
        "ignore", message=r"The ``noload`` loader strategy is deprecated", category=DeprecationWarning
    )


def _is_refusal(error: Exception) -> bool:
    """Whether MLflow will never take this: a bad value, a run that is gone, a file that is not there."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.get_http_status_code() in (400, 404)
    return isinstance(error, FileNotFoundError)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _send_points(client: Any, run_id: str | None, points: Sequence[Point], *, mark: bool = True) -> None:
    """Send metrics, and to `mark` them, with the last request, how far each group has come.

    Sending the same points again changes nothing: MLflow tells them apart by name, step, time and value.
    """
    from mlflow.entities import Metric, RunTag

    metrics = [
        Metric(name, float(value), int(point.time * 1000), point.step)
        for point in points
        for name, value in point.metrics.items()
    ]
    newest = {_group(point): point.step for point in points} if mark else {}
    tags = [RunTag(_SENT_TAG + group, str(step)) for group, step in newest.items()]
    chunks = list(_chunks(metrics, _METRICS_PER_REQUEST))
    for index, chunk in enumerate(chunks):
        client.log_batch(run_id, metrics=chunk, tags=tags if index + 1 == len(chunks) else ())


def _group(point: Point) -> str:
    """The split of an evaluation, "train" for the rest."""
    name = next(iter(point.metrics), "")
    return name.split("/")[0] if "/" in name else "train"


class MlflowSink(Sink):
    """One MLflow run, written from a background thread. `run_id` is None until MLflow has answered."""

    def __init__(
        self, target: Target, *, backlog: Sequence[Point], first_step: int, report: Callable[[str], None]
    ) -> None:
        """Import mlflow and start the thread; the run is found or made there, so that a dead server costs nothing here.

        Args:
            backlog: points of earlier jobs of this run, of which MLflow may lack the newest.
            report: takes a line for the user; called from the thread.
        """
        _import_mlflow_quietly()  # here and not in the thread: imports of two threads can wait for each other
        self._target = target
        self._backlog = backlog
        self._first_step = first_step
        self._report = report
        self._client: Any = None
        self._params: Mapping[str, str] = {}  # what MLflow had when this job started
        self._sent: dict[str, int] = {}  # likewise the last step of each group
        self._delivery = Delivery(
            Request("the run", self._open),
            combine=self._combine,
            is_refusal=_is_refusal,
            report=report,
            service=f"MLflow at {target.uri}",
        )

    def log(self, point: Point) -> None:
        self._delivery.put(point)

    def log_params(self, params: Mapping[str, str]) -> None:
        self._delivery.put(Request("parameters", lambda: self._send_params(params)))

    def log_artifact(self, path: Path) -> None:
        self._delivery.put(Request(str(path), lambda: self._client.log_artifact(self.run_id, str(path))))

    def log_text(self, text: str, name: str) -> None:
        self._delivery.put(Request(name, lambda: self._client.log_text(self.run_id, text, name)))

    def close(self, status: str) -> None:
        self._delivery.put(Request(f"status {status}", lambda: self._client.set_terminated(self.run_id, status)))
        if not self._delivery.close(FLUSH_SECONDS):
            self._report(
                f"MLflow at {self._target.uri} lacks the last figures of this job: {METRICS_FILE} has them, and "
                "resuming the run sends them"
            )

    def _open(self) -> None:
        """Find the run and mark it as running, or make it; then send what it lacks of earlier jobs."""
        self._client = self._client or _connect(self._target.uri)
        run = _find_run(self._client, self._target.run_id) if self._target.run_id else None
        if run is None:
            run = self._create_run()
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self.run_id = run.info.run_id
        self._params = run.data.params
        self._sent = {
            name.removeprefix(_SENT_TAG): int(value)
            for name, value in run.data.tags.items()
            if name.startswith(_SENT_TAG)
        }
        missing = [point for point in self._backlog if point.step >= self._sent.get(_group(point), -1)]
        _send_points(self._client, self.run_id, missing)
        self._report(f"MLflow run {self._target.run_name} ({self.run_id}) at {self._target.uri}")

    def _create_run(self) -> Any:
        if self._target.run_id:
            self._report(f"MLflow at {self._target.uri} has no run {self._target.run_id}: a new one begins")
        experiment_id = _experiment_id(self._client, self._target.experiment)
        run = self._client.create_run(experiment_id, run_name=self._target.run_name)
        self._target = self._target._replace(run_id=run.info.run_id)  # another attempt to open must find this one
        write_text(self._target.id_file, run.info.run_id + "\n")
        return run

    def _combine(self, items: Sequence[Point | Request]) -> list[Request]:
        """One request for all points that follow each other."""
        requests: list[Request] = []
        points: list[Point] = []
        for item in items:
            if isinstance(item, Point):
                points.append(item)
                continue
            requests += [self._metrics_request(points), item]
            points = []
        return [*requests, self._metrics_request(points)]

    def _metrics_request(self, points: Sequence[Point]) -> Request:
        new = [point for point in points if point.step > self._sent.get(_group(point), -1)]
        return Request("metrics", partial(_send_points, self._client, self.run_id, new))

    def _send_params(self, params: Mapping[str, str]) -> None:
        """Send new parameters; changed ones, which MLflow refuses, become a tag that tells what changed when."""
        from mlflow.entities import Param

        cut = {name: value[:_PARAM_CHARS] for name, value in params.items()}
        new = [Param(name, value) for name, value in cut.items() if name not in self._params]
        for chunk in _chunks(new, _PARAMS_PER_REQUEST):
            self._client.log_batch(self.run_id, params=chunk)
        changes = [
            f"{name}: {self._params[name]} -> {value}"
            for name, value in cut.items()
            if self._params.get(name, value) != value
        ]
        if changes:
            tag = f"dist_mem.changed_params.step_{self._first_step}"
            self._client.set_tag(self.run_id, tag, "; ".join(changes)[:_TAG_CHARS])


def _find_run(client: Any, run_id: str) -> Any:
    """The run, or None if the store does not have it or its user has deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.get_http_status_code() == 404:
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def _experiment_id(client: Any, name: str) -> str:
    """The experiment, made if it does not exist."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # another job may have made it in between
            if experiment is None:
                raise
    return experiment.experiment_id
