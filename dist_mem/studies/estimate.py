"""What a study will take, before it is run: tokens, hours and the time of its end, from the first steps of every row.

A trial of each row runs in a folder of its own, in as many places at a time as the study will have, until it has made
`MEASURED_STEPS` steps after the first ones; then it is stopped, and its columns are measured. Trials save a checkpoint
and track in MLflow if the runs will, but in a store of their own, which is removed.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import Config, load_config
from dist_mem.data.batch_plan import total_steps
from dist_mem.data.curriculum import training_splits
from dist_mem.data.directory import open_tokenizer
from dist_mem.data.lanes import training_plan
from dist_mem.errors import EXIT_DIVERGED, EXIT_REQUEUE, UnusableError
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, number, read_json, record, sha256
from dist_mem.runtime.files import make_folder, write_text
from dist_mem.runtime.terminal import count_noun, table
from dist_mem.studies.runs import CellRun, evaluate_command, train_command, train_words
from dist_mem.studies.study_call import (
    DEVICES,
    Place,
    RunFailure,
    StudyCall,
    build,
    columns_left,
    for_each_run,
    same_command,
)
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.tracking.mlflow.client import connect

MEASURED_STEPS = 20
_FIRST_STEPS = 5  # slower, and not counted
_FOLDER = "estimates"  # below the study's
_STORE = "mlflow"  # below that
_SETTINGS = "settings"  # of what was timed, in the file that keeps the times


@dataclass(frozen=True)
class Trial:
    """Seconds that the parts of one row take."""

    step: float
    evaluation: float  # one during training; 0 if there are none
    rest: float  # start and end of a training, with its last checkpoint
    measuring: float  # of all columns, with the starts of their processes
    saving: float  # of one checkpoint before the last


_TRIAL = record({part.name: number for part in fields(Trial)} | {_SETTINGS: sha256}, is_open=False)


class Estimate(NamedTuple):
    """What one run will take."""

    run: CellRun
    steps: int
    tokens: int
    step_seconds: float
    seconds: float


def estimate(job: StudyCall, places: Sequence[Place]) -> tuple[list[Estimate], list[RunFailure]]:
    """Return the estimates of all runs that are not finished, and the errors of rows whose trial failed.

    The trial of a row is made once; its times are kept in the folder, until the row or the number of places changes.

    Raises:
        StudyStoppedError: a signal was received.
    """
    left = [item for item in job.runs if columns_left(job, item)]
    first = {(item.row, item.point): item for item in reversed(left)}
    untried = [item for item in first.values() if _kept_trial(job, item, len(places)) is None]
    store = job.out / _FOLDER / _STORE
    tracking = _make_store(store) if untried and _config(job, untried[0]).tracking.mlflow else []
    errors = for_each_run(
        job, untried[::-1], places, partial(_try, job, [*job.extra, *tracking], len(places)), restarts=0
    )
    shutil.rmtree(store, ignore_errors=True)
    found = []
    for item in left:
        if (trial := _kept_trial(job, first[item.row, item.point], len(places))) is not None:
            found.append(_estimate_run(job, item, trial))
    return found, errors


def _kept_trial(job: StudyCall, item: CellRun, num_places: int) -> Trial | None:
    """Return the times of an earlier trial; None if there are none of these settings and as many places."""
    kept = _estimate_file(item)
    if not kept.exists():
        return None
    body = read_json(kept, UnusableError, "; remove the file")
    if _SETTINGS not in body:  # of an older version
        return None
    check(body, _TRIAL, kept, UnusableError, "; remove the file")
    return Trial(**body) if body.pop(_SETTINGS) == _settings(job, item, num_places) else None


def _settings(job: StudyCall, item: CellRun, num_places: int) -> str:
    """Return a checksum of the settings that the times of a trial depend on, which are those of all its seeds."""
    parts = [_config(job, replace(item, seed=0)).document, job.ranks, num_places]
    return hashlib.sha256(json_text(parts, sort_keys=True).encode()).hexdigest()


def _estimate_file(item: CellRun) -> Path:
    return item.out / _FOLDER / f"{replace(item, seed=0).name}.json"


def _make_store(folder: Path) -> list[str]:
    """Make a store of MLflow with its tables, whose making is not to be measured, and return the overrides for it."""
    folder = folder.absolute()
    make_folder(folder)
    client = connect(uri := f"sqlite:///{folder / 'store.db'}")
    if client.get_experiment_by_name(_FOLDER) is None:
        client.create_experiment(_FOLDER, artifact_location=(folder / "artifacts").as_uri())
    return [f"tracking.uri={uri}", f"tracking.experiment={_FOLDER}"]


def _try(
    job: StudyCall, given: Sequence[str], num_places: int, item: CellRun, report: Callable[[str], None], place: Place
) -> None:
    """Train a few steps of a row and measure its columns, and keep the times; `given`: overrides."""
    build(job, item, report)
    trial = replace(item, out=item.out / _FOLDER)
    shutil.rmtree(trial.directory, ignore_errors=True)  # of a trial that was stopped
    extra = [*given, f"tracking.every={_FIRST_STEPS}"]
    config = _config(job, item)
    # One of each some steps before the end, or more: a training may be shorter than `MEASURED_STEPS`.
    every = {"eval.every": config.eval.every, "checkpoint.every": config.checkpoint.every}
    every = {key: steps and min(MEASURED_STEPS, steps) for key, steps in every.items()}
    extra += [f"{key}={steps}" for key, steps in every.items() if steps is not None]
    metrics, last = trial.directory / METRICS_FILE, _FIRST_STEPS + MEASURED_STEPS
    begin = time.monotonic()
    code = job.command(
        train_command(job.study, trial, ranks=job.ranks, extra=extra, devices=place.get(DEVICES)),
        f"{item.name}-estimate",
        also=[EXIT_REQUEUE, EXIT_DIVERGED],
        place=place,
        until=lambda: any(point.step >= last for point in read_points(metrics)),
    )
    if code == EXIT_DIVERGED:  # a result of the row, as in the table
        report(f"{item.name}: diverges at once, and is not estimated")
        return
    seconds = time.monotonic() - begin
    points = [point for point in read_points(metrics) if "step_seconds" in point.metrics]
    step = statistics.median([point.metrics["step_seconds"] for point in points[1:] or points])
    of_run = points[-1].metrics
    evaluating, saving = (of_run[f"goodput/{part}"] * of_run["goodput/seconds"] for part in ("evaluation", "saving"))
    # A point is recorded before the evaluation and the checkpoint of its step.
    evaluations, saves = (max(1, (points[-1].step - 1) // steps) if steps else 1 for steps in every.values())
    begin = time.monotonic()
    columns = columns_left(job, item)
    while columns:
        first = next(iter(columns.values()))
        command = evaluate_command(trial, first, given)
        job.command(command, f"{item.name}-estimate", place=place)
        columns = {name: column for name, column in columns.items() if name not in same_command(columns, first)}
    found = Trial(
        step,
        evaluation=evaluating / evaluations,
        rest=max(0.0, seconds - points[-1].step * step - evaluating - saving),
        measuring=time.monotonic() - begin,
        saving=saving / saves,
    )
    body = asdict(found) | {_SETTINGS: _settings(job, item, num_places)}
    write_text(_estimate_file(item), json_text(body) + "\n")
    shutil.rmtree(trial.directory)
    report(f"{item.name}: {step:.3g} s per step")


def _config(job: StudyCall, item: CellRun) -> Config:
    return load_config(train_words(job.study, item, job.extra))


def _estimate_run(job: StudyCall, item: CellRun, trial: Trial) -> Estimate:
    config = _config(job, item)
    try:
        plan = training_plan(config.data, config.train, training_splits(config.data, open_tokenizer(config.data)))
        steps = total_steps(config.train, config.schedule, plan)
    except ValueError as error:
        raise UnusableError(f"{item.name}: {error}") from error
    train, every = config.train, config.eval.every
    tokens = steps * train.global_batch_size * train.seg_len * train.segments_per_update
    evaluations = 0 if every is None else steps // every
    checkpoints = 0 if config.checkpoint.every is None else (steps - 1) // config.checkpoint.every
    seconds = trial.rest + steps * trial.step + evaluations * trial.evaluation + checkpoints * trial.saving
    seconds += trial.measuring
    return Estimate(item, steps, tokens, trial.step, seconds)


def finish_seconds(seconds: Sequence[float], num_places: int) -> float:
    """Return after how many seconds the last run ends, if each begins in the first place that is free."""
    ends = [0.0] * num_places
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def report(found: Sequence[Estimate], *, num_places: int, ranks: int, device: str) -> Iterator[str]:
    """Yield the lines that say what the runs will take.

    Args:
        device: what a rank computes on: GPU or CPU.
    """
    rows: dict[str, list[Estimate]] = {}
    for one in found:
        rows.setdefault("-".join(filter(None, (one.run.row, one.run.point))), []).append(one)
    cells = [("row", "runs", "steps", "tokens", "s/step", "each")]
    for name, mine in rows.items():
        one = mine[0]
        size = (f"{one.steps:,}", _format_count(one.tokens), f"{one.step_seconds:.3g}", duration(one.seconds))
        cells.append((name, str(len(mine)), *size))
    yield from table(cells)
    total = sum(one.seconds for one in found)
    seconds = finish_seconds([one.seconds for one in found], num_places)
    end = datetime.fromtimestamp(time.time() + seconds).strftime("%Y-%m-%d %H:%M")
    work = f"{_format_count(sum(one.tokens for one in found))} tokens, {total * ranks / 3600:.2g} {device}-hours"
    yield f"{count_noun(len(found), 'run')}: {work}; with --jobs {num_places} about {duration(seconds)}, until {end}"


def _format_count(number: float) -> str:
    """Format a count with three digits: 1.23 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03 (hours, minutes, seconds)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
