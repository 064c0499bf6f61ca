"""Pictures of a study: its columns by row, and quality against cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.evaluation.depth import depth_bins, depths_to_csv, plot_depth
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
from dist_mem.runtime.figures import is_figure
from dist_mem.runtime.files import write_text
from dist_mem.studies.cells import CellRun, report_of
from dist_mem.studies.results import RowSummary, cell, first_metric
from dist_mem.studies.runs import is_better_higher, runs_behind, shown_rows
from dist_mem.studies.study import Study
from dist_mem.studies.study_call import StudyCall

PARETO, RECALL, RECALL_ACCURACY = "pareto.png", "recall.png", "recall_accuracy.png"
DEPTH, DEPTHS = "depth.png", "depth.csv"


@in_style
def draw(study: Study, runs: Sequence[CellRun], path: Path) -> bool:
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
        from dist_mem.evaluation.plotting.picture import (
            make_drawable,  # as it imports matplotlib, later than this module
        )

        axes.set_xticks(range(len(columns)), [make_drawable(name) for name in columns])
    if any(value is not None for key in rows for value in papers[key]):
        axes.plot([], [], "--" if study.x_axis else "o", color="grey", markerfacecolor="white", label="the paper's")
    seeds = " (thin lines: lowest and highest seed)" if any(len(v) > 1 for key in rows for v in found[key]) else ""
    axes.set_title(f"{study.title}{seeds}\n{study.about}", wrap=True)
    axes.set_xlabel(study.x_axis or "")
    axes.set_ylabel(study.y_axis or first_metric(study).replace("_", " "))
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


def draw_comparison(job: StudyCall, found: Mapping[str, RowSummary]) -> list[Path]:
    """Draw quality against cost, and what the data record of recall by distance and by depth; return the paths."""
    first = next(iter(job.study.columns))
    paths = [job.out / PARETO] if has_means(found) else []
    for path in paths:
        _draw_pareto(job.study, found, path)
    reports = [
        (job.study.rows[row].name, report)
        for row in best_rows(found)
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


def has_means(found: Mapping[str, RowSummary]) -> bool:
    return any(each.mean is not None for each in found.values())


def best_rows(found: Mapping[str, RowSummary]) -> list[str]:
    """Return the rows of a picture of lines: the first one, which all are compared with, and the best others."""
    first, *others = by_result(found)
    return [next(iter(found)), *(row for row in (first, *others) if row != next(iter(found)))][:MAX_LINES]


def by_result(found: Mapping[str, RowSummary]) -> list[str]:
    """Return the rows from the best to the worst by their first column; those without a result come last."""
    return sorted(found, key=lambda row: found[row].rank)


@in_style
def _draw_pareto(study: Study, found: Mapping[str, RowSummary], path: Path) -> None:
    """Draw the first column against what a row takes; the line joins those that nobody beats in both.

    What the budget made equal is left out: its differences come from whole updates and say nothing.
    """
    from matplotlib.ticker import StrMethodFormatter  # takes a second to import

    metric = first_metric(study)
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
