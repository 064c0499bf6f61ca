"""The interval of a difference of two trained models: by how much it differs with other documents of the same kind.

Documents are drawn with replacement, the same ones for both models, because a document that is hard is hard for both
(paired bootstrap; Koehn 2004). It says nothing of what another seed of a training would change: see intervals.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRAWS = 10_000  # resamples of documents
_DRAWS_AT_ONCE = 1_000_000  # documents drawn in one array: 8 MB, and a few such arrays
_SEED = 0  # the same reports give the same interval
_TAIL = 2.5  # percent on either side


class Bounds(NamedTuple):
    """A 95 % interval of a difference."""

    low: float
    high: float
    p_value: float  # two-sided: the share of equals that would differ as much, or more


def resample(gains: NDArray[np.float64], counts: NDArray[np.float64]) -> Bounds:
    """Return the interval of sum(gains) / sum(counts) over documents, (documents,) each."""
    generator = np.random.default_rng(_SEED)
    means = []
    left = _DRAWS
    while left:
        rows = min(left, max(1, _DRAWS_AT_ONCE // len(counts)))
        drawn = generator.integers(len(counts), size=(rows, len(counts)))
        means.append(gains[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
        left -= rows
    found = np.concatenate(means)
    low, high = np.percentile(found, [_TAIL, 100 - _TAIL])
    beyond = min((found <= 0).sum(), (found >= 0).sum())
    return Bounds(float(low), float(high), min(1.0, 2 * (int(beyond) + 1) / (_DRAWS + 1)))
