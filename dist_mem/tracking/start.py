"""Tracking of a run: metrics.jsonl, a progress bar, MLflow. Only rank 0 tracks.

    tracker = start_tracking(config, run_dir=run_dir, run_id=None, total_steps=1000, first_step=0)
    tracker.log(10, {"loss": 5.1})            # two lines into two files: tens of microseconds
    tracker.close("FINISHED")                 # at most FLUSH_SECONDS

MLflow may be slow, down or wrong: all it is to get is written into a journal in the run directory, one thread sends the
journal, and training neither waits nor stops. What was not sent when the job ends, its next start sends, or `dist-mem
track sync`, or an evaluation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from dist_mem.environment import mlflow_environment, system_metrics_interval
from dist_mem.files import write_text
from dist_mem.tracking.delivery import Delivery, Sender
from dist_mem.tracking.journal import Entry, Header, Journal, new_uid, read_entries, read_header, write_journal
from dist_mem.tracking.mlflow_run import RUN_ID_FILE, Target, import_mlflow_quietly, system_monitors
from dist_mem.tracking.progress import progress_sink
from dist_mem.tracking.rollback import Rollback
from dist_mem.tracking.sinks import METRICS_FILE, MetricsFile, Point, Sink
from dist_mem.tracking.system_metrics import SystemMetrics
from dist_mem.tracking.tracker import Tracker

JOURNAL = Path("mlflow") / "train.jsonl"  # in the run directory; beside it the journals of evaluations
FLUSH_SECONDS = 6.0  # how long `close` waits for MLflow; with importing mlflow, a dead server costs less than 10
DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "dist_mem"
EVALUATION_SECONDS = 10.0  # how long an evaluation does
_EVALUATIONS = "evaluation-*.jsonl"


def start_tracking(
    config: Any,
    *,
    run_dir: Path,
    run_id: str | None,
    total_steps: int,
    first_step: int,
    measurements: Collection[str] = (),
) -> Tracker:
    """The tracker of rank 0; the others have `Tracker()`.

    Args:
        run_id: MLflow run to go on with, from the checkpoint; the file in `run_dir`, which is never older, comes first.
        first_step: the step training continues from, 0 for a fresh start; recorded points past it are superseded.
        measurements: names of metrics that an exact resume does not repeat, as times.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics_file = MetricsFile(run_dir / METRICS_FILE, first_step=first_step)
    progress = progress_sink(total_steps=total_steps, first_step=first_step, every=config.tracking.every)
    sinks: list[Sink] = [metrics_file]
    if config.tracking.mlflow:
        _settle_run_id(run_dir, run_id, report=progress.message)
        journal = _open_journal(config, run_dir, metrics_file.kept)
        target = _target(config, run_dir, journal.header)
        past, num_system_points, last_step = _history(journal, first_step)
        for point in metrics_file.kept:
            if point.step > last_step:  # logged by a job without MLflow
                journal.append("point", _body(point), time=point.time)
        rollback = Rollback(past, first_step=first_step, measurements=measurements)
        sink = MlflowSink(journal, target, rollback, report=progress.message)
        if config.tracking.system_metrics:
            sink.add_system_metrics(num_system_points)
        sinks.append(sink)
    tracker = Tracker([*sinks, progress])  # the progress last: others report through it until they are closed
    # Unresolved: a value taken from the environment may be a secret.
    tree: Any = OmegaConf.to_container(config, resolve=False)
    tracker.log_params(tree, step=first_step)
    return tracker


def send_journals(config: Any, run_dir: Path, *, report: Callable[[str], None]) -> int:
    """Send whatever the journals of a run have and MLflow lacks; may be done while the job runs.

    Returns:
        How many entries those were.

    Raises:
        ValueError: the run has no journal.
        Exception: whatever MLflow's client raises when it is not answered; the rest can be sent by another call.
    """
    journal = run_dir / JOURNAL
    if not journal.exists():
        raise ValueError(f"{journal} is missing: the run was never tracked with MLflow")
    target = _target(config, run_dir, read_header(journal))
    sender = Sender(target, journal, report=_discreet(report, target.uri))
    sender.send()
    for path in sorted(journal.parent.glob(_EVALUATIONS)):
        with suppress(FileNotFoundError):  # somebody else has sent it
            sender.send_whole(path)
        path.unlink(missing_ok=True)
    return sender.num_sent


def log_to_run(
    config: Any, *, run_dir: Path, step: int, metrics: Mapping[str, float], files: Sequence[Path]
) -> str | None:
    """Add figures and files of the run directory to a run that may be running or over; its status stays.

    Returns:
        None if MLflow has it all within `EVALUATION_SECONDS`, else what to tell the user; no error, because the report
        of the evaluation is on disk.
    """
    journal = run_dir / JOURNAL
    if not journal.exists():
        return f"{journal} is missing: the run was never tracked with MLflow, and nor is this evaluation"
    now = int(time.time() * 1000)
    artifacts = [Entry("artifact", now, {"path": str(path.relative_to(run_dir))}) for path in files]
    point = Entry("point", now, {"step": step, "metrics": metrics})
    path = journal.parent / _EVALUATIONS.replace("*", new_uid())
    write_journal(path, read_header(journal), [point, *artifacts])  # at once: whoever sends a journal deletes it
    import_mlflow_quietly()  # seconds on a slow disk, which are not MLflow's
    complaints: list[str] = []
    delivery = Delivery(
        lambda: send_journals(config, run_dir, report=complaints.append),
        report=_discreet(complaints.append, _uri(config)),
        service=f"MLflow at {_uri(config)}",
    )
    if delivery.close(EVALUATION_SECONDS):
        return None
    return "\n".join([*complaints, f"kept for later: dist-mem track sync {run_dir}"])


def _uri(config: Any) -> str:
    return config.tracking.uri or mlflow_environment().uri or DEFAULT_URI


def _target(config: Any, run_dir: Path, header: Header) -> Target:
    """The run of a journal; where it has none yet, `tracking.experiment` may be given later than the journal began."""
    if config.tracking.experiment:
        header = header._replace(experiment={"name": config.tracking.experiment})
    return Target(_uri(config), run_dir, header)


def _discreet(report: Callable[[str], None], uri: str) -> Callable[[str], None]:
    """`report` without the user and password of a URI, which end in log files otherwise."""
    credentials, at, _ = urlsplit(uri).netloc.rpartition("@")
    return lambda text: report(text.replace(credentials + at, "") if at else text)


def _settle_run_id(run_dir: Path, run_id: str | None, *, report: Callable[[str], None]) -> None:
    """Note which run is meant, if one is: the run directory's own, the checkpoint's, or that of MLFLOW_RUN_ID."""
    id_file, wished = run_dir / RUN_ID_FILE, mlflow_environment().run_id
    known = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else run_id
    if known and wished and known != wished:
        report(f"MLFLOW_RUN_ID is {wished}, but {run_dir} goes on with its MLflow run {known}")
    if not id_file.exists() and (known or wished):
        write_text(id_file, f"{known or wished}\n")


def _open_journal(config: Any, run_dir: Path, points: Sequence[Point]) -> Journal:
    """The journal of a run; if it has none (MLflow was off until now), one that begins with its points so far."""
    path = run_dir / JOURNAL
    if not path.exists():
        environment = mlflow_environment()
        name = config.tracking.experiment or environment.experiment_name
        experiment = {"id": environment.experiment_id} if environment.experiment_id and not name else {}
        run_name = config.tracking.run_name or config.name
        header = Header(new_uid(), run_name, experiment or {"name": name or DEFAULT_EXPERIMENT})
        write_journal(path, header, [Entry("point", int(point.time * 1000), _body(point)) for point in points])
    return Journal(path)


def _body(point: Point) -> dict[str, Any]:
    return {"step": point.step, "metrics": point.metrics}


def _history(journal: Journal, first_step: int) -> tuple[list[Point], int, int]:
    """The points past `first_step`, the number of system points, and the last step of all (-1 without one)."""
    past, num_system_points, last_step = [], 0, -1
    for entry in read_entries(journal.path):
        if entry.kind == "system":
            num_system_points += 1
        elif entry.kind == "point":
            last_step = max(last_step, entry.body["step"])
            if entry.body["step"] > first_step:
                past.append(Point(entry.body["step"], entry.time / 1000, entry.body["metrics"]))
    return past, num_system_points, last_step


class MlflowSink(Sink):
    """Writes everything into the journal of a run, which a thread sends to MLflow."""

    def __init__(self, journal: Journal, target: Target, rollback: Rollback, *, report: Callable[[str], None]) -> None:
        """Import mlflow and start the thread; the run is found or made there, so that a dead server costs nothing here.

        Args:
            report: takes a line for the user; called from the thread.
        """
        self._journal = journal
        self._run_dir = target.run_dir
        self._rollback = rollback
        self._report = _discreet(report, target.uri)
        self._is_closed = False
        self._system: SystemMetrics | None = None
        self._began = journal.append("status", {"status": "RUNNING"}, time=time.time())
        self._sender = Sender(target, journal.path, report=self._say)
        self._service = f"MLflow at {target.uri}"
        self._delivery = Delivery(self._sender.send, report=self._say, service=self._service)

    @property
    def run_id(self) -> str | None:
        return self._sender.run.run_id

    def add_system_metrics(self, num_points: int) -> None:
        """Record what the machine does from now on, as the points after the first `num_points`."""
        steps = itertools.count(num_points)

        def record(metrics: Mapping[str, float]) -> None:
            self.record("system", {"step": next(steps), "metrics": metrics})

        self._system = SystemMetrics(system_monitors(), record, interval=system_metrics_interval(), report=self._say)

    def log(self, point: Point) -> None:
        if self._rollback.repeats(point):
            return
        self._journal.append("point", _body(point), time=point.time)
        if steps := self._rollback.supersedes(point):
            self.record("superseded", {"first": steps[0], "last": steps[-1], "before": self._began})

    def rewind(self, step: int) -> None:
        past, _, _ = _history(self._journal, step)
        self._rollback = Rollback(past, first_step=step, measurements=self._rollback.measurements)
        self._began = self._journal.begin_anew()

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        self._journal.append(kind, body, time=time.time())

    def close(self, status: str) -> None:
        if self._system is not None:
            self._system.close()
        try:
            self.record("status", {"status": status})
        except OSError as error:  # a full disk; rank 0 must not end otherwise than the others
            self._say(f"{self._journal.path}: {error}; MLflow is not told that the job is {status}")
        self._journal.close()
        if not self._delivery.close(FLUSH_SECONDS):
            self._say(
                f"{self._service} has not got everything yet; resuming the run sends the rest, and so does: "
                f"dist-mem track sync {self._run_dir}"
            )
        self._is_closed = True

    def _say(self, text: str) -> None:
        """Tell the user; not from a thread that still waits for an answer when nobody listens any more."""
        if not self._is_closed:
            self._report(text)
