"""Plots of runs: their labels, one line per label, and recall by the distance to the referent.

    dist-mem compare runs/demo_none runs/demo --plot recall.png

A label has a run's memory and other settings that differ between the runs. Runs whose configurations differ only in
seeds and keys that change no result get the same label. `draw_lines` draws them as one line: the mean, with
error bars of half the range.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.config.keys import DATA, DRAW, RESULT
from dist_mem.config.settings import differing_keys, select_keys
from dist_mem.config.sources import read_saved
from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.style import DPI, LINE_COLORS, add_grid, in_style, new_picture
from dist_mem.evaluation.scores import Band, Report
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_bytes

MAX_DIFFERENCES = 3  # most keys in a label
MAX_LINES = 6  # that a picture of recall names beside their ends
_LABEL_SIZE = 8  # points
_LEGEND_ROW = 0.165  # inches, at the legend's font size
_STYLES = (("-", "o"), ("--", "s"), (":", "^"))  # line and marker, until all colours are taken, then the next


class Line(NamedTuple):
    """The figures of one run; lines of equal labels are drawn as one."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


def settings_of(config: Path) -> dict[str, Any]:
    """Return the keys of a run's config.yaml that say what was trained, except seeds."""
    found = select_keys(read_saved(config), affects=RESULT | DATA)
    if "memory.kind" not in found:
        raise UnusableError(f"{config} is damaged (it has no memory.kind): copy that of a checkpoint of the run")
    return found


def labels_of(names: Sequence[str], configs: Sequence[Path | None], tags: Sequence[str] = ()) -> list[str]:
    """Return a label for each run; runs that differ only in their seeds get the same label.

    Args:
        names: names of the runs; the label of a run with a unique configuration contains its name.
        configs: config.yaml of each run; None: it does not exist, and the name is the label.
        tags: of data and protocol of each run's scores; none: all have the same.
    """
    settings = [None if config is None else settings_of(config) for config in configs]
    titles = [None if config is None else _title(config) for config in configs]
    labels = []
    for name, title, mine in zip(names, titles, settings, strict=True):
        if mine is None or title is None:
            labels.append(name)
            continue
        alike = [other for called, other in zip(titles, settings, strict=True) if other is not None and called == title]
        differing = sorted({key for other in alike for key in differing_keys(mine, other)})
        shown = differing if len(differing) <= MAX_DIFFERENCES else []
        parts = [title, *(f"{key.rpartition('.')[2]} {mine.get(key)}" for key in shown)]
        seeds = [other for other, found in zip(names, settings, strict=True) if found == mine]
        if len(seeds) == 1 or len(differing) > MAX_DIFFERENCES:
            parts[-1] += f" ({min(seeds)})"
        labels.append(", ".join(parts))
    draws = [None if config is None else _draws_of(config) for config in configs]
    runs = Counter(zip(labels, draws, strict=True))
    scores = Counter(label for label, _ in set(zip(labels, tags, strict=False)))
    return [  # scores of one run, or of several protocols, are no repetitions
        f"{label} ({name})" if (draw is not None and runs[label, draw] > 1) or scores[label] > 1 else label
        for name, label, draw in zip(names, labels, draws, strict=True)
    ]


def _draws_of(config: Path) -> str:
    """Return the keys of a run's config.yaml that repetitions have different values of, as seeds."""
    return json_text(select_keys(read_saved(config), affects=DRAW), sort_keys=True)


def _title(config: Path) -> str:
    from dist_mem.memory import memory_title  # imports torch, which takes a second

    return memory_title(read_saved(config)["memory"])


def draw_lines(axes: Any, lines: Sequence[Line]) -> list[tuple[float, float, str, Any]]:
    """Draw a line per label; for several runs the mean with error bars of half the range, noted in the legend.

    Returns:
        The last finite point of each line with its label and colour, for `label_beside`.
    """
    ends = []
    for index, label in enumerate(dict.fromkeys(line.label for line in lines)):
        linestyle, marker = _STYLES[index // len(LINE_COLORS) % len(_STYLES)]
        runs = [line for line in lines if line.label == label]
        found: dict[float, list[float]] = {}
        for run in runs:
            for x, y in zip(run.xs, run.ys, strict=True):
                found.setdefault(x, []).append(y)
        xs = sorted(found)
        means = [statistics.fmean(found[x]) for x in xs]
        text = label if len(runs) == 1 else f"{label}: mean of {len(runs)} runs, bars: half the range"
        (drawn,) = axes.plot(xs, means, linestyle=linestyle, marker=marker, markersize=4, label=text)
        if len(runs) > 1:
            halves = [(max(found[x]) - min(found[x])) / 2 for x in xs]
            axes.errorbar(xs, means, yerr=halves, fmt="none", ecolor=drawn.get_color(), capsize=3)
        if finite := [(x, mean) for x, mean in zip(xs, means, strict=True) if math.isfinite(mean)]:
            ends.append((*finite[-1], label, drawn.get_color()))
    return ends


def label_beside(axes: Any, labels: Sequence[tuple[float, float, str, Any]]) -> None:
    """Write labels (x and y of a point, text, colour) to the right of the axes, each with a line to its point.

    They are in the order of their points, and none lies on another: those that are too near move apart.
    """
    figure = axes.get_figure()
    height = axes.get_window_extent().height / figure.dpi * 72  # points
    step = _LABEL_SIZE * 1.25 / height  # of the axes' height
    inverse = axes.transAxes.inverted()
    wanted = [float(inverse.transform(axes.transData.transform((x, y)))[1]) for x, y, *_ in labels]
    order = sorted(range(len(labels)), key=lambda index: wanted[index])
    places = spread_out([wanted[index] for index in order], step)
    for number, (index, place) in enumerate(zip(order, places, strict=True)):
        x, y, text, colour = labels[index]
        beside = max(number * step, min(place, 1 - (len(places) - 1 - number) * step))  # not above or below the axes
        line = {"arrowstyle": "-", "color": colour, "lw": 0.4, "alpha": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            text, (x, y), xycoords="data", xytext=(1.03, beside), textcoords="axes fraction", fontsize=_LABEL_SIZE,
            va="center", color=colour, arrowprops=line,
        )  # fmt: skip


def spread_out(wanted: Sequence[float], step: float) -> list[float]:
    """Return rising places at least `step` apart, near the wanted ones, which rise too: groups keep their middle."""
    groups: list[list[float]] = []  # each: the sum of wanted places less their offsets, and the number
    for place in wanted:
        groups.append([place, 1])
        while len(groups) > 1:
            (first, count), (second, more) = groups[-2:]
            begin, after = first / count, second / more
            if begin + count * step <= after:
                break
            groups[-2:] = [[first + second - more * count * step, count + more]]
    return [total / count + number * step for total, count in groups for number in range(int(count))]


def add_legend(figure: Any) -> None:
    """Add a legend below the axes of a figure with constrained layout; inside, long labels would hide the lines."""
    legend = figure.legend(loc="outside lower center", fontsize=8)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * len(legend.get_texts()))


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the suffix of its file, PNG without one."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", dpi=DPI)
    write_bytes(path, content.getvalue())


BINS_PER_OCTAVE = 2
MIN_TOKENS = 50  # bins with fewer recall tokens are too noisy and are omitted


def distance_bins(reports: Sequence[Report]) -> list[Band]:
    """Return bands of equal width on a log scale, from distance 1 to the farthest."""
    farthest = max((score.distance for report in reports for score in report.recall), default=1)
    edges = [0]
    for power in range(math.ceil(math.log2(farthest) * BINS_PER_OCTAVE) + 1):
        edge = round(2 ** (power / BINS_PER_OCTAVE))
        if edge > edges[-1]:
            edges.append(edge)
    return [Band(low, high) for low, high in itertools.pairwise(edges)]


def recall_curve(report: Report, bins: Sequence[Band], *, accuracy: bool = False) -> tuple[list[float], list[float]]:
    """Return the middle of each bin with enough recall tokens, and their perplexity, or accuracy if known, in it."""
    middles, values = [], []
    for band in bins:
        value = report.recall_accuracy(band) if accuracy else report.recall_perplexity(band)
        if report.recall_in(band)[1] >= MIN_TOKENS and band.high is not None and not math.isnan(value):
            middles.append(math.sqrt(max(band.low, 1) * band.high))
            values.append(value)
    return middles, values


def reaches(reports: Sequence[Report]) -> list[tuple[int, str]]:
    """Return how far the segment and the short-term memory reach back, those of most reports that have a memory."""
    lengths = [(report.seg_len, report.mem_len) for report in reports]
    seg_len, mem_len = statistics.mode([pair for pair in lengths if pair[1]] or lengths)
    return [(seg_len, "T"), *([(seg_len + mem_len, "T + M")] if mem_len else [])]


@in_style
def plot_recall(labelled_reports: Sequence[tuple[str, Report]], path: Path, *, accuracy: bool = False) -> None:
    """Write the plot in the format of the file's suffix; reports with equal labels form one line (`draw_lines`).

    Args:
        accuracy: plot the accuracy instead of the perplexity.

    Raises:
        ValueError: no report has recall tokens, or no bin has enough of them, or their accuracy is not known.
    """
    reports = [report for _, report in labelled_reports]
    if not any(report.recall for report in reports):
        raise ValueError("no recall tokens in these evaluations: their data records none, so there is nothing to plot")
    bins = distance_bins(reports)
    lines = [Line(label, *recall_curve(report, bins, accuracy=accuracy)) for label, report in labelled_reports]
    if not any(line.ys for line in lines):
        unknown = ", or none whose accuracy is known" if accuracy else ""
        raise ValueError(
            f"fewer than {MIN_TOKENS} recall tokens at every distance{unknown}: there is too little to plot"
        )
    figure, axes = new_picture(3.6)
    add_grid(axes)
    ends = draw_lines(axes, lines)
    for edge, text in reaches(reports):
        axes.axvline(edge, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(
            text, (edge, 1), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points", ha="center"
        )
    axes.set_xscale("log", base=2)
    if accuracy:
        axes.set_ylim(-0.02, 1.02)  # points at 0 and 1 are whole
    else:
        axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("distance to the earlier passage (tokens)")
    axes.set_ylabel(f"{'accuracy' if accuracy else 'perplexity'} of recall tokens")
    several = "" if len(ends) == len(lines) else "; bars: half the range of the seeds"
    axes.set_title(
        f"split {reports[0].split}, {len(reports[0].documents)} documents{several}", pad=16
    )  # above T and T + M
    if len(ends) > MAX_LINES:
        add_legend(figure)
    else:
        figure.draw_without_rendering()  # the scales are known then
        label_beside(axes, ends)
    save_picture(figure, path)
