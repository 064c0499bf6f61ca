"""The results of a study: `table.md`, `table.csv` with a line per cell, and `table.png`; with a budget more pictures.

The paper's metrics appear beside ours only at the paper's scale. At other scales, where data and sizes differ, the
Markdown has them in a separate section, and the CSV and the plot omit them. A study with a budget also shows what
every row took, and an interval of its gain over the first row.

Every line of the CSV has the commands of its training and of its evaluation, and a checksum of what the evaluation
found in every document: who repeats the two commands on the same kind of machine gets the same checksum.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.evaluation.depth import depth_bins, depths_to_csv, plot_depth
from dist_mem.evaluation.intervals import MIN_DOCUMENTS, Interval, about_settled, intervals, settled
from dist_mem.evaluation.plot import (
    MAX_LINES,
    MIN_TOKENS,
    add_legend,
    distance_bins,
    label_beside,
    plot_recall,
    recall_curve,
    save_picture,
)
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.scores import METRICS, RECALL_METRICS, Report
from dist_mem.runtime import markdown
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.figures import NO_FIGURE, is_figure
from dist_mem.runtime.files import write_text
from dist_mem.studies.budget import HEADING, Costs
from dist_mem.studies.cells import Run, checksum, read_result, report_of, speed_of
from dist_mem.studies.job import Job
from dist_mem.studies.runs import (
    BITS,
    evaluate_command,
    is_better_higher,
    measured,
    runs_behind,
    shown_rows,
    train_command,
)
from dist_mem.studies.study import Study

NOT_GIVEN = "-"
PAGE, CSV, PICTURE = "table.md", "table.csv", "table.png"
PARETO, RECALL, RECALL_ACCURACY = "pareto.png", "recall.png", "recall_accuracy.png"
DEPTH, DEPTHS = "depth.png", "depth.csv"
SHARES = ("accuracy", "whole_answers")  # metrics of which a higher one is better


class Cell(NamedTuple):
    """The results of one row in one column."""

    values: list[float]  # one per evaluated seed
    diverged: int  # seeds whose training diverged
    absent: int  # seeds whose evaluation has no such metric
    missing: int  # seeds still to be run
    in_bits: tuple[float, ...] = ()  # per byte, of absent perplexities that are no figures

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    def text(self, *, deviation: bool = False) -> str:
        """Return the mean ± half the range of the seeds, or with `deviation` their standard deviation."""
        parts = []
        if self.values:
            half = (max(self.values) - min(self.values)) / 2
            spread = statistics.stdev(self.values) if deviation and len(self.values) > 1 else half
            mean = statistics.fmean(self.values)
            parts.append(with_spread(mean, spread) if len(self.values) > 1 else f"{mean:.4g}")
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


def cell(runs: Sequence[Run], column: str) -> Cell:
    """Return the results of a column over the runs of a row."""
    found = [read_result(run, column) for run in runs]
    values = [result["value"] for result in found if result is not None and "value" in result]
    diverged = sum(result is not None and "diverged" in result for result in found)
    absent = sum(result is not None and "absent" in result for result in found)
    bits = tuple(result[BITS] for result in found if result is not None and BITS in result)
    return Cell(values, diverged, absent, missing=found.count(None), in_bits=bits)


class Standing(NamedTuple):
    """What a row reached within its budget, and what it took."""

    mean: float | None  # of the first column
    interval: Interval | None  # of the gain over the first row
    is_settled: bool  # the interval excludes equality also after correction for all rows
    costs: Costs
    speed: float | None  # tokens/s of a training, the median of its points; the mean over the seeds


def standings(study: Study, runs: Sequence[Run], costs: Mapping[str, Costs]) -> dict[str, Standing]:
    """Return what is known of every row of a study with a budget, in the order of the file."""
    name, column = next(iter(study.columns.items()))
    rows = {row: runs_behind(study, runs, row, name) for row in (_table_rows(study) if costs else ())}
    scored = {row: [report for run in mine if (report := report_of(run, name))] for row, mine in rows.items()}
    gains = _gains(scored, column.metric)
    marked = settled(gains)
    found = {}
    for row, mine in rows.items():
        speeds = [speed for run in mine if (speed := speed_of(run)) is not None]
        own, gain = costs[(study.rows[row].best_of or [row])[0]], gains.get(row)
        found[row] = Standing(
            cell(mine, name).mean,
            gain if isinstance(gain, Interval) else None,
            row in marked,
            own,
            statistics.fmean(speeds) if speeds else None,
        )
    return found


def _table_rows(study: Study) -> list[str]:
    """Return the rows of the Markdown; with a budget, of which a picture compares all, only the best of others."""
    return [row for row in shown_rows(study) if not (study.budget and row in study.candidates)]


def _gains(scored: Mapping[str, Sequence[Report]], metric: str) -> dict[str, Interval | str]:
    """Return the interval of the gain of each row over the first, where it is known; arguments: the reports by row."""
    rows = list(scored.items())
    if metric not in METRICS or not rows or not rows[0][1]:
        return {}
    return intervals(metric, rows[0][1], {row: reports for row, reports in rows[1:] if reports})


def write_results(job: Job, provenance: Mapping[str, str]) -> list[Path]:
    """Write the files of the results, and return their paths."""
    study = job.study
    paths = [job.out / name for name in (PAGE, CSV, PICTURE)]
    found = standings(study, job.runs, job.costs)
    write_text(paths[0], to_markdown(study, job.runs, provenance, found))
    write_text(paths[1], to_csv(study, job.runs, job.extra))
    if not draw(study, job.runs, paths[2]):
        paths.pop()
    return paths + (_draw_comparison(job, found) if found else [])


def to_markdown(
    study: Study, runs: Sequence[Run], provenance: Mapping[str, str], found: Mapping[str, Standing] | None = None
) -> str:
    """Return the table with its notes and, except at the paper's scale, a section with the paper's metrics.

    Args:
        found: what each row of a study with a budget took.
    """
    found = {key: each for key, each in (found or {}).items() if any(run.row == key for run in runs)}
    columns, shown = study.columns, list(found) or _table_rows(study)
    beside = study.is_papers and any(name in row.paper for row in study.rows.values() for name in columns)
    pairs = ([f"{name}, paper", f"{name}, ours"] if beside else [name] for name in columns)
    heading = ["", *(text for pair in pairs for text in pair), *(_budget_heading(study, shown[0]) if found else [])]
    rows = []
    best = _best_cells(study, runs, found)
    for key in by_result(study, found) if found else shown:
        row = study.rows[key]
        cells = [row.name]
        for name in columns:
            mine = runs_behind(study, runs, key, name)
            ours = cell(mine, name).text(deviation=bool(found)) if mine else NOT_GIVEN
            ours = f"**{ours}**" if (key, name) in best else ours
            cells += [_number(row.paper.get(name)), ours] if beside else [ours]
        rows.append([*cells, *(_budget_cells(study, found[key]) if found else [])])
    lines = [f"# {study.title}", "", study.source, "", *markdown.table(heading, rows), "", study.about, ""]
    if found:
        lines += [_about_interval(study, found, runs), ""]
        lines += [f"![Quality against cost]({PARETO})", ""] if _has_means(found) else []
    lines += [f"- {study.rows[key].name}: {study.rows[key].note}" for key in shown if study.rows[key].note]
    lines += [_chosen(study, runs, key) for key in shown if study.rows[key].best_of]
    left_out = [row.name for key, row in study.rows.items() if key not in shown_rows(study)]
    if left_out:
        lines.append(f"- not run at this scale: {'; '.join(left_out)}")
    lines += [f"- {note}" for note in study.notes]
    lines += [f"- {name}: {value}" for name, value in provenance.items()]
    if not study.is_papers:
        lines += _papers_section(study)
    return "\n".join(lines) + "\n"


def _best_cells(study: Study, runs: Sequence[Run], found: Mapping[str, Standing]) -> set[tuple[str, str]]:
    """Return the best row of each column of a study with a budget, (row, column); they are bold."""
    best = set()
    for name, column in study.columns.items():
        sign = -1.0 if is_better_higher(column.metric) else 1.0
        means = {row: cell(mine, name).mean for row in found if (mine := runs_behind(study, runs, row, name))}
        known = {row: sign * mean for row, mean in means.items() if mean is not None}
        if len(known) > 1:
            best.add((min(known, key=lambda row: known[row]), name))
    return best


def _budget_heading(study: Study, first: str) -> list[str]:
    name, metric = study.rows[first].name, _first_metric(study)
    gain = f"memory - {name}" if metric in SHARES else f"{name} {'-' if metric == BITS else '/'} memory"
    return [f"{gain}, 95 %", *HEADING, "tokens/s"]


def _budget_cells(study: Study, found: Standing) -> list[str]:
    form = ".3f" if _first_metric(study).endswith("perplexity") else "+.3f"
    interval = "" if found.interval is None else found.interval.text(is_settled=found.is_settled, form=form)
    speed = NO_FIGURE if found.speed is None else f"{found.speed:,.0f}"
    return [interval, *found.costs.texts(), speed]


def _first_metric(study: Study) -> str:
    return next(iter(study.columns.values())).metric


def _about_interval(study: Study, found: Mapping[str, Standing], runs: Sequence[Run]) -> str:
    """Return the sentences that say what the numbers and intervals of a study with a budget are."""
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    metric, name = _first_metric(study), study.rows[next(iter(found))].name
    means = f"Means over the seeds {seeds}, ± their standard deviation."
    known = [each.interval for each in found.values() if each.interval is not None]
    if metric in RECALL_METRICS:
        return f"{means} There is no interval: evaluations record recall by distance, not by document."
    what, nothing = f"{name}'s perplexity of all scored words or tokens divided by the memory's", 1
    if metric in SHARES:
        what, nothing = f"the memory's {metric.replace('_', ' ')} minus {name}'s", 0
    elif metric == BITS:
        what, nothing = f"{name}'s bits per byte minus the memory's", 0
    about = (
        f"{means} The interval is that of {what}, with other seeds and other documents of the same kind; with one seed "
    )
    about += f"of a row, of other documents only. One that contains {nothing} settles nothing. "
    if (over_seeds := sum(each.over_seeds for each in known)) > 1:
        about += f"{about_settled(over_seeds)}. "
    return f"{about}Fewer than {MIN_DOCUMENTS} documents have none."


def _papers_section(study: Study) -> list[str]:
    """Return the paper's table as a separate section; empty if it prints no metric."""
    names = list(dict.fromkeys(name for row in study.rows.values() for name in row.paper))
    if not names:
        return []
    head = ["", "## The paper's metrics", "", "Other data and other sizes than above: not comparable.", ""]
    rows = [[row.name, *(_number(row.paper.get(name)) for name in names)] for row in study.rows.values() if row.paper]
    return [*head, *markdown.table(["", *names], rows)]


def _number(value: float | None) -> str:
    return NOT_GIVEN if value is None else f"{value:g}"


def _chosen(study: Study, runs: Sequence[Run], key: str) -> str:
    """Return a line that names the rows chosen on validation."""
    chosen = []
    for name in study.columns:
        behind = [run for run in runs_behind(study, runs, key, name) if read_result(run, name) is not None]
        chosen += [f"{name}: {study.rows[run.row].name} (seed {run.seed})" for run in behind]
    return f"- {study.rows[key].name}, chosen on validation: {'; '.join(chosen) or 'nothing yet'}"


def to_csv(study: Study, runs: Sequence[Run], extra: Sequence[str]) -> str:
    """Return a CSV of every cell: our metric, step, outcome, checksum and commands; at the paper's scale its metric.

    Args:
        extra: overrides of every training.
    """
    lines: list[list[object]] = []
    lines.append(["row", "column", "seed", *(["paper"] if study.is_papers else []), "value", "step", "ended"])
    lines[0] += ["sha256", "training", "evaluation"]
    for run in runs:
        training = _command(train_command(study, run, ranks=1, extra=extra))
        for name, column in measured(study, run).items():
            result: dict[str, Any] = read_result(run, name) or {"to run": True}
            ended = next((word for word in ("diverged", "absent", "to run") if word in result), "evaluated")
            paper = [study.rows[run.row].paper.get(name, "")] if study.is_papers else []
            report = report_of(run, name)
            digest = "" if report is None else checksum(report)
            metrics = [*paper, result.get("value", ""), result.get("step", ""), ended, digest]
            lines.append([run.row, name, run.seed, *metrics, training, _command(evaluate_command(run, column, extra))])
    return csv_text(lines)


def _command(words: Sequence[str]) -> str:
    """Return a command as a user types it."""
    return shlex.join(["dist-mem", *words[words.index("dist_mem") + 1 :]])


@in_style
def draw(study: Study, runs: Sequence[Run], path: Path) -> bool:
    """Plot a paper's figure as lines over its columns, or a table as points, with one colour per row.

    Without any figure nothing is drawn, and the result is False: empty axes would look as if there were one.
    Thin lines span the lowest to the highest seed. The paper's metrics, at its scale only, are dashed lines or hollow
    points.
    """
    columns = study.columns
    found = {
        key: [cell(runs_behind(study, runs, key, name), name).values for name in columns]
        for key in shown_rows(study)
        if key not in study.candidates  # only the best of them is drawn
    }
    papers = {key: [study.rows[key].paper.get(name) if study.is_papers else None for name in columns] for key in found}
    rows = [key for key, ours in found.items() if any(ours) or any(value is not None for value in papers[key])]
    if not rows:
        return False
    figure, axes = new_picture(3.6)
    add_grid(axes)
    for number, key in enumerate(rows):
        beside = (number - (len(rows) - 1) / 2) * 0.8 / len(rows)  # of the points of a column
        places = [float(name) if study.x_axis else place + beside for place, name in enumerate(columns)]
        style = _Style(f"C{number}", study.rows[key].name, is_line=bool(study.x_axis))
        _draw_row(axes, places, found[key], papers[key], style)
    if not study.x_axis:
        from dist_mem.evaluation.plotting.picture import drawable  # as it imports matplotlib, later than this module

        axes.set_xticks(range(len(columns)), [drawable(name) for name in columns])
    if any(value is not None for key in rows for value in papers[key]):
        axes.plot([], [], "--" if study.x_axis else "o", color="grey", markerfacecolor="white", label="the paper's")
    seeds = " (thin lines: lowest and highest seed)" if any(len(v) > 1 for key in rows for v in found[key]) else ""
    axes.set_title(f"{study.title}{seeds}\n{study.about}", wrap=True)
    axes.set_xlabel(study.x_axis or "")
    axes.set_ylabel(study.y_axis or _first_metric(study).replace("_", " "))
    add_legend(figure)
    save_picture(figure, path)
    return True


class _Style(NamedTuple):
    colour: str
    label: str
    is_line: bool


def _draw_row(
    axes: Any, places: Sequence[float], ours: Sequence[list[float]], paper: Sequence[float | None], style: _Style
) -> None:
    """Draw the means of the seeds with their range, and the paper's metrics, at `places`."""
    seen = [(place, values) for place, values in zip(places, ours, strict=True) if values]
    xs, ys = [place for place, _ in seen], [statistics.fmean(values) for _, values in seen]
    published = [(place, value) for place, value in zip(places, paper, strict=True) if value is not None]
    paper_xs, paper_ys = [place for place, _ in published], [value for _, value in published]
    if style.is_line:
        axes.plot(xs, ys, "o-", color=style.colour, label=style.label)
        axes.plot(paper_xs, paper_ys, "--", color=style.colour, alpha=0.5)
    else:
        axes.plot(xs, ys, "o", color=style.colour, label=style.label)  # a bar from 0 would hide small differences
        axes.scatter(paper_xs, paper_ys, s=14, color="white", edgecolor="black", zorder=3)
    several = [(x, y, values) for x, y, (_, values) in zip(xs, ys, seen, strict=True) if len(values) > 1]
    for x, y, values in several:
        axes.errorbar(x, y, [[y - min(values)], [max(values) - y]], fmt="none", color="black", lw=0.8, capsize=2)


def _draw_comparison(job: Job, found: Mapping[str, Standing]) -> list[Path]:
    """Draw quality against cost, and what the data record of recall by distance and by depth; return the paths."""
    first = next(iter(job.study.columns))
    paths = [job.out / PARETO] if _has_means(found) else []
    for path in paths:
        _draw_pareto(job.study, found, path)
    reports = [
        (job.study.rows[row].name, report)
        for row in _best_rows(job.study, found)
        for run in runs_behind(job.study, job.runs, row, first)
        if (report := report_of(run, first)) is not None
    ]
    bins = distance_bins([report for _, report in reports])
    for name, accuracy in ((RECALL, False), (RECALL_ACCURACY, True)):
        if any(recall_curve(report, bins, accuracy=accuracy)[1] for _, report in reports):
            paths.append(job.out / name)
            plot_recall(reports, paths[-1], accuracy=accuracy)
        elif any(report.recall for _, report in reports):
            print(f"{name} is not drawn: fewer than {MIN_TOKENS} recall tokens at every distance, or unknown accuracy")
    if any(is_figure(each.accuracy) for _, report in reports for each in depth_bins(report)):
        paths += [job.out / DEPTH, job.out / DEPTHS]
        plot_depth(reports, paths[-2])
        write_text(paths[-1], depths_to_csv(reports))
    return paths


def _has_means(found: Mapping[str, Standing]) -> bool:
    return any(each.mean is not None for each in found.values())


def _best_rows(study: Study, found: Mapping[str, Standing]) -> list[str]:
    """Return the rows of a picture of lines: the first one, which all are compared with, and the best others."""
    first, *others = by_result(study, found)
    return [next(iter(found)), *(row for row in (first, *others) if row != next(iter(found)))][:MAX_LINES]


def by_result(study: Study, found: Mapping[str, Standing]) -> list[str]:
    """Return the rows from the best to the worst by their first column; those without a result come last."""
    sign = -1.0 if is_better_higher(_first_metric(study)) else 1.0
    return sorted(found, key=lambda row: math.inf if (mean := found[row].mean) is None else sign * mean)


@in_style
def _draw_pareto(study: Study, found: Mapping[str, Standing], path: Path) -> None:
    """Draw the first column against what a row takes; the line joins those that nobody beats in both.

    What the budget made equal is left out: its differences come from whole updates and say nothing.
    """
    from matplotlib.ticker import StrMethodFormatter  # takes a second to import

    metric = _first_metric(study)
    costs: dict[str, list[float | None]] = {
        "FLOPs of the training": [each.costs.flops for each in found.values()],
        "bytes of memory per lane": [each.costs.state_bytes for each in found.values()],
    }
    costs = {label: xs for label, xs in costs.items() if not are_equal(xs)}
    costs["seconds per million tokens"] = [None if each.speed is None else 1e6 / each.speed for each in found.values()]
    figure, all_axes = new_picture(4.5, width=10, columns=len(costs), sharey=True, squeeze=False)
    labelled = []
    for axes, (label, xs) in zip(all_axes[0], costs.items(), strict=True):
        points = [
            (float(x), each.mean, study.rows[row].name)
            for x, (row, each) in zip(xs, found.items(), strict=True)
            if x is not None and each.mean is not None
        ]
        add_grid(axes)
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", color="C0")
        front = pareto_front([(x, y) for x, y, _ in points], higher=is_better_higher(metric))
        axes.plot([x for x, _ in front], [y for _, y in front], "-", color="C1", linewidth=1)
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=4)  # more of long numbers would overprint each other
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.9g}"))
        labelled.append((axes, [(x, y, name, "0.25") for x, y, name in points]))
    figure.axes[0].set_ylabel(metric.replace("_", " "))
    figure.draw_without_rendering()  # the scales are known then
    for axes, labels in labelled:
        label_beside(axes, labels)
    save_picture(figure, path)


def are_equal(costs: Sequence[float | None]) -> bool:
    """Return whether two costs or more are known, and all of them lie within five per cent."""
    known = [cost for cost in costs if cost is not None]
    return len(known) > 1 and max(known) <= 1.05 * min(known)


def pareto_front(points: Sequence[tuple[float, float]], *, higher: bool) -> list[tuple[float, float]]:
    """Return the points (cost, quality) that no other beats in both, by rising cost."""
    sign = -1.0 if higher else 1.0
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front
