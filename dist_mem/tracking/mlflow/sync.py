"""Send what MLflow lacks of a run: `dist-mem track sync RUN`, and the results of an evaluation.

    dist-mem track sync runs/demo runs/none tracking.uri=http://mlflow.example:5000
    dist-mem track sync runs/demo configs/demo.yaml             # with the `tracking:` block of a user's file

Use it for runs that ended while MLflow was down, and on the login node of clusters whose compute nodes have no network:
also while the job runs, and any number of times. A run whose job was killed outright and not started again becomes
KILLED instead of RUNNING.

A checkpoint counts the points that were logged before it. A resumed run does not log them again, so every one of them
must be in the log, and every point of the log that counts in MLflow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import TrackingConfig, load_block
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UnusableError
from dist_mem.runtime.extras import is_installed, not_installed
from dist_mem.runtime.files import is_missing, read_regular
from dist_mem.runtime.terminal import count_noun
from dist_mem.supervision.lease import is_abandoned
from dist_mem.tracking.log import (
    METRICS_FILE,
    Entry,
    LogError,
    check_log,
    counted_steps,
    last_entry,
    new_uid,
    read_header,
    write_log,
)
from dist_mem.tracking.mlflow.client import first_line, import_mlflow_quietly, remedy_for
from dist_mem.tracking.mlflow.database import ForeignError
from dist_mem.tracking.mlflow.run import target_of
from dist_mem.tracking.mlflow.sender import Delivery, Sender, hide_credentials
from dist_mem.tracking.mlflow.store import check_named, check_store, is_named_by_user, store_uri, sync_command
from dist_mem.tracking.provenance import without_credentials

EVALUATION_SECONDS = 10.0  # longest wait of an evaluation for MLflow
_EVALUATIONS = "mlflow/evaluation-*.jsonl"  # of a run directory: what evaluations have for MLflow


class CheckpointCount(NamedTuple):
    """The number of points that a checkpoint counts."""

    step: int
    num_points: int


CountPoints = Callable[[Path], CheckpointCount | None]  # of a run directory; None: no checkpoint counts them


def run(
    run_dirs: Sequence[Path], overrides: Sequence[str] = (), files: Sequence[str] = (), *, count: CountPoints
) -> int:
    """Run the command; return the exit code of the process, 0 if MLflow has everything of every run.

    Args:
        overrides: `key=value`, for keys of `tracking`.
        files: YAML files of the user, of which the `tracking:` block is used.
        count: returns how many points the newest checkpoint of a run counts.

    Raises:
        UnusableError: an override is invalid, or a directory is not that of a run.
    """
    if not run_dirs:
        raise UnusableError("give the directories of one or more runs")
    given = [*files, *overrides]
    trackings = [read_tracking(run_dir, given) for run_dir in run_dirs]
    return max(_sync(tracking, run_dir, given, count) for tracking, run_dir in zip(trackings, run_dirs, strict=True))


def read_tracking(run_dir: Path, given: Sequence[str]) -> TrackingConfig:
    """Read the `tracking` block of a run.

    Args:
        given: overrides and files of the user.

    Raises:
        UnusableError: a value is invalid, or this is no directory of a run.
    """
    if (uri := load_block(TrackingConfig, "tracking", given).uri) is not None:
        check_store(uri)
    path = run_dir / "config.yaml"
    if is_missing(path):
        raise UnusableError(f"{path} is missing; give the directory of a run")
    return load_block(TrackingConfig, "tracking", given, saved=path)


def _sync(tracking: TrackingConfig, run_dir: Path, given: Sequence[str], count: CountPoints) -> int:
    def report(text: str) -> None:
        print(f"{run_dir}: {text}")

    try:
        is_named = is_named_by_user(tracking, given)
        logged = count(run_dir)  # before sending, because a job may be running
        sender = send_log(tracking, run_dir, report=report, is_dead=lambda: _is_dead(run_dir), is_named=is_named)
        gaps = [*_gaps_of_log(run_dir, logged), *_gaps_of_mlflow(sender)]
    except UnusableError as error:
        print(f"error: {run_dir}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(f"error: {run_dir}: MLflow does not have everything: {first_line(error)}", file=sys.stderr)
        return EXIT_USAGE if remedy_for(error) else EXIT_FAILED
    gaps += [f"MLflow refused {count_noun(len(sender.run.refused), 'name')}, see above"] if sender.run.refused else []
    for gap in gaps:
        print(f"error: {run_dir}: {gap}", file=sys.stderr)
    if gaps:
        report(f"{sender.num_sent} entries sent; MLflow has all that is left, but points are missing")
        return EXIT_FAILED
    report(
        f"{sender.num_sent} entries sent; MLflow has everything" if sender.num_sent else "MLflow has everything already"
    )
    return EXIT_DONE


def _is_dead(run_dir: Path) -> bool:
    """Whether no job holds the run directory: its lease is gone, or its holder shows no sign of life."""
    path = run_dir / "lease.json"
    with suppress(FileNotFoundError):
        return is_abandoned(path, read_regular(path).decode(errors="replace"))
    return True


def send_log(
    tracking: TrackingConfig,
    run_dir: Path,
    *,
    report: Callable[[str], None],
    is_dead: Callable[[], bool] = lambda: False,
    is_named: bool = True,
) -> Sender:
    """Send all that MLflow lacks of a run's log and evaluations, also while the job runs.

    Args:
        is_dead: returns whether a job that has not reported its end is dead; MLflow's run becomes KILLED then, until
            its next start.
        is_named: whether the user names the store; otherwise only the default one is used.

    Returns:
        The sender, which has the number of sent entries.

    Raises:
        UnusableError: the run has no log, or a damaged one, or only the run directory names the store.
        Exception: any error of MLflow's client; another call sends the rest.
    """
    check_named(tracking, run_dir, is_named=is_named)
    kept = _check_entries(run_dir)
    return _send(tracking, run_dir, kept, report=report, is_dead=is_dead, is_named=is_named)


def _check_entries(run_dir: Path) -> list[Path]:
    """Check every entry of the log of a run and of its evaluations, which takes seconds for a long run.

    Returns:
        The evaluations.

    Raises:
        UnusableError: the run has no log, or a damaged one.
    """
    log = run_dir / METRICS_FILE
    if not log.exists():
        raise UnusableError(f"{log} is missing: the run has recorded nothing")
    header, kept = read_header(log), sorted(run_dir.glob(_EVALUATIONS))
    for path in (log, *kept):
        with suppress(FileNotFoundError):  # another process has sent it
            check_log(path)
            if read_header(path).uid != header.uid:
                raise LogError(f"{path} is an evaluation of another run than {log}: move it away")
    return kept


def _send(
    tracking: TrackingConfig,
    run_dir: Path,
    kept: Sequence[Path],
    *,
    report: Callable[[str], None],
    is_dead: Callable[[], bool] = lambda: False,
    is_named: bool,
) -> Sender:
    """Send what `_check_entries` has checked; `kept` are the evaluations. See `send_log`."""
    log = run_dir / METRICS_FILE
    target = target_of(tracking, run_dir, read_header(log), is_named=is_named)
    sender = Sender(target, log, report=hide_credentials(report, target.uri))
    sender.send()
    for path in kept:
        with suppress(FileNotFoundError):  # another process has sent it
            sender.send_whole(path)
        path.unlink(missing_ok=True)
    status, last = last_entry(log, "status"), last_entry(log)
    if status and last and status.body["status"] == "RUNNING" and is_dead():
        sender.run.send(Entry("status", last.time, {"status": "KILLED"}))
        report("its job was killed outright; the run is KILLED in MLflow until it is resumed")
    return sender


def log_to_run(
    tracking: TrackingConfig,
    *,
    run_dir: Path,
    step: int,
    metrics: Mapping[str, float],
    files: Sequence[Path],
    overrides: Sequence[str] = (),
) -> str | None:
    """Add metrics and files of the run directory to a running or finished run; its status does not change.

    Args:
        metrics: of `step`; empty: only files are added.
        overrides: of the command line; a store that neither they nor the environment name is not used, but the default.

    Returns:
        A message for the user if MLflow refused a name or a file, or has not got everything within
        `EVALUATION_SECONDS`. It is not an error, because the report of the evaluation is on disk.

    Raises:
        UnusableError: the log is damaged, or the store or its run belongs to somebody else.
    """
    log = run_dir / METRICS_FILE
    if not log.exists():
        return f"{log} is missing: the run has recorded nothing, and its evaluation is not sent to MLflow either"
    now = int(time.time() * 1000)
    artifacts = [Entry("artifact", now, {"path": str(path.relative_to(run_dir))}) for path in files]
    points = [Entry("point", now, {"step": step, "metrics": metrics})] if metrics else []
    models = [Entry("checkpoint", now, {"step": step, "points": points})] if metrics else []
    path = run_dir / _EVALUATIONS.replace("*", new_uid())
    write_log(path, read_header(log), [*points, *models, *artifacts])  # in one write: a sender deletes it
    is_named, kept = (
        is_named_by_user(tracking, overrides),
        f"the evaluation is kept: {sync_command(tracking, run_dir)} sends it",
    )
    try:
        check_named(tracking, run_dir, is_named=is_named)
    except UnusableError as error:
        return f"{error}; {kept}"
    if not is_installed("mlflow"):
        return f"{not_installed('mlflow', 'MLflow tracking')}; {kept}"
    # Here, because EVALUATION_SECONDS are for MLflow: entries of a long run and an import take seconds.
    try:
        evaluations = _check_entries(run_dir)
    except LogError as error:
        raise UnusableError(f"{error}; {kept}") from error
    except (OSError, UnusableError) as error:
        return f"{error}; {kept}"
    import_mlflow_quietly()
    messages: list[str] = []
    senders: list[Sender] = []
    delivery = Delivery(
        lambda: senders.append(_send(tracking, run_dir, evaluations, report=messages.append, is_named=is_named)),
        report=hide_credentials(messages.append, store_uri(tracking)),
        service=f"MLflow at {store_uri(tracking)}",
    )
    if delivery.close(EVALUATION_SECONDS):
        refused = [text for sender in senders for text in (*sender.run.refused.values(), *sender.refused)]
        return "\n".join(refused) or None
    if isinstance(delivery.error, (ForeignError, LogError)):
        raise UnusableError(f"{delivery.error}; {kept}")
    if not messages:
        shown = without_credentials(store_uri(tracking))
        messages.append(f"MLflow at {shown} has not taken the evaluation within {EVALUATION_SECONDS:.0f} s")
    return "\n".join([*messages, kept])


def _gaps_of_log(run_dir: Path, logged: CheckpointCount | None) -> Iterator[str]:
    """Yield the points of a checkpoint that the log lacks. Raises UnusableError if the log has a damaged line."""
    path = run_dir / METRICS_FILE
    steps = [step for step in counted_steps(path) if logged is not None and step <= logged.step]
    if logged is not None and len(steps) < logged.num_points:
        last = f", the last of step {steps[-1]}" if steps else ""
        has = f"{path} has {len(steps)} of the {logged.num_points} points"
        yield f"{has} that were logged up to step {logged.step}{last}; the others are lost"


def _gaps_of_mlflow(sender: Sender) -> Iterator[str]:
    """Yield the points that MLflow lacks after `sender` has sent the log. Raises any error of MLflow's client."""
    for name, absent in sender.gaps():
        yield f"MLflow lacks {_list_points(absent)} of {name}, which it accepted before, or refused"


def _list_points(steps: Collection[int]) -> str:
    places = f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
    return f"{len(steps)} point{'s' * (len(steps) > 1)} ({places})"
