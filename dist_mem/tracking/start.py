"""Start the tracking of a run: its sinks, such as metrics.jsonl, a progress bar and MLflow.

Only rank 0 tracks.

    tracker = start_tracking(config, run_dir=run_dir, run_id=None, total_steps=1000, first_step=0)
    tracker.log(10, {"loss": 5.1})            # writes a line to each of two files: tens of microseconds
    tracker.close("FINISHED")                 # takes at most FLUSH_SECONDS of journal_sink.py

MLflow may be slow, down or faulty: all entries for it are written to a journal in the run directory, one thread sends
the journal, and training neither waits nor stops. Entries that are not sent when the job ends are sent by its next
start, by `dist-mem track sync`, or by an evaluation. For some stores, see stores.py, nothing is sent before that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dist_mem.config import Config, TrackingConfig
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import make_folder
from dist_mem.supervision.lease import refuse_if_taken_over_throttled
from dist_mem.tracking.mlflow.journal import JOURNAL, Entry, Header, Journal, new_uid, write_journal
from dist_mem.tracking.mlflow.journal_sink import JournalSink, read_history
from dist_mem.tracking.mlflow.parameters import parameters_entry
from dist_mem.tracking.mlflow.run import target_of
from dist_mem.tracking.mlflow.stores import choose_sending, experiment_of, settle_run_id, store_uri, warn_of_folder
from dist_mem.tracking.progress import progress_sink
from dist_mem.tracking.prometheus_file import PrometheusFile, check_prometheus
from dist_mem.tracking.provenance import start_in_words
from dist_mem.tracking.tensorboard_files import FOLDER as TENSORBOARD
from dist_mem.tracking.tensorboard_files import TensorBoardFiles
from dist_mem.tracking.tracker import METRICS_FILE, MetricsFile, Point, Sink, Tracker
from dist_mem.tracking.wandb_run import WandbRun


def check_sinks(tracking: TrackingConfig) -> None:
    """Check that every sink of a run can be opened, before anything is created.

    Raises:
        UnusableError: a package is missing, or a file cannot be written.
    """
    if tracking.prometheus:
        check_prometheus(Path(tracking.prometheus))
    for name in ("mlflow", "tensorboard", "wandb"):
        if getattr(tracking, name):
            require(name, f"tracking.{name}=true", f"set tracking.{name}=false")


def start_tracking(
    config: Config,
    *,
    run_dir: Path,
    run_id: str | None,
    total_steps: int,
    first_step: int,
    num_points: int = 0,
    measurements: Collection[str] = (),
) -> Tracker:
    """Return the tracker of rank 0; other ranks use `Tracker()`.

    Args:
        run_id: MLflow run of the checkpoint; the file in `run_dir`, which is never older, takes precedence.
        first_step: the step training continues from, 0 for a fresh start; recorded points past it are superseded.
        num_points: points logged up to `first_step`, by the checkpoint's count.
        measurements: names of metrics that an exact resume does not repeat, such as times.
    """
    make_folder(run_dir)
    with ExitStack() as on_failure:  # a start that fails leaves no file open
        progress = progress_sink(total_steps=total_steps, first_step=first_step, every=config.tracking.every)
        on_failure.callback(progress.close, "FAILED")
        if config.tracking.mlflow:
            settle_run_id(run_dir, run_id, report=progress.message)
        guard = partial(refuse_if_taken_over_throttled, run_dir)
        path = run_dir / METRICS_FILE
        metrics_file = MetricsFile(path, first_step=first_step, num_points=num_points, guard=guard)
        on_failure.callback(metrics_file.close, "FAILED")
        if metrics_file.num_lost:
            kept = f"{len(metrics_file.kept)} of the {num_points} points that were logged up to step {first_step}"
            progress.message(f"warning: {path} has {kept}; the others are lost")
        sinks: list[Sink] = [metrics_file, progress]  # progress last: others report through it until they are closed
        if config.tracking.mlflow:
            journal = _open_journal(config, run_dir, metrics_file.kept, guard)
            on_failure.callback(journal.close)
            sink = _journal_sink(
                config,
                run_dir,
                journal,
                metrics_file.kept,
                first_step=first_step,
                measurements=measurements,
                report=progress.message,
                on_failure=on_failure,
            )
            sinks.insert(1, sink)
        sinks[1:1] = _files_for_others(
            config, run_dir, metrics_file.kept, first_step, report=progress.message, on_failure=on_failure
        )
        tracker = Tracker(sinks)
        on_failure.pop_all()
    return tracker


def _files_for_others(
    config: Config,
    run_dir: Path,
    kept: Sequence[Point],
    first_step: int,
    *,
    report: Callable[[str], None],
    on_failure: ExitStack,
) -> list[Sink]:
    """Return the sinks of TensorBoard, Prometheus and W&B, as far as the configuration asks for them."""
    sinks: list[Sink] = []
    if config.tracking.prometheus:
        sinks.append(PrometheusFile(Path(config.tracking.prometheus), run_name=config.name))
    if config.tracking.tensorboard:
        sinks.append(TensorBoardFiles(run_dir / TENSORBOARD, kept, first_step=first_step))
        on_failure.callback(sinks[-1].close, "FAILED")
    if config.tracking.wandb:
        sinks.append(WandbRun(config, run_dir, kept, report=report))
        on_failure.callback(sinks[-1].close, "FAILED")
    return sinks


def _open_journal(config: Config, run_dir: Path, kept: Sequence[Point], guard: Callable[[], None]) -> Journal:
    path = run_dir / JOURNAL
    if not path.exists():  # a new run, or MLflow was off until now
        header = Header(new_uid(), config.tracking.run_name or config.name, experiment_of(config))
        write_journal(path, header, [Entry("point", int(point.time * 1000), _body(point)) for point in kept])
    return Journal(path, guard)


def _journal_sink(
    config: Config,
    run_dir: Path,
    journal: Journal,
    kept: Sequence[Point],
    *,
    first_step: int,
    measurements: Collection[str],
    report: Callable[[str], None],
    on_failure: ExitStack,
) -> JournalSink:
    """Return the sink of the run's journal, after adding points logged without MLflow, and the start of this job."""
    sending = choose_sending(config)
    report(sending.message)
    if warning := warn_of_folder(store_uri(config)):
        report(warning)
    history = read_history(journal, first_step)
    for point in kept:
        if point.step > history.last_step:  # logged by a job without MLflow
            journal.append("point", _body(point), time=point.time)
    target = target_of(config, run_dir, journal.header)
    sink = JournalSink(
        journal,
        target,
        sends=sending.is_on,
        history=history,
        first_step=first_step,
        measurements=measurements,
        report=report,
    )
    on_failure.callback(sink.close, "FAILED")
    if config.tracking.system_metrics:
        sink.add_system_metrics(history.num_system_points)
    sink.record("params", parameters_entry(config, journal.path, step=first_step))
    sink.record("tags", {f"dist_mem.start_{history.num_starts + 1:03}": start_in_words(first_step)})
    return sink


def _body(point: Point) -> dict[str, Any]:
    return {"step": point.step, "metrics": point.metrics}
