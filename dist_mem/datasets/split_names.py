"""Which split a document is in: by the names of its folder and file, or by a checksum; and no text in two splits.

Names count at any depth: train/, data/test-00000-of-00001.parquet, wiki.valid.txt.

A text that its owner held out must not be trained on, so every usual name of a split counts, as in Hugging Face's
datasets. A name that only contains such a word ("acid_test.txt") counts where no part of the path is one by itself.

Without such names, a checksum of their ids deals documents to splits: rows each by its own, files in exact numbers.
Documents with the same text are found by 16 bytes of SHA-256 each: 10^7 documents take 160 MB for their digests and
about 500 MB more, for a moment, to sort them.
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from math import floor, fsum, isclose

import numpy as np

from dist_mem.datasets.corpus_rows import DIGEST_BYTES
from dist_mem.errors import UnusableError

_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation|held[-_ ]?out|hold[-_ ]?out",
}
_NUMBERS = r"(?:[-._ ]?\d+)?(?:[-._ ]of[-._ ]\d+)?(?:-[0-9a-f]{8,})?"  # of the parts of a split
_WHOLE = {split: re.compile(f"(?:{words}){_NUMBERS}") for split, words in _WORDS.items()}
_WITHIN = {split: re.compile(f"(?<![^\\W\\d_])(?:{words})(?![^\\W\\d_])") for split, words in _WORDS.items()}


def split_named(name: str) -> str | None:
    """Return the split whose name a folder has, or a file without its suffix; None if it is not one by itself."""
    return next((split for split, pattern in _WHOLE.items() if pattern.fullmatch(name.lower())), None)


def splits_in_path(parts: Sequence[str], *, is_rows: bool) -> list[str]:
    """Return the splits that a path names, none or several too.

    "training_data/test.jsonl" is of test, "train_test/train.jsonl" of train, and "dev-clean/train.jsonl" names two.

    Args:
        parts: its folders, and its file name without suffix.
        is_rows: the file contains many documents, so a word within its name is no part of a document's title.
    """
    *folders, file = parts
    whole = [split for part in parts if (split := split_named(part)) is not None]
    whole += _splits_within(file) if is_rows else []
    said = [_splits_within(part) for part in folders]
    if not whole:
        return list(dict.fromkeys([*chain(*said), *_splits_within(file)]))
    doubts = [split for (split, *others) in filter(None, said) if not others and split != "train"]
    return list(dict.fromkeys(whole + (doubts if set(whole) == {"train"} else [])))


def _splits_within(name: str) -> list[str]:
    return [split for split, pattern in _WITHIN.items() if pattern.search(name.lower())]


def without_split_folders(path: str) -> str:
    """Return a path without the folders that are named exactly as a split, which say nothing else of a document."""
    *folders, name = path.split("/")
    kept = [part for part in folders if not any(re.fullmatch(words, part.lower()) for words in _WORDS.values())]
    return "/".join([*kept, name])


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


NO_WORDS = bytes(DIGEST_BYTES)  # the digest of a text without words, which is no duplicate of another one


def words_digest(text: str) -> bytes:
    """Return the digest by which texts are compared, of what a reader sees.

    Neither white space makes a difference, nor the form in which accents are stored (NFC or NFD), nor characters
    without a glyph, as a zero-width space.
    """
    if not text.isascii():
        for character in set(text) & _without_glyph():
            text = text.replace(character, "")
        text = unicodedata.normalize("NFC", text)
    words = text.split()
    return hashlib.sha256(" ".join(words).encode()).digest()[:DIGEST_BYTES] if words else NO_WORDS


@cache
def _without_glyph() -> set[str]:
    return {character for character in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(character) == "Cf"}


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
