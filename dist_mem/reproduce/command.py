"""The reproduce command: build data, train, evaluate and write the table; finished steps are not repeated."""

from __future__ import annotations

import fcntl
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dist_mem.config import load_config
from dist_mem.data.shard import INDEX_NAME
from dist_mem.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, UnusableError
from dist_mem.reproduce.fingerprint import keep_settings
from dist_mem.reproduce.parent_run import ParentRun
from dist_mem.reproduce.results import cell, write_results
from dist_mem.reproduce.row_check import check
from dist_mem.reproduce.runs import (
    Run,
    all_runs,
    candidates,
    columns_of,
    data_of,
    evaluate_command,
    figure_commands,
    figure_of,
    keep_result,
    measured,
    newest_report,
    read_result,
    runs_behind,
    shown_rows,
    tied,
    train_command,
    with_done,
)
from dist_mem.reproduce.tables import Column, Scale, Table, load_table
from dist_mem.runtime.environment import with_environment
from dist_mem.runtime.signals import StopSignal
from dist_mem.tracking.mlflow_access import brief
from dist_mem.tracking.provenance import git_state, versions


class CommandError(RuntimeError):
    """A command of the table has failed; its output is in its log."""


class StoppedError(Exception):
    """A signal was received; the running command has received it, saved and ended."""


@dataclass
class Job:
    """The state of one call of the command."""

    table: Table
    scale: Scale
    out: Path
    runs: list[Run]
    ranks: int
    extra: list[str]  # overrides for every training and evaluation
    signal: StopSignal
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, arguments: Sequence[str], log: str, *, also: Sequence[int] = ()) -> int:
        """Run a command with its output in a separate log, and forward a signal to it. Returns its exit code.

        Raises:
            StoppedError: a signal was received.
            CommandError: the command failed, and its exit code is not in `also`.
        """
        path = self.out / "logs" / f"{log}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{shlex.join(arguments)}\n")
            stream.flush()
            process = subprocess.Popen(
                tied(arguments), stdout=stream, stderr=subprocess.STDOUT, env=with_environment(self.environment)
            )
            has_forwarded = False
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if self.signal.received and not has_forwarded:  # only once: each signal interrupts a launcher
                        process.terminate()
                        has_forwarded = True
        if self.signal.received:
            raise StoppedError
        if code not in (EXIT_DONE, *also):
            raise CommandError(f"{shlex.join(arguments)}: exit code {code}; see {path}")
        return code


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
        raise UnusableError(f"{unknown[0]!r} is not a row of {name} at scale {scale}; rows are: {', '.join(known)}")
    if only_check:
        return check(table, chosen, rows=rows, seeds=seeds, ranks=ranks, extra=list(extra))
    out = out or Path("runs") / "reproduce" / f"{name}.{scale}"
    requested = [one for row in rows or chosen.rows for one in candidates(table, chosen, row)]
    runs = all_runs(chosen, out, seeds or chosen.seeds, requested)
    with _locked(out), StopSignal() as signal:
        keep_settings(table, chosen, out, extra)
        job = Job(table, chosen, out, runs, ranks, list(extra), signal)
        return _run(job, name=f"{name} ({scale})")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the folder for this process. Raises UnusableError if another call is using it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnusableError(
                f"{out}: another call of the command uses this folder; wait for it, or give --out"
            ) from error
        yield


def _run(job: Job, *, name: str) -> int:
    parent = _parent(job, name)
    code, status = EXIT_FAILED, "FAILED"
    try:
        for number, item in enumerate(job.runs, start=1):
            _one_run(job, item, progress=f"[{number}/{len(job.runs)}]")
        _draw_figures(job)
        code, status = EXIT_DONE, "FINISHED"
    except StoppedError:
        print(f"stopped; the same command continues from here: {job.out}", file=sys.stderr)
        code, status = EXIT_REQUEUE, "KILLED"
    except (CommandError, UnusableError) as error:
        code = EXIT_USAGE if isinstance(error, UnusableError) else EXIT_FAILED
        print(f"error: {error}", file=sys.stderr)
    job.runs = with_done(job.table, job.scale, job.out, job.runs)
    paths = write_results(job.table, job.scale, job.runs, job.out, _provenance(job))
    print(paths[0].read_text(encoding="utf-8"))
    print(f"written: {', '.join(str(path) for path in paths)}")
    if parent is not None:
        _close(parent, job, paths, status)
    return code


def _close(parent: ParentRun, job: Job, paths: Sequence[Path], status: str) -> None:
    """Send the table to MLflow; if that fails, print how to send it again, since the files have all results."""
    try:
        parent.close(_figures(job), paths, status=status)
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(f"MLflow did not receive the table: {brief(error)}; the same command sends it again", file=sys.stderr)


def _one_run(job: Job, item: Run, *, progress: str) -> None:
    """Build, train and evaluate, except for finished steps."""

    def report(text: str) -> None:
        print(f"{progress} {text}", flush=True)

    columns = measured(job.table, job.scale, item)
    missing = {name: column for name, column in columns.items() if read_result(item, name) is None}
    if not missing:
        report(f"{item.name}: already done")
        return
    _build(job, item, {"train", *(column.split for column in columns.values())}, report)
    report(f"{item.name}: training")
    code = job.command(
        train_command(job.scale, item, ranks=job.ranks, extra=job.extra), f"{item.name}-train", also=[EXIT_DIVERGED]
    )
    for name in missing if code == EXIT_DIVERGED else ():
        keep_result(item, name, {"diverged": f"see logs/{item.name}-train.txt"})
        report(f"{item.name}: {name} diverged")
    while left := [name for name in missing if read_result(item, name) is None]:
        for name, value in _measure(job, item, missing, left[0]).items():
            report(f"{item.name}: {name} {'n/a' if value is None else f'{value:.4g}'}")


def _draw_figures(job: Job) -> None:
    """Draw the figures of the table; one that its runs do not give, as one that diverged, is left out and said."""
    for name, command in figure_commands(job.table, job.runs, job.out, job.extra).items():
        try:
            job.command(command, f"figure-{name}")
            print(f"{name}: {job.out / 'figures'}", flush=True)
        except CommandError as error:
            print(f"{name} is not drawn: {error}", file=sys.stderr)


def _build(job: Job, item: Run, splits: set[str], report: Callable[[str], None]) -> None:
    """Build the data of a run if they are missing. Raises UnusableError if the table cannot build them."""
    path, point = Path(data_of(job.scale, item)), job.scale.points[item.point]

    def is_built() -> bool:
        return all((path / split / INDEX_NAME).exists() for split in splits)  # a builder writes them last

    if is_built():
        return
    if point.build:
        report(f"building {path}")
        for command in point.build:
            job.command([sys.executable if word == "python" else word for word in command], f"build-{path.name}")
    if not is_built():
        how = f"build it with: {point.made_by}" if point.made_by else f"see {job.table.source}"
        raise UnusableError(f"{path} is missing, and the table cannot build it; {how}")


def _measure(job: Job, item: Run, columns: Mapping[str, Column], name: str) -> dict[str, float | None]:
    """Run the command of a column, and store its figure and those of other columns with the same command."""
    first = columns[name]
    job.command(evaluate_command(item, first, job.extra), f"{item.name}-{name}")
    report = newest_report(item, first)
    values: dict[str, float | None] = {}
    for other, column in columns.items():
        if replace(column, figure=first.figure, band=first.band) != first:
            continue
        value, step = figure_of(report, column)
        values[other] = value  # None if a requirement is missing, as WordNet for METEOR
        measured = {"absent": f"{column.split}/{column.figure}"} if value is None else {"value": value}
        keep_result(item, other, {**measured, "step": step, "evaluate": list(column.evaluate)})
    return values


def _parent(job: Job, name: str) -> ParentRun | None:
    """Return the parent run of all trainings in MLflow; None if tracking is off or MLflow fails."""
    first = job.runs[0]
    command = train_command(job.scale, first, ranks=1, extra=job.extra)
    config = load_config(command[command.index("train") + 1 :])
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
