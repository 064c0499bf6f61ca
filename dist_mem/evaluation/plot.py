"""Plot the recall of runs: perplexity, or accuracy, of recall tokens by the distance to their referent.

dist-mem compare runs/demo_none runs/demo --plot recall.png
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from dist_mem.evaluation.legend import Line, add_legend, draw_lines, save_picture
from dist_mem.evaluation.report import Band, Report

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


def plot_recall(labelled_reports: Sequence[tuple[str, Report]], path: Path, *, accuracy: bool = False) -> None:
    """Write the plot in the format of the file's suffix; reports with equal labels form one line (`draw_lines`).

    Args:
        accuracy: plot the accuracy instead of the perplexity.

    Raises:
        ValueError: no report has recall tokens, or no bin has enough of them, or their accuracy is not known.
    """
    from matplotlib.figure import Figure  # takes a second to import

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
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, lines)
    widest = max(reports, key=lambda report: report.seg_len + report.mem_len)
    for edge, text in ((widest.seg_len, "T"), (widest.seg_len + widest.mem_len, "T + M")):
        axes.axvline(edge, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(text, (edge, 1), xycoords=("data", "axes fraction"), xytext=(3, -11), textcoords="offset points")
    axes.set_xscale("log", base=2)
    if accuracy:
        axes.set_ylim(-0.02, 1.02)  # points at 0 and 1 are whole
    else:
        axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("distance to the earlier passage (tokens)")
    axes.set_ylabel(f"{'accuracy' if accuracy else 'perplexity'} of recall tokens")
    axes.set_title(f"split {reports[0].split}, {len(reports[0].documents)} documents", fontsize=10)
    add_legend(figure)
    save_picture(figure, path)
