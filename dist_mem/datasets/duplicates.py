"""Documents with the same text, within a split and in several: found by 16 bytes of SHA-256 each.

10^7 documents take 160 MB for their digests and about 500 MB more, for a moment, to sort them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from dist_mem.datasets.rows import DIGEST_BYTES

NO_WORDS = bytes(DIGEST_BYTES)  # the digest of a text without words, which is no duplicate of another one


def words_digest(text: str) -> bytes:
    """Return the digest by which texts are compared: of their words, so that white space makes no difference."""
    words = text.split()
    return hashlib.sha256(" ".join(words).encode()).digest()[:DIGEST_BYTES] if words else NO_WORDS


def first_occurrences(digests: Sequence[bytes | bytearray]) -> list[np.ndarray]:
    """Return where the text of each document occurs first.

    Args:
        digests: of each split, those of its documents (`words_digest`), joined.

    Returns:
        for each split, (documents, 2) int64: the split and the place in it of the first document with that text,
        in the order given. It is the document's own place if no earlier document has its text.
    """
    halves = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    sizes = [len(joined) // DIGEST_BYTES for joined in digests]
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equal ones comes first
    halves = halves[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (halves[1:] != halves[:-1]).any(axis=1) | ~halves[1:].any(axis=1)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    ends = np.cumsum(sizes)
    split = np.searchsorted(ends, first, side="right")
    places = np.stack([split, first - (ends - sizes)[split]], axis=1)
    return np.split(places, ends[:-1])
