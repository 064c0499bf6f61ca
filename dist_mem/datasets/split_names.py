"""Splits that names of folders and files say, at any depth: train/, data/test-00000-of-00001.parquet, wiki.valid.txt.

A text that its owner held out must not be trained on, so every usual name of a split counts, as in Hugging Face's
datasets. A name that only contains such a word ("acid_test.txt") counts where no part of the path is one by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

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
