"""Accuracy of answers by depth: where in a document stands what the answer recalls, from 0 (beginning) to 1 (end).

A passkey at depth 0.4 stands after 40 % of the text before the answer. Known in documents with one answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import Index, read_mask, read_recall
from dist_mem.evaluation.plot import Line, add_legend, draw_lines, save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.scores import Report, accuracy, known_total
from dist_mem.runtime.csv_text import csv_text

NUM_BINS = 10


class DepthBin(NamedTuple):
    """The answers of a tenth of the depths."""

    low: float
    high: float
    num_answers: int  # documents
    accuracy: float  # of their scored tokens; nan without answers, or if it is not known


def answer_depth(index: Index, document: int, length: int) -> float:
    """Return 1 - distance / position of the answer's first token; nan unless the scored tokens are one answer.

    Args:
        length: tokens read of the document.
    """
    mask, recall = read_mask(index, document, 0, length), read_recall(index, document, 0, length)
    if mask is None or recall is None:
        return math.nan
    places = np.flatnonzero(mask)
    if not len(places) or places[-1] - places[0] >= len(places) or not recall[places].all():
        return math.nan
    return 1.0 - float(recall[places[0]]) / float(places[0])


def depth_bins(report: Report) -> list[DepthBin]:
    """Return the accuracy in ten bins of depth; empty if no depth is known."""
    if all(document.depth is None for document in report.documents):
        return []
    found = []
    for number in range(NUM_BINS):
        within = [
            document
            for document in report.documents
            if document.depth is not None and min(int(document.depth * NUM_BINS), NUM_BINS - 1) == number
        ]
        share = accuracy(known_total(each.hits for each in within), sum(each.num_scored for each in within))
        found.append(DepthBin(number / NUM_BINS, (number + 1) / NUM_BINS, len(within), share))
    return found


def depths_to_csv(labelled_reports: Sequence[tuple[str, Report]]) -> str:
    """Return a CSV with one line per report and bin; `label` may come several times, once per seed."""
    rows = [[label, *each] for label, report in labelled_reports for each in depth_bins(report) if each.num_answers]
    return csv_text([["label", *DepthBin._fields], *rows])


@in_style
def plot_depth(labelled_reports: Sequence[tuple[str, Report]], path: Path) -> None:
    """Draw the accuracy by depth; reports with equal labels form one line."""
    lines = []
    for label, report in labelled_reports:
        known = [each for each in depth_bins(report) if not math.isnan(each.accuracy)]
        lines.append(Line(label, [(each.low + each.high) / 2 for each in known], [each.accuracy for each in known]))
    figure, axes = new_picture(3.6)
    add_grid(axes)
    draw_lines(axes, lines)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.02, 1.02)  # points at 0 and 1 are whole
    axes.set_xlabel("depth of the recalled passage (share of the text before the answer; 1: right before it)")
    axes.set_ylabel("accuracy of answers (share)")
    add_legend(figure)
    save_picture(figure, path)
