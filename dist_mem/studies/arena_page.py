"""The results of an arena: `arena.md`, `cells.csv`, quality against cost as a picture, and recall by distance.

Every cell is a command, that of its training and of its evaluation, and a checksum of what the evaluation found in
every document: who repeats the two commands on the same kind of machine gets the same checksum.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

from dist_mem.evaluation.bootstrap import MIN_DOCUMENTS, accuracy_interval, gain_interval
from dist_mem.evaluation.depth import depth_bins, depths_to_csv, plot_depth
from dist_mem.evaluation.legend import save_picture
from dist_mem.evaluation.plot import MIN_TOKENS, distance_bins, plot_recall, recall_curve
from dist_mem.evaluation.report import Report, read_report
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.files import write_text
from dist_mem.studies.budget import Costs
from dist_mem.studies.job import Job
from dist_mem.studies.results import Cell, cell
from dist_mem.studies.runs import (
    Run,
    columns_of,
    evaluate_command,
    is_better_higher,
    read_result,
    runs_behind,
    train_command,
)
from dist_mem.tracking.tracker import METRICS_FILE, read_points

PAGE, CELLS, PARETO = "arena.md", "cells.csv", "pareto.png"
RECALL, RECALL_ACCURACY = "recall.png", "recall_accuracy.png"
DEPTH, DEPTHS = "depth.png", "depth.csv"
SHARES = ("accuracy", "whole_answers")  # figures whose interval is that of a difference


class Standing(NamedTuple):
    """What an arena found of one memory."""

    name: str
    cells: dict[str, str]  # column -> mean and spread over the seeds
    mean: float | None  # of the first column
    interval: tuple[float, float] | None  # of the gain over the first memory; see `_interval`
    costs: Costs
    speed: float | None  # tokens/s of a training, the median of its points; the mean over the seeds


def standings(job: Job, memories: Sequence[str], costs: Mapping[str, Costs]) -> list[Standing]:
    """Return what is known of every memory, in the order of the file."""
    columns = columns_of(job.table, job.scale)
    first_column = next(iter(columns))
    figure = columns[first_column].figure
    first = _reports(job, memories[0], first_column)
    found = []
    for name in memories:
        runs = {column: runs_behind(job.table, job.scale, job.runs, name, column) for column in columns}
        cells = {column: cell(each, column) for column, each in runs.items()}
        speeds = [speed for run in runs[first_column] if (speed := _speed(run)) is not None]
        found.append(
            Standing(
                name,
                {column: shown(each) for column, each in cells.items()},
                cells[first_column].mean,
                _interval(first, _reports(job, name, first_column), figure) if name != memories[0] else None,
                costs[name],
                statistics.fmean(speeds) if speeds else None,
            )
        )
    return found


def write_page(job: Job, memories: Sequence[str], costs: Mapping[str, Costs]) -> list[Path]:
    """Write the files of the results, and return their paths."""
    found = standings(job, memories, costs)
    first_column = next(iter(columns_of(job.table, job.scale)))
    paths = [job.out / PAGE, job.out / CELLS, job.out / PARETO]
    write_text(paths[0], to_markdown(job, found))
    write_text(paths[1], _cells(job, memories))
    _draw_pareto(found, columns_of(job.table, job.scale)[first_column].figure, paths[2])
    reports = [(name, report) for name in memories for report in _reports(job, name, first_column).values()]
    bins = distance_bins([report for _, report in reports])
    for name, accuracy in ((RECALL, False), (RECALL_ACCURACY, True)):
        if any(recall_curve(report, bins, accuracy=accuracy)[1] for _, report in reports):
            paths.append(job.out / name)
            plot_recall(reports, paths[-1], accuracy=accuracy)
        elif any(report.recall for _, report in reports):
            print(f"{name} is not drawn: fewer than {MIN_TOKENS} recall tokens at every distance, or unknown accuracy")
    if any(depth_bins(report) for _, report in reports):
        paths += [job.out / DEPTH, job.out / DEPTHS]
        plot_depth(reports, paths[-2])
        write_text(paths[-1], depths_to_csv(reports))
    return paths


def to_markdown(job: Job, found: Sequence[Standing]) -> str:
    """Return the table of an arena, with what each memory took."""
    columns = list(columns_of(job.table, job.scale))
    figure = columns_of(job.table, job.scale)[columns[0]].figure
    is_share = figure in SHARES
    over = f"memory - {found[0].name}, 95 %" if is_share else f"{found[0].name} / memory, 95 %"
    sizes = ["parameters", "bytes of memory a lane", "steps", "tokens", "FLOPs", "tokens/s"]
    heading = ["memory", *columns, over, *sizes]
    lines = [f"# {job.table.title}", "", job.scale.about, "", _line(heading), _line(["---"] * len(heading))]
    for each in found:
        sign = "+" if is_share else ""
        interval = "" if each.interval is None else " to ".join(f"{bound:{sign}.3f}" for bound in each.interval)
        costs = each.costs
        flops = "n/a" if costs.flops is None else f"{costs.flops:.3g}"
        taken = [f"{costs.parameters:,}", f"{costs.state_bytes:,}", f"{costs.steps:,}", f"{costs.tokens:,}", flops]
        speed = "n/a" if each.speed is None else f"{each.speed:,.0f}"
        lines.append(_line([each.name, *each.cells.values(), interval, *taken, speed]))
    seeds = ", ".join(str(seed) for seed in job.scale.seeds)
    lines += [
        "",
        f"Means over the seeds {seeds}, ± their standard deviation. {_about_interval(found[0].name, figure)}",
        "",
        f"![Quality against cost]({PARETO})",
        "",
        f"Every cell with its commands and its checksum: [{CELLS}]({CELLS}).",
    ]
    return "\n".join(lines) + "\n"


def _about_interval(first: str, figure: str) -> str:
    """Return the sentences that say what the intervals are."""
    if figure == "recall_accuracy":
        return "There is no interval: evaluations record recall accuracy by distance, not by document."
    what, nothing = f"{first}'s perplexity of all scored words or tokens divided by the memory's", 1
    if figure in SHARES:
        what, nothing = f"the memory's {figure.replace('_', ' ')} minus {first}'s", 0
    return (
        f"The interval is that of {what}, with other seeds and other documents of the same kind: 10,000 draws of the "
        f"documents, the same for both, and of the seeds of each. An interval that contains {nothing} settles nothing; "
        "one of two or three seeds is rough. "
        f"Fewer than {MIN_DOCUMENTS} documents have none."
    )


def shown(found: Cell) -> str:
    """Return the mean of several seeds with their standard deviation, and what else is to be said of them."""
    if len(found.values) < 2:
        return str(found)
    _, *rest = str(found).split(", ")
    return ", ".join([f"{statistics.fmean(found.values):.4g} ± {statistics.stdev(found.values):.2g}", *rest])


def checksum(report: Report) -> str:
    """Return the SHA-256 of the figures of every document, without times and places."""
    figures = [astuple(document)[:-1] for document in report.documents]  # without depths, which older reports lack
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()


def _reports(job: Job, name: str, column: str) -> dict[int, Report]:
    """Return the reports behind a cell by seed; without those of trainings that diverged or are still to come."""
    found = {}
    for run in runs_behind(job.table, job.scale, job.runs, name, column):
        if (path := _report_of(run, column)) is not None:
            found[run.seed] = read_report(path)
    return found


def _report_of(run: Run, column: str) -> Path | None:
    result = read_result(run, column) or {}
    return run.directory / result["report"] if "report" in result else None


def _interval(first: Mapping[int, Report], other: Mapping[int, Report], figure: str) -> tuple[float, float] | None:
    """Return the interval of the gain over seeds and documents; None without a seed of both, or where it is not known.

    The gain is a difference for `SHARES`, and for all other figures the perplexity divided by the other one.
    """
    if not (first and other) or figure == "recall_accuracy":
        return None
    pair = list(first.values()), list(other.values())
    if figure in SHARES:
        return accuracy_interval(*pair, whole=figure == "whole_answers")
    return gain_interval(*pair)


def _speed(run: Run) -> float | None:
    speeds = [
        point.metrics["tokens_per_second"]
        for point in read_points(run.directory / METRICS_FILE)
        if "tokens_per_second" in point.metrics
    ]
    return statistics.median(speeds) if speeds else None


def _cells(job: Job, memories: Sequence[str]) -> str:
    head = ["memory", "row", "seed", "column", "value", "sha256", "training", "evaluation"]
    return csv_text([head, *_cell_lines(job, memories)])


def _cell_lines(job: Job, memories: Sequence[str]) -> Iterator[list[str]]:
    for name in memories:
        for column, settings in columns_of(job.table, job.scale).items():
            for run in runs_behind(job.table, job.scale, job.runs, name, column):
                result, path = read_result(run, column) or {"to run": ""}, _report_of(run, column)
                value = str(result["value"]) if "value" in result else next(iter(result))
                digest = "" if path is None else checksum(read_report(path))
                training = train_command(job.scale, run, ranks=1, extra=job.extra)
                evaluation = evaluate_command(run, settings, job.extra)
                commands = [words[words.index("dist_mem") + 1 :] for words in (training, evaluation)]
                lines = [shlex.join(["dist-mem", *words]) for words in commands]
                yield [name, run.row, str(run.seed), column, value, digest, *lines]


def _draw_pareto(found: Sequence[Standing], figure_name: str, path: Path) -> None:
    """Draw the first column against what a memory takes; the line joins those that nobody beats in both.

    What the budget made equal is left out: its differences come from whole updates and say nothing.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    costs: dict[str, list[float | None]] = {
        "FLOPs of the training": [each.costs.flops for each in found],
        "bytes of memory a lane": [each.costs.state_bytes for each in found],
    }
    costs = {label: xs for label, xs in costs.items() if not are_equal(xs)}
    costs["seconds a million tokens"] = [None if each.speed is None else 1e6 / each.speed for each in found]
    all_axes = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, (label, xs) in zip(all_axes, costs.items(), strict=True):
        points = [
            (float(x), each.mean, each.name)
            for x, each in zip(xs, found, strict=True)
            if x is not None and each.mean is not None
        ]
        for x, y, name in points:
            axes.plot([x], [y], "o", color="C0")
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        front = pareto_front([(x, y) for x, y, _ in points], higher=is_better_higher(figure_name))
        axes.plot([x for x, _ in front], [y for _, y in front], "-", color="C1", linewidth=1)
        axes.set_xlabel(label, fontsize=8)
    figure.axes[0].set_ylabel(figure_name.replace("_", " "), fontsize=8)
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


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
