"""A table with the paper's figures and ours: as Markdown, and as CSV with every run in a line of its own."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.files import write_text
from dist_mem.reproduce.choice import measured, runs_behind, shown_rows
from dist_mem.reproduce.runs import Run, columns_of, read_result
from dist_mem.reproduce.tables import Scale, Table

NOT_GIVEN = "-"


class Cell(NamedTuple):
    """What the runs of one row say of one column."""

    values: list[float]  # one a seed that has ended
    diverged: int  # seeds that have not, because training diverged
    absent: int  # seeds whose evaluation has no such figure
    missing: int  # seeds that are still to be run

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    def __str__(self) -> str:
        parts = []
        if self.values:
            spread = f" ± {(max(self.values) - min(self.values)) / 2:.2g}" if len(self.values) > 1 else ""
            parts.append(f"{statistics.fmean(self.values):.4g}{spread}")
        if self.diverged:
            parts.append(f"{self.diverged} diverged")
        if self.absent:
            parts.append("n/a")
        if self.missing:
            parts.append(f"{self.missing} to run")
        return ", ".join(parts) or NOT_GIVEN


def cell(runs: Sequence[Run], column: str) -> Cell:
    """The figure of a column over the seeds of a row."""
    found = [read_result(run, column) for run in runs]
    values = [result["value"] for result in found if result is not None and "value" in result]
    diverged = sum(result is not None and "diverged" in result for result in found)
    absent = sum(result is not None and "absent" in result for result in found)
    return Cell(values, diverged, absent, missing=found.count(None))


def to_markdown(table: Table, scale: Scale, runs: Sequence[Run], facts: dict[str, str]) -> str:
    """The table, and what is to be known of it."""
    columns = columns_of(table, scale)
    is_printed = any(name in row.paper for row in table.rows.values() for name in columns)  # else nothing to set beside
    heading = [
        "",
        *(text for name in columns for text in ([f"{name}, paper", f"{name}, ours"] if is_printed else [name])),
    ]
    lines = [f"# {table.title}", "", table.source, "", _line(heading), _line(["---"] * len(heading))]
    shown = shown_rows(table, scale)
    for key in shown:
        row = table.rows[key]
        cells = [row.name]
        for name in columns:
            mine = runs_behind(table, scale, runs, key, name)
            paper = row.paper.get(name)
            ours = str(cell(mine, name)) if mine else NOT_GIVEN
            cells += [NOT_GIVEN if paper is None else f"{paper:g}", ours] if is_printed else [ours]
        lines.append(_line(cells))
    lines += ["", scale.about, ""]
    lines += [f"- {table.rows[key].name}: {table.rows[key].note}" for key in shown if table.rows[key].note]
    lines += [_chosen(table, scale, runs, key) for key in shown if table.rows[key].best_of]
    left_out = [row.name for key, row in table.rows.items() if key not in shown]
    if left_out:
        lines.append(f"- not run at this scale: {'; '.join(left_out)}")
    lines += [f"- {note}" for note in table.notes]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join(lines) + "\n"


def _chosen(table: Table, scale: Scale, runs: Sequence[Run], key: str) -> str:
    """Which rows are the best on validation."""
    told = []
    for name in columns_of(table, scale):
        behind = [run for run in runs_behind(table, scale, runs, key, name) if read_result(run, name) is not None]
        told += [f"{name}: {table.rows[run.row].name} (seed {run.seed})" for run in behind]
    return f"- {table.rows[key].name}, chosen on validation: {'; '.join(told) or 'nothing yet'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_csv(table: Table, scale: Scale, runs: Sequence[Run]) -> str:
    """row, column, seed, the paper's figure, ours, step, and how it ended."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "paper", "value", "step", "ended"])
    for run in runs:
        for name in measured(table, scale, run):
            result: dict[str, Any] = read_result(run, name) or {"to run": True}
            ended = next((word for word in ("diverged", "absent", "to run") if word in result), "evaluated")
            paper = table.rows[run.row].paper.get(name, "")
            writer.writerow([run.row, name, run.seed, paper, result.get("value", ""), result.get("step", ""), ended])
    return text.getvalue()


def draw(table: Table, scale: Scale, runs: Sequence[Run], path: Path) -> None:
    """A figure as lines over its columns, a table as bars; one colour a row, the paper's dashed or hollow."""
    from matplotlib.figure import Figure  # takes a second to import

    columns = columns_of(table, scale)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    others = {other for row in table.rows.values() for other in row.best_of}  # the best of them is drawn
    found = {
        key: [cell(runs_behind(table, scale, runs, key, name), name).mean for name in columns]
        for key in shown_rows(table, scale)
        if key not in others
    }
    rows = [
        key
        for key, ours in found.items()
        if any(value is not None for value in [*ours, *table.rows[key].paper.values()])
    ]
    for number, key in enumerate(rows):
        paper = [table.rows[key].paper.get(name) for name in columns]
        _draw_row(
            axes,
            list(columns),
            (number, len(rows)),
            table.rows[key].name,
            found[key],
            paper,
            lines=table.x_axis is not None,
        )
    axes.set_title(f"{table.title}\n{scale.about}", fontsize=8, wrap=True)
    axes.set_xlabel(table.x_axis or "")
    axes.set_ylabel(table.y_axis or next(iter(columns.values())).figure.replace("_", " "))
    if rows:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_row(
    axes: Any,
    names: list[str],
    place_of: tuple[int, int],
    label: str,
    ours: Sequence[float | None],
    paper: Sequence[float | None],
    *,
    lines: bool,
) -> None:
    """One row; `place_of` is its number and how many there are."""
    number, num_rows = place_of
    colour = f"C{number}"
    if lines:
        places = [float(name) for name in names]
    else:
        width = 0.8 / num_rows
        places = [column + (number - (num_rows - 1) / 2) * width for column in range(len(names))]
    measured = [(place, value) for place, value in zip(places, ours, strict=True) if value is not None]
    published = [(place, value) for place, value in zip(places, paper, strict=True) if value is not None]
    xs, ys = [place for place, _ in measured], [value for _, value in measured]
    paper_xs, paper_ys = [place for place, _ in published], [value for _, value in published]
    if lines:
        axes.plot(xs, ys, "o-", color=colour, label=label)
        axes.plot(paper_xs, paper_ys, "--", color=colour, alpha=0.5)
    else:
        axes.bar(xs, ys, 0.8 / num_rows, color=colour, label=label)
        axes.scatter(paper_xs, paper_ys, s=14, color="white", edgecolor="black", zorder=3)
        axes.set_xticks(range(len(names)), names)


def write_results(table: Table, scale: Scale, runs: Sequence[Run], out: Path, facts: dict[str, str]) -> list[Path]:
    """Write table.md, table.csv and table.png; returns their paths."""
    paths = [out / f"table.{ending}" for ending in ("md", "csv", "png")]
    write_text(paths[0], to_markdown(table, scale, runs, facts))
    write_text(paths[1], to_csv(table, scale, runs))
    draw(table, scale, runs, paths[2])
    return paths
