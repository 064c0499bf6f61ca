"""Tuning of rows: grids that grow until the best is inside, at the budget of a trial, chosen on validation."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_mem.errors import UnusableError
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies.cells import keep_result
from dist_mem.studies.job import Job
from dist_mem.studies.runs import all_runs
from dist_mem.studies.tuning import Grid, chosen, grids_of, trials_of
from tests.studies.small import ARENA, load
from tests.support.messages import refused

RATES = {"optimizer.lr": [0.001, 0.002]}


def job_of(folder: Path, **tune: object) -> Job:
    study = load(folder, ARENA, tune={"budget": {"tokens": 500}, **tune})
    return Job(study, folder / "out", all_runs(study, folder / "out"), 1, [], StopSignal([]))


def kept(trials: Job, best: dict[str, float]) -> None:
    """Keep a metric of every trial that is least at the best rate of its row; far above it, training diverged."""
    for run in trials.runs:
        row, _, rate = run.row.rpartition(" lr ")
        away = math.log(float(rate) / best[row])
        keep_result(run, "tuned", {"diverged": "why"} if away > 4 else {"value": 5 + abs(away), "step": 1})


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(best=st.fixed_dictionaries(dict.fromkeys(ARENA["rows"], st.floats(-4.5, -1.0))), most=st.integers(2, 9))
def test_a_grid_grows_until_the_best_is_inside(best: dict[str, float], most: int) -> None:
    rates = {row: 10**power for row, power in best.items()}
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), grid=RATES, seeds=[0, 1], most=most)
        grids: dict[str, Grid] | None = None
        wider = grids_of(job)
        while wider != grids:
            grids = wider
            trials = trials_of(job, grids)
            kept(trials, rates)
            found, wider = chosen(trials, grids)
        for row, grid in grids.items():
            values = sorted(grid["optimizer.lr"])
            place = values.index(dict(found[row].best)["optimizer.lr"])
            assert len(values) <= most
            assert 0 < place < len(values) - 1 or len(values) == most
            assert abs(math.log(values[place] / rates[row])) == min(abs(math.log(v / rates[row])) for v in values)


def test_trials_have_their_budget_and_a_rows_own_keys(tmp_path: Path) -> None:
    job = job_of(tmp_path, grid=RATES, rows={"transformer_xl": {"memory.mem_len": [8, 16]}})
    trials = trials_of(job, grids_of(job))
    assert trials.study.budget == {"tokens": 500}
    assert {run.row for run in trials.runs} == {
        *(f"none lr {rate}" for rate in RATES["optimizer.lr"]),
        *(f"transformer_xl lr {rate} mem_len {rows}" for rate in RATES["optimizer.lr"] for rows in (8, 16)),
    }
    assert {run.seed for run in trials.runs} == {0}
    assert trials.study.candidates["none lr 0.001"] == "none"
    assert trials.study.columns["tuned"].split == "validation"


def test_rows_that_an_earlier_call_has_finished_are_tuned_too(tmp_path: Path) -> None:
    """Or else they would be checked with the settings of the study, which are not theirs."""
    job = job_of(tmp_path, grid=RATES)
    rows = [run.row for run in job.runs]
    keep_result(job.runs[-1], next(iter(job.study.columns)), {"value": 1.0, "step": 1})
    assert rows[0] != rows[-1]
    assert set(grids_of(replace(job, runs=job.runs[:1]))) == {rows[0], rows[-1]}


def test_trials_that_all_diverged_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, grid=RATES)
    trials = trials_of(job, grids_of(job))
    kept(trials, {"none": 0.001, "transformer_xl": 1e-9})
    with refused(UnusableError, "transformer_xl", "tune.grid"):
        chosen(trials, grids_of(job))


@pytest.mark.parametrize(
    ("tune", "key"),
    [
        ({"grid": {"optimizer.lr": []}}, "tune.grid.optimizer.lr"),
        ({"grid": {"optimizer.lr": [0.1, 0.1]}}, "tune.grid.optimizer.lr"),
        ({"rows": {"xl": RATES}}, "'xl'"),
        ({"grid": RATES, "budget": {"flops": 1e12}}, "'flops'"),
    ],
)
def test_a_grid_of_nothing_is_refused(tmp_path: Path, tune: dict[str, object], key: str) -> None:
    with refused(UnusableError, "one.yaml", key):
        load(tmp_path, ARENA, tune=tune)
