"""The interval of a comparison: by how much a gain differs with other documents and other seeds of the same kind.

Documents are drawn with replacement, the same ones for both models, because a document that is hard is hard for both
(paired bootstrap; Koehn 2004). Of a model that was trained with several seeds, the seeds are drawn too, for each model
apart: n - 1 of n with replacement, so that their mean varies as the mean of n seeds does (Rao and Wu 1988; n of n
would make it too narrow, by half for two seeds). The interval of one seed does not contain what another would change.

Of fewer than `MIN_DOCUMENTS` documents there is none: draws from so few repeat them, and the interval is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dist_mem.evaluation.scores import DocumentScore, Report
from dist_mem.runtime.figures import exponential
from dist_mem.runtime.terminal import counted

MIN_DOCUMENTS = 8  # with 8, a nominal 95 % covers about 90 %; with 2, the draws are only three different ones
_DRAWS = 10_000  # resamples of documents and seeds
_DRAWS_AT_ONCE = 1_000_000  # documents drawn in one array: 8 MB, and a few such arrays
_SEED = 0  # the same reports give the same interval
_TAIL = 2.5  # percent on either side


def gain_interval(first: Sequence[Report], other: Sequence[Report]) -> tuple[float, float] | None:
    """Return the 95 % interval of a model's perplexity divided by another's.

    All reports score the same documents. Perplexity is word-level, or per token if words are not known.

    Args:
        first, other: of each model a report for every seed.

    Returns:
        Lower and upper bound; None for a reason that `no_gain_interval` returns.
    """
    bounds = _bounds(*_scored_losses(first, other))
    return None if bounds is None else (exponential(bounds[0]), exponential(bounds[1]))


def bits_interval(first: Sequence[Report], other: Sequence[Report]) -> tuple[float, float] | None:
    """Return the 95 % interval of a model's bits per byte minus another's; arguments and None as `gain_interval`."""
    num_bytes = np.array([document.bytes for document in first[0].documents], dtype=np.float64)
    known = num_bytes > 0
    bounds = _bounds(_losses(other)[:, known], _losses(first)[:, known], num_bytes[known])
    return None if bounds is None else (bounds[0] / math.log(2), bounds[1] / math.log(2))


def no_gain_interval(first: Sequence[Report], other: Sequence[Report]) -> str | None:
    """Return why `gain_interval` of the same reports returns None; None if it does not."""
    before, after, _ = _scored_losses(first, other)
    return _problem(before, after)


def accuracy_interval(
    first: Sequence[Report], other: Sequence[Report], *, whole: bool = False
) -> tuple[float, float] | None:
    """Return the 95 % interval of the other model's accuracy minus the first's; arguments as `gain_interval`.

    Args:
        whole: of the share of documents whose scored tokens are all right, instead.

    Returns:
        Lower and upper bound; None if there are too few documents, or the accuracy of one is not known.
    """
    counts = np.array([document.num_scored for document in first[0].documents], dtype=np.float64)
    known = counts > 0
    before, after = (_hits(reports, whole=whole)[:, known] for reports in (first, other))
    return _bounds(before, after, np.ones(before.shape[1]) if whole else counts[known])


def _bounds(
    before: NDArray[np.float64], after: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[float, float] | None:
    """Return the interval of sum(after - before) / sum(counts) over documents, of mean seeds; None if it is not known.

    Args:
        before, after: a metric of every document, (seeds, documents); the numbers of seeds may differ.
        counts: what the metrics are divided by, (documents,).
    """
    if _problem(before, after) is not None:
        return None
    documents, seeds = np.random.default_rng(_SEED), np.random.default_rng(_SEED + 1)
    means = []
    left = _DRAWS
    while left:
        rows = min(left, max(1, _DRAWS_AT_ONCE // len(counts)))
        drawn = documents.integers(len(counts), size=(rows, len(counts)))
        gains = _drawn_means(after, rows, seeds) - _drawn_means(before, rows, seeds)
        means.append(np.take_along_axis(gains, drawn, axis=1).sum(axis=1) / counts[drawn].sum(axis=1))
        left -= rows
    low, high = np.percentile(np.concatenate(means), [_TAIL, 100 - _TAIL])
    return float(low), float(high)


def _problem(before: NDArray[np.float64], after: NDArray[np.float64]) -> str | None:
    """Return why there is no interval of metrics of documents, (seeds, documents) each; None if there is one."""
    num_documents = before.shape[1]
    if num_documents < MIN_DOCUMENTS:
        return f"{counted(num_documents, 'document')}; a bootstrap needs at least {MIN_DOCUMENTS}"
    return None if np.isfinite(before).all() and np.isfinite(after).all() else "a loss is not finite"


def _drawn_means(metrics: NDArray[np.float64], rows: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return means of the metrics over drawn seeds: (rows, documents)."""
    num_seeds = len(metrics)
    size = max(1, num_seeds - 1)
    weights = generator.multinomial(size, np.full(num_seeds, 1 / num_seeds), size=rows) / size
    means: NDArray[np.float64] = weights @ metrics
    return means


def _hits(reports: Sequence[Report], *, whole: bool) -> NDArray[np.float64]:
    """Return the hits of every document, or 1 if all are: (seeds, documents); nan where not known."""

    def hits(document: DocumentScore) -> float:
        if document.hits is None:
            return math.nan
        return float(document.hits == document.num_scored if whole else document.hits)

    return np.array([[hits(document) for document in each.documents] for each in reports])


def _scored_losses(
    first: Sequence[Report], other: Sequence[Report]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the losses of the other model and of the first, and the words or tokens of each document with any."""
    report = first[0]
    scored = [document.num_scored if document.words is None else document.words for document in report.documents]
    counts = np.array(scored, dtype=np.float64)
    if report.num_words is not None:  # an official count differs from that of the documents
        counts *= report.num_words / counts.sum()
    known = counts > 0  # a document without words has no share in a perplexity of words
    return _losses(other)[:, known], _losses(first)[:, known], counts[known]


def _losses(reports: Sequence[Report]) -> NDArray[np.float64]:
    """Return the loss of every document in nats: (seeds, documents)."""
    return np.array([[document.nll for document in each.documents] for each in reports])
