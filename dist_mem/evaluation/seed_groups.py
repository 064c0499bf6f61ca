"""Runs of a comparison that differ only in their seeds, as one line: mean, standard deviation, interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dist_mem.evaluation.bootstrap import gain_interval, no_gain_interval
from dist_mem.evaluation.report import Report, shown
from dist_mem.runtime.terminal import table


def seed_lines(labels: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """Return a table of the groups of equal labels for a terminal; no lines if no two labels are equal.

    Args:
        labels: as `labels_of` returns them, equal for runs that differ only in seeds.
        reports: one of each run; all score the same documents.
    """
    groups: dict[str, list[Report]] = {}
    for label, report in zip(labels, reports, strict=True):
        groups.setdefault(label, []).append(report)
    if len(groups) == len(labels):
        return []
    first = next(iter(groups))
    by_words = reports[0].num_words is not None
    head = ["seeds together", "runs", "word ppl" if by_words else "token ppl", "accuracy", f"{first} / it, 95 %"]
    rows = [head]
    for label, group in groups.items():
        perplexities = [each.word_perplexity if by_words else each.token_perplexity for each in group]
        spreads = _spread(perplexities, ",.2f"), _spread([each.accuracy for each in group], ".2%")
        shown_interval = "" if label == first else _interval(groups[first], group)
        rows.append([label, str(len(group)), *spreads, shown_interval])
    about = "means over runs that differ only in their seeds, ± standard deviation"
    return ["", f"{about}; interval by bootstrap over seeds and documents", *table(rows)]


def _interval(first: Sequence[Report], other: Sequence[Report]) -> str:
    interval = gain_interval(first, other)
    if interval is None:
        return f"none ({no_gain_interval(first, other)})"
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def _spread(values: Sequence[float], form: str) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2 or math.isnan(mean):
        return shown(mean, form)
    return f"{shown(mean, form)} ± {shown(statistics.stdev(values), form)}"
