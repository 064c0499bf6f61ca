"""Write a reproduced table: Markdown, CSV with one line per run, and a plot.

The paper's figures appear beside ours only at the paper's scale. At other scales, where data and sizes differ, the
Markdown has them in a separate section, and the CSV and the plot omit them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.evaluation.legend import add_legend, save_picture
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.files import write_text
from dist_mem.studies.runs import Run, columns_of, measured, read_result, runs_behind, shown_rows
from dist_mem.studies.tables import Scale, Table

NOT_GIVEN = "-"


class Cell(NamedTuple):
    """The results of one row in one column."""

    values: list[float]  # one per evaluated seed
    diverged: int  # seeds whose training diverged
    absent: int  # seeds whose evaluation has no such figure
    missing: int  # seeds still to be run

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
    """Return the results of a column over the runs of a row."""
    found = [read_result(run, column) for run in runs]
    values = [result["value"] for result in found if result is not None and "value" in result]
    diverged = sum(result is not None and "diverged" in result for result in found)
    absent = sum(result is not None and "absent" in result for result in found)
    return Cell(values, diverged, absent, missing=found.count(None))


def to_markdown(table: Table, scale: Scale, runs: Sequence[Run], provenance: dict[str, str]) -> str:
    """Return the table with its notes and, except at the paper's scale, a section with the paper's figures."""
    columns = columns_of(table, scale)
    beside = scale.is_papers and any(name in row.paper for row in table.rows.values() for name in columns)
    pairs = ([f"{name}, paper", f"{name}, ours"] if beside else [name] for name in columns)
    heading = ["", *(text for pair in pairs for text in pair)]
    lines = [f"# {table.title}", "", table.source, "", _line(heading), _line(["---"] * len(heading))]
    shown = shown_rows(table, scale)
    for key in shown:
        row = table.rows[key]
        cells = [row.name]
        for name in columns:
            mine = runs_behind(table, scale, runs, key, name)
            ours = str(cell(mine, name)) if mine else NOT_GIVEN
            cells += [_number(row.paper.get(name)), ours] if beside else [ours]
        lines.append(_line(cells))
    lines += ["", scale.about, ""]
    lines += [f"- {table.rows[key].name}: {table.rows[key].note}" for key in shown if table.rows[key].note]
    lines += [_chosen(table, scale, runs, key) for key in shown if table.rows[key].best_of]
    left_out = [row.name for key, row in table.rows.items() if key not in shown]
    if left_out:
        lines.append(f"- not run at this scale: {'; '.join(left_out)}")
    lines += [f"- {note}" for note in table.notes]
    lines += [f"- {name}: {value}" for name, value in provenance.items()]
    if not scale.is_papers:
        lines += _papers_section(table)
    return "\n".join(lines) + "\n"


def _papers_section(table: Table) -> list[str]:
    """Return the paper's table as a separate section; empty if it prints no figure."""
    scales = [table.columns, *(scale.columns for scale in table.scales.values())]
    printed = {name for row in table.rows.values() for name in row.paper}
    names = [name for name in dict.fromkeys(name for columns in scales for name in columns) if name in printed]
    if not names:
        return []
    lines = ["", "## The paper's figures", "", "Other data and other sizes than above: not comparable.", ""]
    lines += [_line(["", *names]), _line(["---"] * (1 + len(names)))]
    for row in table.rows.values():
        if row.paper:
            lines.append(_line([row.name, *(_number(row.paper.get(name)) for name in names)]))
    return lines


def _number(value: float | None) -> str:
    return NOT_GIVEN if value is None else f"{value:g}"


def _chosen(table: Table, scale: Scale, runs: Sequence[Run], key: str) -> str:
    """Return a line that names the rows chosen on validation."""
    chosen = []
    for name in columns_of(table, scale):
        behind = [run for run in runs_behind(table, scale, runs, key, name) if read_result(run, name) is not None]
        chosen += [f"{name}: {table.rows[run.row].name} (seed {run.seed})" for run in behind]
    return f"- {table.rows[key].name}, chosen on validation: {'; '.join(chosen) or 'nothing yet'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_csv(table: Table, scale: Scale, runs: Sequence[Run]) -> str:
    """Return a CSV of row, column, seed, our figure, step and outcome; at the paper's scale also the paper's figure."""
    lines: list[list[object]] = []
    lines.append(["row", "column", "seed", *(["paper"] if scale.is_papers else []), "value", "step", "ended"])
    for run in runs:
        for name in measured(table, scale, run):
            result: dict[str, Any] = read_result(run, name) or {"to run": True}
            ended = next((word for word in ("diverged", "absent", "to run") if word in result), "evaluated")
            paper = [table.rows[run.row].paper.get(name, "")] if scale.is_papers else []
            lines.append([run.row, name, run.seed, *paper, result.get("value", ""), result.get("step", ""), ended])
    return csv_text(lines)


def draw(table: Table, scale: Scale, runs: Sequence[Run], path: Path) -> None:
    """Plot a paper's figure as lines over its columns, or a table as bars, with one colour per row.

    Thin lines span the lowest to the highest seed. The paper's figures, at its scale only, are dashed lines or hollow
    points.
    """
    from matplotlib.figure import Figure  # takes a second to import

    columns = columns_of(table, scale)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    others = {other for row in table.rows.values() for other in row.best_of}  # only the best of them is drawn
    found = {
        key: [cell(runs_behind(table, scale, runs, key, name), name).values for name in columns]
        for key in shown_rows(table, scale)
        if key not in others
    }
    papers = {key: [table.rows[key].paper.get(name) if scale.is_papers else None for name in columns] for key in found}
    rows = [key for key, ours in found.items() if any(ours) or any(value is not None for value in papers[key])]
    for number, key in enumerate(rows):
        beside = (number - (len(rows) - 1) / 2) * 0.8 / len(rows)  # of the bars of a column
        places = [float(name) if table.x_axis else place + beside for place, name in enumerate(columns)]
        style = _Style(f"C{number}", table.rows[key].name, None if table.x_axis else 0.8 / len(rows))
        _draw_row(axes, places, found[key], papers[key], style)
    if not table.x_axis:
        axes.set_xticks(range(len(columns)), list(columns))
    if any(value is not None for key in rows for value in papers[key]):
        axes.plot([], [], "--" if table.x_axis else "o", color="grey", markerfacecolor="white", label="the paper's")
    seeds = " (thin lines: lowest and highest seed)" if any(len(v) > 1 for key in rows for v in found[key]) else ""
    axes.set_title(f"{table.title}{seeds}\n{scale.about}", fontsize=8, wrap=True)
    axes.set_xlabel(table.x_axis or "")
    axes.set_ylabel(table.y_axis or next(iter(columns.values())).figure.replace("_", " "))
    if rows:
        add_legend(figure)
    save_picture(figure, path)


class _Style(NamedTuple):
    colour: str
    label: str
    width: float | None  # of a bar; None: a line


def _draw_row(
    axes: Any, places: Sequence[float], ours: Sequence[list[float]], paper: Sequence[float | None], style: _Style
) -> None:
    """Draw the means of the seeds with their range, and the paper's figures, at `places`."""
    seen = [(place, values) for place, values in zip(places, ours, strict=True) if values]
    xs, ys = [place for place, _ in seen], [statistics.fmean(values) for _, values in seen]
    published = [(place, value) for place, value in zip(places, paper, strict=True) if value is not None]
    paper_xs, paper_ys = [place for place, _ in published], [value for _, value in published]
    if style.width is None:
        axes.plot(xs, ys, "o-", color=style.colour, label=style.label)
        axes.plot(paper_xs, paper_ys, "--", color=style.colour, alpha=0.5)
    else:
        axes.bar(xs, ys, style.width, color=style.colour, label=style.label)
        axes.scatter(paper_xs, paper_ys, s=14, color="white", edgecolor="black", zorder=3)
    several = [(x, y, values) for x, y, (_, values) in zip(xs, ys, seen, strict=True) if len(values) > 1]
    for x, y, values in several:
        axes.errorbar(x, y, [[y - min(values)], [max(values) - y]], fmt="none", color="black", lw=0.8, capsize=2)


def write_results(table: Table, scale: Scale, runs: Sequence[Run], out: Path, provenance: dict[str, str]) -> list[Path]:
    """Write table.md, table.csv and table.png and return their paths."""
    paths = [out / f"table.{ending}" for ending in ("md", "csv", "png")]
    write_text(paths[0], to_markdown(table, scale, runs, provenance))
    write_text(paths[1], to_csv(table, scale, runs))
    draw(table, scale, runs, paths[2])
    return paths
