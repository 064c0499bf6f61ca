"""The reproduce command: build data, train, evaluate and write the table; finished steps are not repeated."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dist_mem.config import load_config
from dist_mem.config.check import hint
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, UnusableError
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import listed
from dist_mem.studies.fingerprint import keep_settings
from dist_mem.studies.job import CommandError, Job, Place, StoppedError
from dist_mem.studies.one_run import run_one
from dist_mem.studies.parent_run import ParentRun
from dist_mem.studies.pool import for_each_run
from dist_mem.studies.results import cell, write_results
from dist_mem.studies.row_check import check, check_rows
from dist_mem.studies.runs import (
    all_runs,
    candidates,
    columns_of,
    figure_commands,
    runs_behind,
    shown_rows,
    train_words,
    with_done,
)
from dist_mem.studies.tables import load_table
from dist_mem.tracking.mlflow.errors import brief
from dist_mem.tracking.provenance import git_state, versions


def run(
    name: str,
    *,
    scale: str,
    out: Path | None,
    rows: Sequence[str],
    seeds: Sequence[int],
    ranks: int,
    extra: Sequence[str],
    only_check: bool = False,
) -> int:
    """Run the command and return the exit code of the process.

    Args:
        name: name of the table, or path of its file.  scale: a scale of the table: tiny, small, paper.
        rows: keys of rows; empty: all.  seeds: empty: those of the scale.
        ranks: processes per training.
        extra: key=value overrides for every training; those of eval and tracking also for every evaluation.
        only_check: only print the resolved settings of every row.

    Raises:
        UnusableError: the table, the scale, the rows or the configuration are invalid.
    """
    table = load_table(name)
    name = Path(table.path).stem
    if scale not in table.scales:
        raise UnusableError(f"{table.path} has no scale {scale!r}; it has: {', '.join(table.scales)}")
    chosen = table.scales[scale]
    known = shown_rows(table, chosen)
    unknown = [row for row in rows if row not in known]
    if unknown:
        close = hint(unknown[0], known)
        raise UnusableError(f"{unknown[0]!r} is not a row of {name} at scale {scale}{close}; rows are{listed(known)}")
    if only_check:
        return check(table, chosen, rows=rows, seeds=seeds, ranks=ranks, extra=list(extra))
    out = out or Path("runs") / "reproduce" / f"{name}.{scale}"
    requested = [one for row in rows or chosen.rows for one in candidates(table, chosen, row)]
    runs = all_runs(chosen, out, seeds or chosen.seeds, requested)
    check_rows(table, chosen, extra, requested)
    with locked(out), StopSignal() as signal:
        keep_settings(table, chosen, out, extra)
        job = Job(table, chosen, out, runs, ranks, list(extra), signal)
        return run_table(job, name=f"{name} ({scale})", places=[Place()], restarts=0)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder for this process, and remove it again if a refusal has left nothing in it but the lock.

    Raises:
        UnusableError: another call is using the folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lock"
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except BlockingIOError:
            is_current = False  # or else the call that had it has just removed it
        if not is_current:
            raise UnusableError(f"{out}: another call of the command uses this folder; wait for it, or give --out")
        try:
            yield
        except UnusableError:
            if [each.name for each in out.iterdir()] == [path.name]:
                path.unlink()
                out.rmdir()
            raise


def run_table(
    job: Job, *, name: str, places: Sequence[Place], restarts: int, write_more: Callable[[], list[Path]] = list
) -> int:
    """Run all runs of a table, write it, and return the exit code of the process.

    Args:
        write_more: writes files beside the table and returns their paths; they go to MLflow too.
    """
    parent = _parent(job, name)
    code, status = EXIT_FAILED, "FAILED"
    try:
        errors = for_each_run(job, job.runs, places, partial(run_one, job), restarts=restarts)
        for error in errors:
            print(f"error: {error}", file=sys.stderr)
        if not errors:
            _draw_figures(job)
            code, status = EXIT_DONE, "FINISHED"
        elif all(isinstance(error, UnusableError) for error in errors):
            code = EXIT_USAGE
    except StoppedError:
        print(f"stopped; the same command continues from here: {job.out}", file=sys.stderr)
        code, status = EXIT_REQUEUE, "KILLED"
    job.runs = with_done(job.table, job.scale, job.out, job.runs)
    paths = write_results(job.table, job.scale, job.runs, job.out, _provenance(job))
    print(paths[0].read_text(encoding="utf-8"))
    print(f"written: {', '.join(str(path) for path in paths)}")
    try:
        paths += write_more()
    finally:
        if parent is not None:
            _close(parent, job, paths, status)
    return code


def _close(parent: ParentRun, job: Job, paths: Sequence[Path], status: str) -> None:
    """Send the table to MLflow; if that fails, print how to send it again, since the files have all results."""
    try:
        parent.close(_figures(job), paths, status=status)
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(f"MLflow did not receive the table: {brief(error)}; the same command sends it again", file=sys.stderr)


def _draw_figures(job: Job) -> None:
    """Draw the figures of the table; one that its runs do not give, as one that diverged, is left out and said."""
    for name, command in figure_commands(job.table, job.runs, job.out, job.extra).items():
        try:
            job.command(command, f"figure-{name}")
            print(f"{name}: {job.out / 'figures'}", flush=True)
        except CommandError as error:
            print(f"{name} is not drawn: {error}", file=sys.stderr)


def _parent(job: Job, name: str) -> ParentRun | None:
    """Return the parent run of all trainings in MLflow; None if tracking is off or MLflow fails."""
    config = load_config(train_words(job.scale, job.runs[0], job.extra))
    if not config.tracking.mlflow:
        return None
    tags = {**git_state().tags, **versions(), "dist_mem.table": name}
    try:
        parent = ParentRun(config, job.out, name=name, tags=tags)
    except Exception as error:  # any of the many libraries under MLflow's stores; trainings buffer their own data
        print(
            f"MLflow has no run for the table: {brief(error)}; its trainings will have no parent there",
            file=sys.stderr,
        )
        return None
    job.environment.update(parent.environment)
    return parent


def _provenance(job: Job) -> dict[str, str]:
    state = git_state()
    commit = state.tags.get("mlflow.source.git.commit", "unknown")[:12] + (
        " and uncommitted changes" if state.diff else ""
    )
    seeds = sorted({item.seed for item in job.runs})
    provenance = {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "seeds": ", ".join(map(str, seeds))}
    provenance["every row"] = f"`{shlex.join(job.scale.train)}`"
    if job.extra:
        provenance["overrides"] = f"`{shlex.join(job.extra)}`"
    return provenance


def _figures(job: Job) -> dict[str, float]:
    """Return means over seeds, for the parent run, by "row/column": "transformer_xl/test"."""
    found: dict[str, Any] = {}
    for name in columns_of(job.table, job.scale):
        for row in shown_rows(job.table, job.scale):
            mine = runs_behind(job.table, job.scale, job.runs, row, name)
            found[f"{row}/{name}"] = cell(mine, name).mean if mine else None
    return {key: value for key, value in found.items() if value is not None}
