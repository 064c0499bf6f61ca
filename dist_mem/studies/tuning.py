"""Tune every row of a study before its runs, by one rule: a grid, chosen on validation.

    tune:
      budget: {flops: 1e12}                                # of a trial; below that of the study, the default,
                                                           # larger rates win
      grid: {optimizer.lr: [0.001, 0.002, 0.004, 0.008]}   # of every row
      rows: {memorizing: {memory.scale_init: [1.0, 10.0]}} # further keys of a row: the product of all
      seeds: [3]                                           # none of the table's: the best of several owes a part
                                                           # to its seed; the default is the next after them
      most: 8                                              # values of a key

While the best value of a key is the first or the last of its grid, the grid grows there by the ratio of its last two
values, up to `most` values: a row is not compared at a setting that was chosen for others. A grid of whole numbers, as
of `memory.mem_len`, grows by whole ones only. Best is the lowest mean of the first column over the seeds, on the
validation split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import NO_FIGURE
from dist_mem.studies.cells import CellRun, read_result
from dist_mem.studies.grid import Choice, choices, override, trial_label
from dist_mem.studies.runs import all_runs, rank_of, with_done
from dist_mem.studies.study import StudyRow
from dist_mem.studies.study_call import StudyCall

FOLDER = "tuning"  # of the trials, in that of the study, and of their cells
_COLUMN = "tuned"

Grid = dict[str, list[Any]]  # key -> values


class TuningResult(NamedTuple):
    """What was found for a row."""

    best: Choice
    metrics: dict[str, str]  # of all trials by their names

    @property
    def words(self) -> list[str]:
        """The overrides that set the best."""
        return _words(self.best)

    def __str__(self) -> str:
        others = ", ".join(f"{trial}: {metric}" for trial, metric in self.metrics.items())
        return f"{_name(self.best)}, chosen on validation ({others})"


def grids_of(job: StudyCall) -> dict[str, Grid]:
    """Return the grids of the rows that a job runs or has finished, without those that are candidates of another."""
    study, done = job.study, with_done(job.study, job.out, job.runs)
    rows = {run.row: None for run in done if run.row not in study.candidates}
    grids = {row: {**study.tune.grid, **study.tune.rows.get(row, {})} for row in rows}
    return {row: grid for row, grid in grids.items() if grid}


def trials_of(job: StudyCall, grids: Mapping[str, Grid]) -> StudyCall:
    """Return the job of the trials: each is a row behind the row that it is a trial of, so that it has its budget."""
    study, tuning = job.study, job.study.tune
    column = next(iter(study.columns.values()))
    rows: dict[str, StudyRow] = {}
    for row, grid in grids.items():
        trials = {_trial(row, settings): settings for settings in choices(grid)}
        rows[row] = replace(study.rows[row], train=None, best_of=list(trials), paper={}, sizes={})
        for name, settings in trials.items():
            rows[name] = StudyRow(name, [*(study.rows[row].train or []), *_words(settings)])
    trial = replace(
        study, rows=rows, seeds=tuning.seeds, budget={**study.budget, **tuning.budget}, figures={},
        columns={_COLUMN: replace(column, split="validation")},
    )  # fmt: skip
    cells = None if job.cells is None else job.cells / FOLDER
    out = job.out / FOLDER
    runs = all_runs(trial, out)
    return replace(job, study=trial, out=out, runs=runs, cells=cells, has_intervals=False, costs={})


def widen(grid: Grid, best: Mapping[str, Any], most: int) -> Grid:
    """Return the grid with a further value beside each best one that is at its edge, of keys with fewer than `most`.

    >>> widen({"optimizer.lr": [0.001, 0.002, 0.004]}, {"optimizer.lr": 0.004}, most=8)
    {'optimizer.lr': [0.001, 0.002, 0.004, 0.008]}
    """
    wider = {}
    for key, values in grid.items():
        wider[key] = values
        if 1 < len(values) < most and all(type(value) in (int, float) and value > 0 for value in values):
            ordered = sorted(values)
            beyond = _whole_beyond if all(isinstance(value, int) for value in values) else _value_beyond
            if best[key] == ordered[-1]:
                wider[key] = [*values, *beyond(ordered[-1], ordered[-2])]
            elif best[key] == ordered[0]:
                wider[key] = [*beyond(ordered[0], ordered[1]), *values]
    return wider


def _value_beyond(edge: float, inner: float) -> list[float]:
    """Return the value beyond the edge of a grid, with three digits."""
    return [float(f"{edge * edge / inner:.3g}")]


def _whole_beyond(edge: int, inner: int) -> list[int]:
    """Return the value beyond the edge of a grid of whole numbers; none if it is not whole: its key may need one."""
    return [edge * edge // inner] if edge * edge % inner == 0 else []


def _words(settings: Choice) -> list[str]:
    return [override(key, value) for key, value in settings]


def _name(settings: Choice) -> str:
    return " ".join(f"{key.rpartition('.')[2]} {trial_label(value)}" for key, value in settings)


def _trial(row: str, settings: Choice) -> str:
    return f"{row} {_name(settings)}"


def choose_best(trials: StudyCall, grids: Mapping[str, Grid]) -> tuple[dict[str, TuningResult], dict[str, Grid]]:
    """Return what the trials found for every row, and the grids of the next trials: the same ones at the end."""
    found = {row: _best(trials, row, grid) for row, grid in grids.items()}
    most = trials.study.tune.most
    return found, {row: widen(grid, dict(found[row].best), most) for row, grid in grids.items()}


def _best(trials: StudyCall, row: str, grid: Grid) -> TuningResult:
    """Return what the trials of a row found. Raises UnusableError if none of them has a result in every seed."""
    metric, seeds = trials.study.columns[_COLUMN].metric, trials.study.seeds
    point = next(iter(trials.study.points))
    found = [
        (settings, [read_result(CellRun(_trial(row, settings), point, seed, trials.out), _COLUMN) for seed in seeds])
        for settings in choices(grid)
    ]
    best, results = min(found, key=lambda each: rank_of(each[1], metric))
    if rank_of(results, metric) == rank_of([None], metric):
        raise UnusableError(f"{row}: {_why_none([results for _, results in found], metric)}")
    return TuningResult(best, {_name(settings): _format_results(results, metric) for settings, results in found})


def _why_none(found: Sequence[Sequence[Mapping[str, Any] | None]], metric: str) -> str:
    """Return why no trial has a result, and what helps."""
    diverged = sum(map(_has_diverged, found))
    if diverged == len(found):
        return "every trial diverged: give tune.grid lower values"
    what = f"{diverged} of {len(found)} trials diverged, and no other has" if diverged else "no trial has"
    return f"{what} {metric}: give the first of `columns` a metric that these data have"


def _has_diverged(results: Sequence[Mapping[str, Any] | None]) -> bool:
    return any("diverged" in (result or {}) for result in results)


def _format_results(results: Sequence[Mapping[str, Any] | None], metric: str) -> str:
    level, rank = rank_of(results, metric)
    return (f"{abs(rank):.4g}", f"{rank:.4g} bits per byte", "diverged" if _has_diverged(results) else NO_FIGURE)[level]
