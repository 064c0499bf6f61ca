"""The interval of a comparison: by how much a gain differs if other documents of the same kind had been scored.

Documents are drawn with replacement, the same ones for both models, because a document that is hard is hard for both
(paired bootstrap; Koehn 2004). The interval does not contain what another seed of the training would change.
"""

from __future__ import annotations

import math

import numpy as np

from dist_mem.evaluation.report import MAX_EXPONENT, Report

_DRAWS = 10_000  # resamples of the documents
_DRAWS_AT_ONCE = 4_000_000  # documents drawn in one array: 32 MB
_SEED = 0  # the same reports give the same interval
_TAIL = 2.5  # percent on either side


def gain_interval(first: Report, other: Report) -> tuple[float, float] | None:
    """Return the 95 % interval of the first report's perplexity divided by the other's.

    Both score the same documents. Perplexity is word-level, or per token if words are not known.

    Returns:
        Lower and upper bound; None if there are fewer than two documents, or a loss is not finite.
    """
    pairs = list(zip(first.documents, other.documents, strict=True))
    gains = np.array([one.nll - two.nll for one, two in pairs])  # nats
    counts = np.array([one.num_scored if one.words is None else one.words for one, _ in pairs], dtype=np.float64)
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


def _ratio(nats: float) -> float:
    return math.exp(nats) if nats < MAX_EXPONENT else math.inf
