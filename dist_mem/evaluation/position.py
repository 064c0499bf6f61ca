"""Loss by position: what tokens cost at the beginning of a document, and far into it (`evaluate --by position`).

Bins are octaves: the first token, the next two, the next four, and so on. A memory that is worth something makes the
loss fall with the position; a model that cannot read longer texts than in training shows it rise again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dist_mem.evaluation.intervals import MIN_DOCUMENTS, resample
from dist_mem.evaluation.plot import save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.scores import Report
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.terminal import table


class PositionBin(NamedTuple):
    """The scored tokens of all documents at some positions."""

    first: int  # position of a token in its document; the first token is at 1
    last: int
    loss: float  # nats per token
    low: float  # of the 95 % interval over documents; nan with fewer than `MIN_DOCUMENTS`
    high: float
    num_tokens: int
    num_documents: int


def position_bins(report: Report) -> list[PositionBin]:
    """Return the loss by octave of the position; empty if the report has no positions."""
    found = []
    for number in sorted({score.bin for score in report.positions}):
        within = [score for score in report.positions if score.bin == number]
        nll, counts = (
            np.array(column, dtype=np.float64) for column in zip(*(each[2:] for each in within), strict=True)
        )
        low, high = resample(nll, counts)[:2] if len(within) >= MIN_DOCUMENTS else (math.nan, math.nan)
        mean = float(nll.sum() / counts.sum())
        found.append(PositionBin(2**number, 2 ** (number + 1) - 1, mean, low, high, int(counts.sum()), len(within)))
    return found


def positions_to_table(bins: Sequence[PositionBin]) -> str:
    """Return the loss by position as a table for a terminal."""
    rows = [["position", "loss", "95 % over documents", "tokens", "documents"]]
    for each in bins:
        interval = "" if math.isnan(each.low) else f"{each.low:.4f} to {each.high:.4f}"
        counts = [f"{each.num_tokens:,}", f"{each.num_documents:,}"]
        rows.append([f"{each.first:,} to {each.last:,}", f"{each.loss:.4f}", interval, *counts])
    return "\n".join(table(rows))


def positions_to_csv(bins: Sequence[PositionBin]) -> str:
    """Return a CSV with one line per bin."""
    return csv_text([list(PositionBin._fields), *map(list, bins)])


@in_style
def plot_positions(bins: Sequence[PositionBin], path: Path) -> None:
    """Draw the loss by position, with its interval over documents."""
    figure, axes = new_picture(3.6)
    add_grid(axes)
    middles = [math.sqrt(each.first * each.last) for each in bins]
    (line,) = axes.plot(middles, [each.loss for each in bins], marker="o", markersize=4)
    low, high = ([getattr(each, name) for each in bins] for name in ("low", "high"))
    axes.fill_between(middles, low, high, color=line.get_color(), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the document (tokens)")
    axes.set_ylabel("loss (nats per token); band: 95 % over documents")
    save_picture(figure, path)
