"""Start the tracking of a run: metrics.jsonl, a progress bar, MLflow. Only rank 0 tracks.

    tracker = start_tracking(config, run_dir=run_dir, run_id=None, total_steps=1000, first_step=0)
    tracker.log(10, {"loss": 5.1})            # writes a line to each of two files: tens of microseconds
    tracker.close("FINISHED")                 # takes at most FLUSH_SECONDS of journal_sinks.py

MLflow may be slow, down or faulty: all entries for it are written to a journal in the run directory, one thread sends
the journal, and training neither waits nor stops. Entries that are not sent when the job ends are sent by its next
start, by `dist-mem track sync`, or by an evaluation. For some stores, see stores.py, nothing is sent before that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dist_mem.errors import UnusableError
from dist_mem.runtime.files import make_folder
from dist_mem.runtime.lease import refuse_if_stood_still
from dist_mem.tracking.delivery import Delivery, Sender
from dist_mem.tracking.journal import (
    Entry,
    Header,
    Journal,
    find_entries,
    new_uid,
    read_entries,
    read_header,
    write_journal,
)
from dist_mem.tracking.journal_sinks import JournalSink, MlflowSink, discreet, read_history
from dist_mem.tracking.mlflow_run import Target, import_mlflow_quietly
from dist_mem.tracking.progress import progress_sink
from dist_mem.tracking.provenance import start_in_words, without_credentials
from dist_mem.tracking.run_id import settle_run_id
from dist_mem.tracking.sinks import METRICS_FILE, MetricsFile, Point, Sink
from dist_mem.tracking.stores import choose_sending, experiment_of, is_local, is_named_by_user, store_uri
from dist_mem.tracking.tracker import Tracker

JOURNAL = Path("mlflow") / "train.jsonl"  # in the run directory; journals of evaluations are in the same folder
EVALUATION_SECONDS = 10.0  # longest wait of an evaluation for MLflow
_EVALUATIONS = "evaluation-*.jsonl"


def start_tracking(
    config: Any,
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
    progress = progress_sink(total_steps=total_steps, first_step=first_step, every=config.tracking.every)
    if config.tracking.mlflow:
        settle_run_id(run_dir, run_id, report=progress.message)
    guard = partial(refuse_if_stood_still, run_dir)
    path = run_dir / METRICS_FILE
    metrics_file = MetricsFile(path, first_step=first_step, num_points=num_points, guard=guard)
    if metrics_file.num_lost:
        kept = f"{len(metrics_file.kept)} of the {num_points} points that were logged up to step {first_step}"
        progress.message(f"warning: {path} has {kept}; the others are lost")
    sinks: list[Sink] = [metrics_file]
    if config.tracking.mlflow:
        sinks.append(
            _journal_sink(
                config,
                run_dir,
                metrics_file.kept,
                first_step=first_step,
                measurements=measurements,
                report=progress.message,
            )
        )
    tracker = Tracker([*sinks, progress])  # progress last: other sinks report through it until they are closed
    # Unresolved: a value from the environment may be a secret.
    tree: Any = OmegaConf.to_container(config, resolve=False)
    tracker.log_params(tree, step=first_step)
    return tracker


def _journal_sink(
    config: Any, run_dir: Path, kept: Sequence[Point], *, first_step: int, report: Callable[[str], None], **options: Any
) -> JournalSink:
    """Return the sink of the run's journal, after adding points logged without MLflow, and the start of this job."""
    sending = choose_sending(config)
    report(sending.message)
    journal = _open_journal(config, run_dir, kept, partial(refuse_if_stood_still, run_dir))
    history = read_history(journal.path, first_step)
    for point in kept:
        if point.step > history.last_step:  # logged by a job without MLflow
            journal.append("point", _body(point), time=point.time)
    options |= {"past": history.past, "first_step": first_step, "report": report}
    target = _target(config, run_dir, journal.header)
    sink = MlflowSink(journal, target, **options) if sending.is_on else JournalSink(journal, run_dir, **options)
    if config.tracking.system_metrics:
        sink.add_system_metrics(history.num_system_points)
    sink.record("tags", {f"dist_mem.start_{history.num_starts + 1:03}": start_in_words(first_step)})
    return sink


def send_journals(
    config: Any,
    run_dir: Path,
    *,
    report: Callable[[str], None],
    is_dead: Callable[[], bool] = lambda: False,
    is_named: bool = True,
) -> Sender:
    """Send all entries of a run's journals that MLflow lacks, also while the job runs.

    Args:
        is_dead: returns whether a job that has not reported its end is dead; MLflow's run becomes KILLED then, until
            its next start.
        is_named: whether the user names the store; otherwise `config` has it from the run directory, and a server is
            not contacted.

    Returns:
        The sender, which has the number of sent entries.

    Raises:
        ValueError: the run has no journal, or only the run directory names the server.
        Exception: any error of MLflow's client; another call sends the rest.
    """
    journal = run_dir / JOURNAL
    if not journal.exists():
        raise ValueError(f"{journal} is missing: the run was never tracked with MLflow")
    target = _target(config, run_dir, read_header(journal))._replace(is_named=is_named)
    if not (is_named or is_local(target.uri)):
        raise UnusableError(
            f"only the configuration in the run directory names MLflow at {without_credentials(target.uri)}; to "
            f"log in to that server, name it: {_naming(config, run_dir)}"
        )
    sender = Sender(target, journal, report=discreet(report, target.uri))
    sender.send()
    for path in sorted(journal.parent.glob(_EVALUATIONS)):
        with suppress(FileNotFoundError):  # another process has sent it
            sender.send_whole(path)
        path.unlink(missing_ok=True)
    status = find_entries(journal, "status")[-1:]
    if status and status[0].body["status"] == "RUNNING" and is_dead():
        (last,) = deque(read_entries(journal), maxlen=1)
        sender.run.send(Entry("status", last.time, {"status": "KILLED"}))
        report("its job was killed outright; the run is KILLED in MLflow until it is resumed")
    return sender


def log_to_run(
    config: Any,
    *,
    run_dir: Path,
    step: int,
    metrics: Mapping[str, float],
    files: Sequence[Path],
    overrides: Sequence[str] = (),
) -> str | None:
    """Add metrics and files of the run directory to a running or finished run; its status does not change.

    Args:
        overrides: of the command line; a server that neither they nor the environment name is not contacted.

    Returns:
        None if MLflow has everything within `EVALUATION_SECONDS`, else a message for the user. It is not an error,
        because the report of the evaluation is on disk.
    """
    journal = run_dir / JOURNAL
    if not journal.exists():
        return f"{journal} is missing: the run was never tracked with MLflow, and neither is this evaluation"
    now = int(time.time() * 1000)
    artifacts = [Entry("artifact", now, {"path": str(path.relative_to(run_dir))}) for path in files]
    point = Entry("point", now, {"step": step, "metrics": metrics})
    path = journal.parent / _EVALUATIONS.replace("*", new_uid())
    write_journal(path, read_header(journal), [point, *artifacts])  # in one write: a sender deletes it
    is_named = is_named_by_user(config, overrides)
    if not (is_named or is_local(store_uri(config))):
        return f"only the run directory names its MLflow server; to send the evaluation: {_naming(config, run_dir)}"
    import_mlflow_quietly()  # here: an import can take seconds on a slow disk, and EVALUATION_SECONDS are for MLflow
    messages: list[str] = []
    delivery = Delivery(
        lambda: send_journals(config, run_dir, report=messages.append, is_named=is_named),
        report=discreet(messages.append, store_uri(config)),
        service=f"MLflow at {store_uri(config)}",
    )
    if delivery.close(EVALUATION_SECONDS):
        return None
    return "\n".join([*messages, f"kept for later: dist-mem track sync {run_dir}"])


def _naming(config: Any, run_dir: Path) -> str:
    """Return the command that names the server of a run's configuration."""
    uri = without_credentials(store_uri(config))
    return f"dist-mem track sync {run_dir} tracking.uri={uri}, or set MLFLOW_TRACKING_URI"


def _target(config: Any, run_dir: Path, header: Header) -> Target:
    """Return the run of a journal. `tracking.experiment` may be set after the journal exists, before the run does."""
    if config.tracking.experiment:
        header = header._replace(experiment={"name": config.tracking.experiment})
    return Target(store_uri(config), run_dir, header)


def _open_journal(config: Any, run_dir: Path, points: Sequence[Point], guard: Callable[[], None]) -> Journal:
    """Open the journal of a run; without one (MLflow was off until now), create it from the run's points so far."""
    path = run_dir / JOURNAL
    if not path.exists():
        header = Header(new_uid(), config.tracking.run_name or config.name, experiment_of(config))
        write_journal(path, header, [Entry("point", int(point.time * 1000), _body(point)) for point in points])
    return Journal(path, guard)


def _body(point: Point) -> dict[str, Any]:
    return {"step": point.step, "metrics": point.metrics}
