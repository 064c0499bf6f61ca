"""Documents dealt to splits by a checksum of their ids: rows each by its own, files in exact numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from math import floor, fsum, isclose

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
    place = _place(document_id, seed) / 2**64
    dealt = [split for split in reversed(SPLITS) if fractions.get(split)]
    for split in dealt[:-1]:
        place -= fractions[split]
        if place < 0:
            return split
    return dealt[-1]


def splits_of(document_ids: Collection[str], fractions: Mapping[str, float], seed: int | None = None) -> dict[str, str]:
    """Return the split of each document, in exact numbers: of each split its fraction, rounded, and the rest to train.

    In the order of their checksums test comes first, then validation, then train, as in `split_of`. So a document that
    is added or removed may move others, those next to a limit, which `split_of` does not.
    """
    ordered = sorted(document_ids, key=lambda document_id: (_place(document_id, seed), document_id))
    *others, last = [split for split in reversed(SPLITS) if fractions.get(split)]
    splits: dict[str, str] = {}
    for split in others:
        count = floor(fractions[split] * len(ordered) + 0.5)
        splits.update(dict.fromkeys(ordered[len(splits) : len(splits) + count], split))
    return dict.fromkeys(ordered, last) | splits


def _place(document_id: str, seed: int | None) -> int:
    key = document_id if seed is None else f"{seed}\n{document_id}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
