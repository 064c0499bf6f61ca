"""Gain of a model's memory, in nats per token, over the same model with its memory emptied at every segment.

    dist-mem evaluate runs/demo --split test
    dist-mem evaluate runs/demo --split test --without-memory

Both evaluations score the same tokens with the same weights. A model trained without memory is a different comparison,
because its weights have learned to predict without one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from dist_mem.evaluation.report_names import counterpart, is_without_memory
from dist_mem.evaluation.scores import Band, Report, format_metric, perplexity, read_report, recall_bands
from dist_mem.runtime.figures import exponential


class MemoryGain(NamedTuple):
    """The gain of some tokens from the memory."""

    num_scored: int  # tokens; 0: the other metrics are nan
    nats: float  # per token; negative if the memory does harm
    with_memory: float  # token perplexity with memory
    without: float  # token perplexity without memory

    @property
    def ratio(self) -> float:
        """Token perplexity without memory divided by that with memory."""
        return exponential(self.nats)

    def __str__(self) -> str:
        change = f"{self.nats:.4f} nats per token, perplexity {format_metric(self.with_memory)} with memory"
        return f"{change}, {format_metric(self.without)} without ({format_metric(self.ratio)}x)"


def memory_gain(with_memory: Report, without: Report, band: Band | None = None) -> MemoryGain:
    """Return the gain over all scored tokens, or over the recall tokens of a band.

    Raises:
        ValueError: the reports do not score the same tokens.
    """
    scored = [
        (report.tokenizer_fingerprint, [(document.id, document.num_scored) for document in report.documents])
        for report in (with_memory, without)
    ]
    if scored[0] != scored[1]:
        raise ValueError("the reports with and without memory do not score the same tokens: evaluate both again")
    if band is None:
        nll, other, count = with_memory.nll, without.nll, with_memory.num_scored
    else:
        (nll, count), (other, _) = with_memory.recall_in(band), without.recall_in(band)
    nats = (other - nll) / count if count else math.nan
    return MemoryGain(count, nats, perplexity(nll, count), perplexity(other, count))


def describe_gain(with_memory: Report, without: Report) -> str:
    """Return lines for a terminal: the gain over all tokens, and by distance to the referent."""
    lines = [f"gain of the memory: {memory_gain(with_memory, without)}"]
    for name, band in recall_bands(with_memory.seg_len, with_memory.mem_len).items():
        gain = memory_gain(with_memory, without, band)
        if gain.num_scored:
            lines.append(f"recall, referent {band} tokens back ({name}): {gain} over {gain.num_scored:,} tokens")
    return "\n".join(lines)


def read_gain(report: Report, path: Path) -> str | None:
    """Return `describe_gain` of a new report and its counterpart; None if the counterpart does not exist.

    Raises:
        ValueError: they do not score the same tokens.
    """
    other = counterpart(path)
    if not other.exists():
        return None
    found = read_report(other)
    return describe_gain(found, report) if is_without_memory(path) else describe_gain(report, found)
