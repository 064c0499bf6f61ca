"""What the runs of a row have in every column, and how rows compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dist_mem.evaluation.intervals import Interval, compare_over_seeds, find_settled, intervals, paired_intervals
from dist_mem.evaluation.scores import METRICS, POSITION_METRIC, Report
from dist_mem.runtime.figures import NO_FIGURE
from dist_mem.studies.budget import Costs
from dist_mem.studies.cells import CellRun, read_result, report_of, speed_of
from dist_mem.studies.runs import BITS, band_of, rank_of, runs_behind, shown_rows
from dist_mem.studies.study import Column, Study

NOT_GIVEN = "-"

SHARES = ("accuracy", "whole_answers")  # metrics of which a higher one is better


class RowResult(NamedTuple):
    """The results of one row in one column."""

    values: list[float]  # one per evaluated seed
    diverged: int  # seeds whose training diverged
    absent: int  # seeds whose evaluation has no such metric
    missing: int  # seeds still to be run
    in_bits: tuple[float, ...] = ()  # per byte, of absent perplexities that are no figures

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    def text(self) -> str:
        """Return the mean ± standard deviation of the seeds, and what has no value."""
        parts = []
        if self.values:
            mean = statistics.fmean(self.values)
            several = len(self.values) > 1
            parts.append(with_spread(mean, statistics.stdev(self.values)) if several else f"{mean:.4g}")
        if self.diverged:
            parts.append(f"{self.diverged} diverged")
        if self.absent:
            bits = f" ({statistics.fmean(self.in_bits):.4g} bits per byte)" if self.in_bits else ""
            parts.append(f"{NO_FIGURE}{bits}")
        if self.missing:
            parts.append(f"{self.missing} to run")
        return ", ".join(parts) or NOT_GIVEN


def with_spread(mean: float, spread: float) -> str:
    """Return "3.957 ± 0.018": two digits of the spread, and as many decimals of the mean."""
    if not (math.isfinite(spread) and spread > 0):
        return f"{mean:.4g} ± {spread:g}"
    decimals = max(0, 1 - math.floor(math.log10(spread)))
    return f"{mean:.{decimals}f} ± {spread:.{decimals}f}"


def cell(runs: Sequence[CellRun], column: str) -> RowResult:
    """Return the results of a column over the runs of a row."""
    found = [read_result(run, column) for run in runs]
    values = [result["value"] for result in found if result is not None and "value" in result]
    diverged = sum(result is not None and "diverged" in result for result in found)
    absent = sum(result is not None and "absent" in result for result in found)
    bits = tuple(result[BITS] for result in found if result is not None and BITS in result)
    return RowResult(values, diverged, absent, missing=found.count(None), in_bits=bits)


class RowSummary(NamedTuple):
    """What a row reached within its budget, and what it took."""

    mean: float | None  # of the first column
    rank: tuple[int, float]  # `rank_of` its seeds
    interval: Interval | None  # of the gain over the first row
    is_settled: bool  # the interval excludes equality also after correction for all rows
    costs: Costs
    speed: float | None  # tokens/s of a training, the median of its points; the mean over the seeds


def standings(study: Study, runs: Sequence[CellRun], costs: Mapping[str, Costs]) -> dict[str, RowSummary]:
    """Return what is known of every row of a study with a budget that has runs, in the order of the file."""
    name, column = next(iter(study.columns.items()))
    shown = table_rows(study) if costs else ()
    rows = {row: mine for row in shown if (mine := runs_behind(study, runs, row, name))}
    scored = {row: {run.seed: report for run in mine if (report := report_of(run, name))} for row, mine in rows.items()}
    gains = gains_of_rows(scored, column, paired=study.paired)
    marked = find_settled(gains) if len(compare_over_seeds(gains)) > 1 else set[str]()
    found = {}
    for row, mine in rows.items():
        speeds = [speed for run in mine if (speed := speed_of(run)) is not None]
        gain = gains.get(row)
        found[row] = RowSummary(
            cell(mine, name).mean,
            rank_of_runs(mine, name, column),
            gain if isinstance(gain, Interval) else None,
            row in marked,
            costs[mine[0].row],
            statistics.fmean(speeds) if speeds else None,
        )
    return found


def rank_of_runs(runs: Sequence[CellRun], name: str, column: Column) -> tuple[int, float]:
    """Return `rank_of` the runs of a row that are measured: a row with a seed that diverged comes last."""
    known = [result for run in runs if (result := read_result(run, name)) is not None]
    return rank_of(known or [{}], column.metric)


def table_rows(study: Study) -> list[str]:
    """Return the rows of the Markdown; with a budget, of which a picture compares all, only the best of others."""
    return [row for row in shown_rows(study) if not (study.budget and row in study.candidates)]


def gains_of_rows(
    scored: Mapping[str, Mapping[int, Report]], column: Column, *, paired: bool
) -> dict[str, Interval | str]:
    """Return the interval of the gain of each row over the first, where it is known.

    Args:
        scored: the reports of every row by seed.  paired: they are compared seed by seed.
    """
    rows = {row: {seed: part_of(each, column) for seed, each in found.items()} for row, found in scored.items()}
    metric, first = compared_metric(column), next(iter(rows.values()), {})
    if metric not in METRICS or not first:
        return {}
    others = {row: found for row, found in rows.items() if found and found is not first}
    if paired:
        return paired_intervals(metric, first, others)
    return intervals(metric, [*first.values()], {row: [*found.values()] for row, found in others.items()})


def part_of(report: Report, column: Column) -> Report:
    """Return the scores that a column is made of: those at its positions, if it has some."""
    band = band_of(column) if column.metric == POSITION_METRIC else None
    return report if band is None else report.at_positions(band)


def compared_metric(column: Column) -> str:
    """Return the metric of `part_of` by which two rows are compared."""
    return "token_perplexity" if column.metric == POSITION_METRIC else column.metric


def first_metric(study: Study) -> str:
    return next(iter(study.columns.values())).metric
