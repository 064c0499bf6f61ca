"""The interval of a comparison: by how much a gain differs if other documents of the same kind had been scored.

Documents are drawn with replacement, the same ones for both models, because a document that is hard is hard for both
(paired bootstrap; Koehn 2004). The interval does not contain what another seed of the training would change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dist_mem.evaluation.report import MAX_EXPONENT, Report

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
    gains, counts = gains[known], counts[known]
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
    return _ratio(low), _ratio(high)


def _losses(reports: Sequence[Report]) -> NDArray[np.float64]:
    """Return the loss of every document in nats, the mean over the reports."""
    losses: NDArray[np.float64] = np.mean([[document.nll for document in each.documents] for each in reports], axis=0)
    return losses


def _ratio(nats: float) -> float:
    return math.exp(nats) if nats < MAX_EXPONENT else math.inf
