"""What binds the splits of one build: build.json beside each index.json, written after the last of them.

    build   sha256 of the index of every split of the build: equal in all of them
    index   fingerprint of the index.json beside it
    texts   sha256 of the texts that were read from files, whose names and sizes alone are in the recipe of the index

It is a file of its own so that a data directory keeps its fingerprints. A split that was built before there was such a
file has none, and is accepted beside others that have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from dist_mem.data.index import INDEX_NAME, read_index_json
from dist_mem.data.metadata import REMEDY, ShardError, read_metadata
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, integer, optional, record, sha256
from dist_mem.runtime.files import write_text
from dist_mem.runtime.names import is_hidden

BUILD_NAME = "build.json"
_RECORD = record(
    {"format_version": integer(1), "build": optional(sha256), "index": sha256, "texts": optional(sha256)}, is_open=False
)


@dataclass(frozen=True)
class BuildRecord:
    """The content of a build.json."""

    build: str | None  # None: a build that has not ended
    index: str
    texts: str | None  # None: no text was read from a file


def read_build(split_dir: Path) -> BuildRecord | None:
    """Return the record of a split; None if it has none.

    Raises:
        ShardError: it is damaged.
    """
    path = split_dir / BUILD_NAME
    if not path.exists():
        return None
    body = read_metadata(path)
    check(body, _RECORD, path, ShardError, REMEDY)
    return BuildRecord(body["build"], body["index"], body["texts"])


def note_texts(split_dir: Path, texts: str | None) -> None:
    """Write the record of a split whose build goes on with other splits. Raises OSError."""
    _write(split_dir, BuildRecord(None, read_index_json(split_dir / INDEX_NAME)["fingerprint"], texts))


def bind_splits(data_dir: Path, splits: Iterable[str]) -> None:
    """Write that these splits, all with an index, are of one build. Raises OSError, ShardError."""
    indexes = {split: read_index_json(data_dir / split / INDEX_NAME)["fingerprint"] for split in splits}
    build = hashlib.sha256(json_text(indexes, sort_keys=True).encode()).hexdigest()
    for split, index in indexes.items():
        known = read_build(data_dir / split)
        new = BuildRecord(build, index, known.texts if known else None)
        if new != known:
            _write(data_dir / split, new)


def built_splits(data_dir: Path) -> list[str]:
    """Return the splits of a data directory on disk that have an index, sorted."""
    return sorted(path.parent.name for path in data_dir.glob(f"*/{INDEX_NAME}") if not is_hidden(path.parent.name))


def check_record(split_dir: Path, fingerprint: str) -> None:
    """Check that the record of a split, if it has one, is of the index with this fingerprint.

    Raises:
        ShardError: it is not, or is damaged.
    """
    found = read_build(split_dir)
    if found is not None and found.index != fingerprint:
        raise ShardError(f"{split_dir / BUILD_NAME} is of another {INDEX_NAME} than the one beside it{_FIX}")


def check_one_build(data_dir: Path, splits: Iterable[str]) -> None:
    """Check that splits are of one build: else texts of one may be held out in another.

    Raises:
        ShardError: they are not, or a record is damaged.
    """
    found = {split: read_build(data_dir / split) for split in splits}
    builds = {split: each.build if each else None for split, each in found.items()}
    if len(set(builds.values())) > 1:
        shown = ", ".join(f"{split} of {(build or 'none')[:12]}" for split, build in builds.items())
        raise ShardError(
            f"{data_dir}: its splits are of different builds ({shown}), so that one may have texts of another{_FIX}"
        )


_FIX = f": build or copy all splits together, or, if they are meant so, remove every {BUILD_NAME}"


def _write(split_dir: Path, content: BuildRecord) -> None:
    body = {"format_version": 1, **asdict(content)}
    write_text(split_dir / BUILD_NAME, json_text(body, indent=1) + "\n")
