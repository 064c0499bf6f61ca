"""Documents dealt to splits by a checksum of their ids, so that a document's split depends on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import fsum, isclose

from dist_mem.errors import UnusableError

SPLITS = ("train", "validation", "test")
DEFAULT_FRACTIONS = {"train": 0.98, "validation": 0.01, "test": 0.01}


def parse_fractions(text: str) -> dict[str, float]:
    """Parse "train=0.98,validation=0.01,test=0.01". Raises UnusableError unless the fractions are parts of 1."""
    fractions: dict[str, float] = {}
    for part in text.split(","):
        split, _, number = part.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if split not in SPLITS or split in fractions or not 0 <= fraction <= 1:
            raise UnusableError(
                f"{part!r} in {text!r} is no split=fraction: each of {', '.join(SPLITS)} may come once, with a number "
                "from 0 to 1, as in train=0.98,validation=0.01,test=0.01"
            )
        fractions[split] = fraction
    if not isclose(fsum(fractions.values()), 1, abs_tol=1e-9):
        raise UnusableError(f"{text!r}: the fractions add up to {fsum(fractions.values()):g}; they must add up to 1")
    return fractions


def split_of(document_id: str, fractions: Mapping[str, float], seed: int | None = None) -> str:
    """Return the split of a document: always the same for its id, the fractions and the seed.

    The checksum is a number from 0 to 1. Test begins at 0, validation follows, then train; so a document that leaves
    one split for a larger validation or train fraction never enters test.
    """
    key = document_id if seed is None else f"{seed}\n{document_id}"
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    dealt = [split for split in reversed(SPLITS) if fractions.get(split)]
    for split in dealt[:-1]:
        place -= fractions[split]
        if place < 0:
            return split
    return dealt[-1]
