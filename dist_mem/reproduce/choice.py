"""Rows that show the best of several other rows on the validation split, as a paper tunes its baselines.

The best row is chosen per seed and column; the reported figure is the one on the column's split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dist_mem.reproduce.runs import Run, columns_of, read_result
from dist_mem.reproduce.tables import Column, Scale, Table

_GROWING = ("accuracy", "dialogue_f1", "dialogue_rouge", "dialogue_meteor")  # higher is better; for all others lower is


def candidates(table: Table, scale: Scale, row: str, point: str | None = None) -> list[str]:
    """Return the rows of this scale behind a row of the table: itself, or those it is the best of.

    Args:
        point: return only the rows run at this point; None: all.
    """
    without = [] if point is None else scale.points[point].without
    return [name for name in table.rows[row].best_of or [row] if name in scale.rows and name not in without]


def shown_rows(table: Table, scale: Scale) -> list[str]:
    """Return the rows of the table that have a run at this scale."""
    return [row for row in table.rows if candidates(table, scale, row)]


def measured(table: Table, scale: Scale, run: Run) -> dict[str, Column]:
    """Return the columns to measure for a run; for a candidate of a `best_of` row also each column on validation."""
    columns = columns_of(table, scale, run.point)
    if not any(run.row in row.best_of for row in table.rows.values()):
        return columns
    return {_on_validation(name): replace(column, split="validation") for name, column in columns.items()} | columns


def runs_behind(table: Table, scale: Scale, runs: Sequence[Run], row: str, name: str) -> list[Run]:
    """Return the runs, one per seed, whose figures a cell of the table shows."""
    column = columns_of(table, scale)[name]
    behind = candidates(table, scale, row, column.point)
    mine = [run for run in runs if run.row in behind and run.point == column.point]
    if not table.rows[row].best_of:
        return mine
    seeds = sorted({run.seed for run in mine})
    return [_best([replace(mine[0], row=other, seed=seed) for other in behind], name, column) for seed in seeds]


def _best(runs: Sequence[Run], name: str, column: Column) -> Run:
    """Return the best run of one seed, or the first run that is not measured yet, even if it was not requested."""
    results = [read_result(run, _on_validation(name)) for run in runs]
    if None in results:
        return runs[results.index(None)]
    sign = -1.0 if column.figure.startswith(_GROWING) else 1.0
    valued = [(sign * result["value"], number) for number, result in enumerate(results) if result and "value" in result]
    return runs[min(valued)[1]] if valued else runs[0]


def _on_validation(name: str) -> str:
    return f"{name} on validation"
