"""Run a study: build its data, train, evaluate and write the table; finished steps are not repeated.

`dist-mem reproduce`, `sweep` and `arena` are the doors to this module.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import torch

from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.config import Config, LaunchConfig, load_config
from dist_mem.config.check import hint
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.launch.code_snapshot import make_for
from dist_mem.launch.submit import has_own_environment, submit_array
from dist_mem.memory import memory_options
from dist_mem.runtime.files import free_name, read_regular, write_text
from dist_mem.runtime.locks import hold_folder
from dist_mem.runtime.ranks import names_of_gpus
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import count_noun, list_names, table
from dist_mem.runtime.versions import processor_name
from dist_mem.studies import estimate
from dist_mem.studies.budget import HEADING, Costs, apply_budget
from dist_mem.studies.cells import CellRun, define, origin_of, take_over
from dist_mem.studies.definition import Settings
from dist_mem.studies.page import write_results
from dist_mem.studies.parent_run import ParentRun
from dist_mem.studies.results import cell
from dist_mem.studies.row_check import check, check_rows, check_trials
from dist_mem.studies.runs import (
    all_runs,
    check_trained,
    definition_of,
    figure_commands,
    rows_behind,
    runs_behind,
    shown_rows,
    train_words,
    with_done,
)
from dist_mem.studies.study import MAX_RUNS, check_seeds, check_words, load_study
from dist_mem.studies.study_call import (
    CommandError,
    Place,
    RunFailure,
    StudyCall,
    StudyStoppedError,
    begin,
    build,
    columns_left,
    for_each_run,
    keep_if_diverged,
    places,
    run_one,
)
from dist_mem.studies.tuning import Grid, choose_best, grids_of, trials_of
from dist_mem.tracking.mlflow.client import first_line
from dist_mem.tracking.provenance import git_state, versions
from dist_mem.tracking.start import check_sinks

_RESTARTS = 3  # of a run that died


@dataclass(frozen=True)
class StudyRequest:
    """What is asked of a study."""

    study: str  # its path, or its name in configs/tables
    command: str  # reproduce, sweep or arena: names the folder of the results
    scale: str = ""  # "": the first of the file
    out: Path | None = None  # None: runs/COMMAND/NAME
    cells: Path | None = None  # a folder of finished cells, to take over and to add to
    rows: Sequence[str] = ()  # empty: all
    seeds: Sequence[int] = ()  # empty: those of the study
    jobs: int = 1  # trainings at the same time
    ranks: int = 1  # processes per training
    extra: Sequence[str] = ()  # key=value for every training; those of eval and tracking also for every evaluation
    max_runs: int = MAX_RUNS  # more are refused
    check: bool = False  # print the resolved settings of every row instead
    plan: bool = False  # print what every row takes within the budget instead
    launch: LaunchConfig | None = None  # submit the trainings with it instead
    estimate: bool = False  # try every row, and say what the study will take
    run: bool = True  # False: end after the estimate


def run(asked: StudyRequest) -> int:
    """Run the command and return the exit code of the process; the same call continues a stopped one.

    Raises:
        UnusableError: the study, the rows or the configurations are invalid, a row does not fit the budget, or sbatch
            refuses the array.
        UnfitError: Slurm does not answer.
    """
    study, extra = load_study(asked.study, asked.scale, max_runs=asked.max_runs), list(asked.extra)
    if asked.command == "arena" and not study.budget:
        raise UnusableError(f"{study.path} has no budget: give one, or compare its rows by `dist-mem sweep`")
    check_words(extra)
    study.seeds = [*asked.seeds] or study.seeds
    check_seeds(study, f"{study.path}: ")
    known = shown_rows(study)
    unknown = [row for row in asked.rows if row not in known]
    if unknown:
        at = f" at scale {study.scale}" if study.scale else ""
        close = hint(unknown[0], known)
        raise UnusableError(f"{unknown[0]!r} is not a row of {study.name}{at}{close}; rows are{list_names(known)}")
    out = asked.out or Path("runs") / asked.command / ".".join(filter(None, (study.name, study.scale)))
    requested = [one for row in asked.rows for one in rows_behind(study, row)]
    runs = all_runs(study, out, rows=requested)
    if study.tune.grid or study.tune.rows:
        check_trials(StudyCall(study, out, runs, asked.ranks, extra, StopSignal([])))
    if asked.check:
        return check(study, rows=asked.rows, ranks=asked.ranks, extra=extra)
    if not study.budget:
        check_rows(study, extra, requested)  # what is refused leaves no folder behind
    with hold_folder(out, str(out)), StopSignal() as signal:
        job = StudyCall(study, out, runs, asked.ranks, extra, signal, cells=asked.cells, made=_origin())
        try:
            return _run_phases(job, asked, requested)
        except StudyStoppedError:
            return _stop_code(out)
        except CommandError as error:
            return _failure_code([error])


def _run_phases(job: StudyCall, asked: StudyRequest, requested: Sequence[str]) -> int:
    """Build, tune, fit, and submit or run a study; see `run`.

    Args:
        requested: rows to check after the budget has changed them; empty: all.

    Raises:
        StudyStoppedError: a signal was received.
        CommandError: the data cannot be built.
    """
    study = job.study
    if study.budget or study.tune.grid or study.tune.rows:
        build(job, job.runs[0], print)  # the sizes depend on the vocabulary
    if not asked.plan and (code := _tune(job, asked)) is not None:
        return code
    if study.budget:
        job.costs = apply_budget(study, partial(_with_extra, extra=job.extra))
        check_rows(study, job.extra, requested)
        job.check_signal()
        print(_cost_table(job.costs), flush=True)
    if asked.plan:
        return EXIT_DONE
    take_cells(job, print)
    if asked.launch is not None:
        return _submit_rows(job, asked.launch, at_once=asked.jobs)
    return _run(job, asked)


def _tune(job: StudyCall, asked: StudyRequest) -> int | None:
    """Give every row its best settings; return an exit code if the call ends here, since trials are still to be run.

    Raises:
        StudyStoppedError: a signal was received.
        UnusableError: a row's trials cannot be run.
    """
    grids = grids_of(job)
    if not grids:
        return None
    everywhere = _places(job, asked)
    is_first = True
    while True:
        trials = trials_of(job, grids)
        trials.costs = apply_budget(trials.study, partial(_with_extra, extra=job.extra))
        check_rows(trials.study, job.extra)
        take_cells(trials, print)
        left = [item for item in trials.runs if columns_left(trials, item)]
        if asked.launch is not None:
            if to_train := _to_train(left):
                return _submit(trials, to_train, asked.launch, at_once=asked.jobs)
        elif left and asked.estimate and (is_first or not asked.run):
            _estimate(trials, everywhere)
        if left and not asked.run:
            return EXIT_DONE
        if asked.run:
            errors = for_each_run(trials, trials.runs, everywhere, partial(run_one, trials), restarts=_RESTARTS)
            if errors:
                return _failure_code(errors)
        found, wider = choose_best(trials, grids)
        wider = {row: _drop_refused(job, row, grid, grids[row]) for row, grid in wider.items()}
        if wider == grids:
            break
        grids, is_first = wider, False
    for row, tuned in found.items():
        job.study.rows[row].train = [*(job.study.rows[row].train or []), *tuned.words]
        job.study.notes.append(f"{row}: {tuned}")
    return None


def _drop_refused(job: StudyCall, row: str, wider: Grid, grid: Grid) -> Grid:
    """Return a wider grid without the added values that its keys do not accept, of which a line is printed."""
    found: Grid = {}
    for key, values in wider.items():
        found[key] = list(grid[key])
        for value in (value for value in values if value not in grid[key]):
            trials = trials_of(job, {row: {**{other: of_other[:1] for other, of_other in grid.items()}, key: [value]}})
            try:
                apply_budget(trials.study, partial(_with_extra, extra=job.extra))
                check_rows(trials.study, job.extra, [name for name in trials.study.rows if name not in job.study.rows])
            except UnusableError as error:
                print(f"{row}: {key}={value}, the next of its grid, is not tried: {error}", flush=True)
            else:
                found[key] = [each for each in values if each in found[key] or each == value]
    return found


def _stop_code(out: Path) -> int:
    print(f"stopped; the same command continues from here: {out}", file=sys.stderr)
    return EXIT_REQUEUE


def _failure_code(errors: Sequence[RunFailure]) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_USAGE if all(map(_is_input, errors)) else EXIT_FAILED


def _is_input(error: RunFailure) -> bool:
    """Return whether what the user gave is wrong, also as a command of the study says it: another start fails too."""
    return isinstance(error, UnusableError) or (isinstance(error, CommandError) and error.code == EXIT_USAGE)


def _places(job: StudyCall, asked: StudyRequest) -> list[Place]:
    gpus = names_of_gpus(torch.cuda.device_count())
    return places(asked.jobs, job.ranks, num_cores=len(os.sched_getaffinity(0)), gpus=gpus)


def _with_extra(words: Sequence[str], *, extra: Sequence[str]) -> Config:
    return load_config([*words, *extra], memory_options=memory_options)


def _cost_table(costs: Mapping[str, Costs]) -> str:
    return "\n".join(table([["row", *HEADING], *([name, *each.texts()] for name, each in costs.items())]))


def take_cells(job: StudyCall, report: Callable[[str], None]) -> None:
    """Take over the finished cells of the folder given, and check that all that are there are of this definition.

    Raises:
        UnusableError: one is of another definition, or a training is.
        StudyStoppedError: a signal was received.
    """
    definition = cache(partial(_definition, job))
    for item in job.runs:
        if job.cells is not None and take_over(item, job.cells, definition(item)):
            report(f"{item.name}: taken over from {job.cells}")
    for item in with_done(job.study, job.out, job.runs):
        job.check_signal()
        check_trained(job.study, item, job.extra, definition(item))
        if item.cell.exists():
            define(item, definition(item))
            keep_if_diverged(job, item, report)
            columns_left(job, item)


def _definition(job: StudyCall, item: CellRun) -> Settings:
    return definition_of(job.study, item, job.extra)


def _to_train(left: Iterable[CellRun]) -> list[CellRun]:
    """Return the runs whose training has not come to its end; the others are only to be measured."""
    return [item for item in left if read_finished(item.directory) is None]


def _submit_rows(job: StudyCall, launch: LaunchConfig, *, at_once: int) -> int:
    """Submit the rows that are not trained. Raises UnusableError if all are."""
    left = [item for item in job.runs if columns_left(job, item)]
    if not left:
        raise UnusableError(f"{job.out}: all runs are finished; the same command without --slurm prints the table")
    if not (to_train := _to_train(left)):
        how = "the same command with --no-estimate in place of --slurm, a site's files and launch.*"
        raise UnusableError(f"{job.out}: all runs are trained; measure them: {how}")
    return _submit(job, to_train, launch, at_once=at_once)


def _submit(job: StudyCall, left: Sequence[CellRun], launch: LaunchConfig, *, at_once: int) -> int:
    """Submit runs as a job array, one job each; once they have ended, a call measures them.

    Args:
        at_once: jobs at the same time.
    """
    tracking = load_config(train_words(job.study, left[0], job.extra), memory_options=memory_options).tracking
    check_sinks(tracking, is_here=not has_own_environment(launch))  # else each job ends after its time in the queue
    for item in left:
        job.check_signal()
        build(job, item, print)
        begin(job, item)
    commands = [train_words(job.study, item, job.extra) for item in left]
    list_of_runs = free_name(job.out / "array" / "runs.txt")  # not slurm/, which would make a run of the study
    list_of_runs.parent.mkdir(parents=True, exist_ok=True)
    write_text(list_of_runs, "".join(f"{shlex.join(words)}\n" for words in commands))
    job.check_signal()
    copy = partial(make_for, commands=commands)
    return submit_array(
        list_of_runs, launch, num_tasks=len(left), at_once=at_once, name=job.study.name, make_snapshot=copy
    )


def _run(job: StudyCall, asked: StudyRequest) -> int:
    """Estimate and run the runs of a job, several at one time, and write the results; see `run`."""
    everywhere = _places(job, asked)
    rows, seeds = ({getattr(item, part) for item in job.runs} for part in ("row", "seed"))
    runs = count_noun(len(job.runs), "run")
    print(f"{count_noun(len(rows), 'row')} with {count_noun(len(seeds), 'seed')}: {runs}", file=sys.stderr)
    seconds = _estimate(job, everywhere) if asked.estimate else None
    if not asked.run:
        return EXIT_DONE
    begin = time.monotonic()
    code = run_study(job, everywhere)
    if code == EXIT_DONE and seconds is not None:
        took = estimate.duration(time.monotonic() - begin)
        print(f"took {took}; the estimate was {estimate.duration(seconds)}")
    return code


def _estimate(job: StudyCall, everywhere: Sequence[Place]) -> float | None:
    """Print what the study will take; return its seconds, None if all is finished.

    Raises:
        UnusableError, UnfitError: the trial of a row failed.
    """
    found, errors = estimate.estimate(job, everywhere)
    if errors:
        error = errors[0]
        text = f"{error}; nothing else was started: correct the row, or begin with --no-estimate"
        raise UnusableError(text) if _is_input(error) else UnfitError(text)
    if not found:
        return None
    device = "GPU" if torch.cuda.is_available() else "CPU"
    print("\n".join(estimate.report(found, num_places=len(everywhere), ranks=job.ranks, device=device)), flush=True)
    return estimate.finish_seconds([one.seconds for one in found], len(everywhere))


def run_study(job: StudyCall, everywhere: Sequence[Place]) -> int:
    """Run all runs of a study, write its results, and return the exit code of the process."""
    parent = _parent(job)
    code, status = EXIT_FAILED, "FAILED"
    try:
        errors = for_each_run(job, job.runs, everywhere, partial(run_one, job), restarts=_RESTARTS)
        if errors:
            code = _failure_code(errors)
        else:
            _draw_figures(job)
            code, status = EXIT_DONE, "FINISHED"
    except StudyStoppedError:
        code, status = _stop_code(job.out), "KILLED"
    job.runs = with_done(job.study, job.out, job.runs)
    paths: list[Path] = []
    try:
        paths = write_results(job, _provenance(job))
        print(read_regular(paths[0]).decode())
        print(f"written: {', '.join(str(path) for path in paths)}")
    finally:
        if parent is not None:
            _close(parent, job, paths, status)
    return code


def _draw_figures(job: StudyCall) -> None:
    """Draw the figures of the study; one that its runs do not give, as one that diverged, is left out and said."""
    for name, command in figure_commands(job.study, job.runs, job.out, job.extra).items():
        try:
            job.command(command, f"figure-{name}")
            print(f"{name}: {job.out / 'figures'}", flush=True)
        except CommandError as error:
            print(f"{name} is not drawn: {error}", file=sys.stderr)


def _origin() -> dict[str, str]:
    """Return the date, the commit, the versions and the processor that make results."""
    state = git_state()
    commit = state.tags.get("mlflow.source.git.commit", "unknown")[:12]
    commit += " and uncommitted changes" if state.diff else ""
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "processor": processor_name(), **versions()}


def _provenance(job: StudyCall) -> dict[str, str]:
    seeds = sorted({item.seed for item in job.runs})
    made = [origin_of(item) for item in job.runs]
    found = {name: sorted({each[name] for each in made if name in each}) for name in ("date", "commit")}
    provenance = {name: ", ".join(texts) for name, texts in {**found, "seeds": map(str, seeds)}.items()}
    provenance["seeds"] += " (means ± their standard deviation)" if len(seeds) > 1 else ""
    provenance["every row"] = f"`{shlex.join(job.study.train)}`"
    if job.extra:
        provenance["overrides"] = f"`{shlex.join(job.extra)}`"
    return provenance


def _parent(job: StudyCall) -> ParentRun | None:
    """Return the parent run of all trainings in MLflow; None if tracking is off or MLflow fails.

    Raises:
        UnusableError: MLflow refuses the experiment or the store, or the run in the folder is not that of this study.
    """
    config = load_config(train_words(job.study, job.runs[0], job.extra))
    if not config.tracking.mlflow:
        return None
    job.environment["MLFLOW_RUN_ID"] = ""  # the user's names the parent, not each of its trainings
    if config.tracking.uri:  # the user names it in the study, for the evaluations of its runs too
        job.environment["MLFLOW_TRACKING_URI"] = config.tracking.uri
    name = job.study.name + (f" ({job.study.scale})" if job.study.scale else "")
    tags = {**git_state().tags, **versions(), "dist_mem.table": name}
    try:
        parent = ParentRun(config.tracking, job.out, name=name, tags=tags)
    except UnusableError:
        raise
    except Exception as error:  # any of the many libraries under MLflow's stores; trainings buffer their own data
        print(
            f"MLflow has no run for the table: {first_line(error)}; its trainings will have no parent there",
            file=sys.stderr,
        )
        return None
    job.environment.update(parent.environment)
    return parent


def _close(parent: ParentRun, job: StudyCall, paths: Sequence[Path], status: str) -> None:
    """Send the table to MLflow; if that fails, print how to send it again, since the files have all results."""
    try:
        parent.close(_means(job), paths, [item.directory for item in job.runs], status=status)
    except Exception as error:  # any of the many libraries under MLflow's stores
        print(
            f"MLflow did not receive the table: {first_line(error)}; the same command sends it again", file=sys.stderr
        )


def _means(job: StudyCall) -> dict[str, float]:
    """Return means over seeds, for the parent run, by "row/column": "transformer_xl/test"."""
    found = {
        f"{row}/{name}": cell(mine, name).mean
        for row in shown_rows(job.study)
        for name in job.study.columns
        if (mine := runs_behind(job.study, job.runs, row, name))
    }
    return {key: value for key, value in found.items() if value is not None}
