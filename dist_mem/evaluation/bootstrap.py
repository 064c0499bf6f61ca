"""The interval of a comparison: by how much a gain differs if other documents of the same kind had been scored.

Documents are drawn with replacement, the same ones for both models, because a document that is hard is hard for both
(paired bootstrap; Koehn 2004). The interval does not contain what another seed of the training would change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dist_mem.evaluation.report import MAX_EXPONENT, DocumentScore, Report

_DRAWS = 10_000  # resamples of the documents
_DRAWS_AT_ONCE = 4_000_000  # documents drawn in one array: 32 MB
_SEED = 0  # the same reports give the same interval
_TAIL = 2.5  # percent on either side


def gain_interval(first: Sequence[Report], other: Sequence[Report]) -> tuple[float, float] | None:
    """Return the 95 % interval of a model's perplexity divided by another's.

    All reports score the same documents. Perplexity is word-level, or per token if words are not known.

    Args:
        first, other: of each model a report for every seed, of which the mean loss counts.

    Returns:
        Lower and upper bound; None if there are fewer than two documents, or a loss is not finite.
    """
    gains = _losses(first) - _losses(other)
    scored = [document.num_scored if document.words is None else document.words for document in first[0].documents]
    counts = np.array(scored, dtype=np.float64)
    known = counts > 0  # a document without words has no share in a perplexity of words
    bounds = _bounds(gains[known], counts[known])
    return None if bounds is None else (_ratio(bounds[0]), _ratio(bounds[1]))


def accuracy_interval(
    first: Sequence[Report], other: Sequence[Report], *, whole: bool = False
) -> tuple[float, float] | None:
    """Return the 95 % interval of the other model's accuracy minus the first's; arguments as `gain_interval`.

    Args:
        whole: of the share of documents whose scored tokens are all right, instead.

    Returns:
        Lower and upper bound; None if there are fewer than two documents, or the accuracy of one is not known.
    """
    counts = np.array([document.num_scored for document in first[0].documents], dtype=np.float64)
    known = counts > 0
    gains = (_hits(other, whole=whole) - _hits(first, whole=whole))[known]
    return _bounds(gains, np.ones_like(gains) if whole else counts[known])


def _bounds(gains: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the interval of sum(gains) / sum(counts) over documents, (documents,) each; None if it is not known."""
    if len(gains) < 2 or not np.isfinite(gains).all():
        return None
    generator = np.random.default_rng(_SEED)
    means = []
    left = _DRAWS
    while left:
        rows = min(left, max(1, _DRAWS_AT_ONCE // len(gains)))
        drawn = generator.integers(len(gains), size=(rows, len(gains)))
        means.append(gains[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
        left -= rows
    low, high = np.percentile(np.concatenate(means), [_TAIL, 100 - _TAIL])
    return float(low), float(high)


def _hits(reports: Sequence[Report], *, whole: bool) -> NDArray[np.float64]:
    """Return the hits of every document, or 1 if all are, the mean over the reports; nan where not known."""

    def hits(document: DocumentScore) -> float:
        if document.hits is None:
            return math.nan
        return float(document.hits == document.num_scored if whole else document.hits)

    found: NDArray[np.float64] = np.mean([[hits(document) for document in each.documents] for each in reports], axis=0)
    return found


def _losses(reports: Sequence[Report]) -> NDArray[np.float64]:
    """Return the loss of every document in nats, the mean over the reports."""
    losses: NDArray[np.float64] = np.mean([[document.nll for document in each.documents] for each in reports], axis=0)
    return losses


def _ratio(nats: float) -> float:
    return math.exp(nats) if nats < MAX_EXPONENT else math.inf
