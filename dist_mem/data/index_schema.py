"""Schema of index.json: code after `read_index` never meets a key, a type or an offset that it cannot use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from dist_mem.data.document_table import TOKEN_DTYPES, DocumentEntry
from dist_mem.data.metadata import REMEDY, ShardError
from dist_mem.data.tar import ID_PATTERN, MASK_DTYPE, MAX_TOKENS, RECALL_DTYPE
from dist_mem.runtime.file_schema import check, integer, leaf, one_of, optional, plain_name, record, rows, sha256, text
from dist_mem.runtime.names import PLAIN, is_plain

MAX_COUNT = 2**53
MAX_YEAR = 10**6
_COUNT = integer(high=MAX_COUNT)
_TAR = leaf(f"{PLAIN}, and end in .tar", lambda name: is_plain(name) and name.endswith(".tar"))
_ID = leaf("the id of a document", lambda value: isinstance(value, str) and bool(ID_PATTERN.fullmatch(value)))
_SHARD = record({"name": _TAR, "bytes": _COUNT, "sha256": sha256}, is_open=False)
_DOCUMENT = record(
    {
        "id": _ID,
        "title": text,
        "year": optional(integer(-MAX_YEAR, MAX_YEAR)),
        "words": _COUNT,
        "bytes": _COUNT,
        "num_tokens": integer(high=int(MAX_TOKENS)),
        "shard": _TAR,
        "dtype": one_of(*TOKEN_DTYPES),
        "tokens_offset": _COUNT,
        "mask_offset": optional(_COUNT),
        "recall_offset": optional(_COUNT),
        "sha256": sha256,
    },
    is_open=False,
)
_INDEX = record(
    {
        "format_version": integer(1),
        "name": plain_name,
        "split": plain_name,
        "tokenizer_fingerprint": text,
        "recipe": text,
        "official_words": optional(integer(1)),
        "num_tokens": _COUNT,
        "counted_words": _COUNT,
        "num_bytes": _COUNT,
        "shards": rows(_SHARD),
        "documents": rows(_DOCUMENT),
        "fingerprint": sha256,
    },
    is_open=False,
)
_SUMS = {"num_tokens": "num_tokens", "counted_words": "words", "num_bytes": "bytes"}  # of the split, of its documents
_KEYS = {field.name for field in fields(DocumentEntry)}
_OPTIONAL = {"year", "mask_offset", "recall_offset"}
_RANGES = [
    ("year", -MAX_YEAR, MAX_YEAR),
    ("num_tokens", 0, int(MAX_TOKENS)),
    *((key, 0, MAX_COUNT) for key in ("words", "bytes", "tokens_offset", "mask_offset", "recall_offset")),
]
_SHA256 = re.compile("[0-9a-f]{64}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be encoded
_WIDTHS = {"mask": MASK_DTYPE.itemsize, "recall": RECALL_DTYPE.itemsize}
_TOKEN_WIDTHS = {name: np.dtype(name).itemsize for name in TOKEN_DTYPES}


def check_head(head: dict[str, Any], path: Path) -> None:
    """Raise a ShardError that names the first invalid key of an index.json, the items of `documents` aside."""
    check(head, _INDEX, path, ShardError, REMEDY)
    if len({shard["name"] for shard in head["shards"]}) < len(head["shards"]):
        raise ShardError(f"{path} is damaged (shards has a name twice){REMEDY}")


class DocumentChecks:
    """Finds the first problem of the documents of an index.json, which come in parts."""

    def __init__(self, shards: Sequence[Any]) -> None:
        """`shards`: as JSON has them."""
        self.problem: str | None = next(rows(_SHARD)("shards", list(shards)), None)
        self._sizes = {} if self.problem else {shard["name"]: shard["bytes"] for shard in shards}
        self._sums = dict.fromkeys(_SUMS, 0)
        self._ids: list[np.ndarray] = []  # hashes
        self._num_documents = 0

    def add(self, entries: Sequence[Any]) -> None:
        """Check some documents. After the first problem, do nothing."""
        if self.problem is None:
            self.problem = next(self._problems(entries), None)
        if self.problem is None:
            for total, part in _SUMS.items():
                self._sums[total] += sum(entry[part] for entry in entries)
            self._ids.append(np.array([hash(entry["id"]) for entry in entries], dtype=np.int64))
        self._num_documents += len(entries)

    def finish(self, head: dict[str, Any]) -> bool:
        """Check the sums, unless there is a problem; return whether two ids may be the same."""
        if self.problem is None:
            self.problem = next(
                (
                    f"{total} is {head[total]}, but its documents have {found}"
                    for total, found in self._sums.items()
                    if head[total] != found
                ),
                None,
            )
        hashes = np.sort(np.concatenate(self._ids)) if self._ids else np.empty(0, dtype=np.int64)
        return bool((hashes[1:] == hashes[:-1]).any())

    def _problems(self, entries: Sequence[Any]) -> Iterator[str]:
        if _are_plainly_valid(entries, self._sizes):
            return
        for number, entry in enumerate(entries, self._num_documents):
            yield from _DOCUMENT(f"documents[{number}]", entry)
            size = self._sizes.get(entry["shard"])
            if size is None:
                yield f"document {entry['id']} lies in {entry['shard']!r}, which is not among its shards"
                return
            for kind, width in {"tokens": _TOKEN_WIDTHS[entry["dtype"]], **_WIDTHS}.items():
                offset = entry[f"{kind}_offset"]
                if offset is not None and offset + entry["num_tokens"] * width > size:
                    yield f"{kind} of document {entry['id']} end behind the end of {entry['shard']}"


def _are_plainly_valid(entries: Sequence[Any], sizes: Mapping[str, int]) -> bool:
    """Return True only if the schema and the checks of places accept all entries; a tenth of their time, by columns."""
    if not entries or any(type(entry) is not dict or entry.keys() != _KEYS for entry in entries):
        return False
    columns: dict[str, list[Any]] = {key: [entry[key] for entry in entries] for key in _KEYS}
    for key, low, high in _RANGES:
        found = [value for value in columns[key] if value is not None] if key in _OPTIONAL else columns[key]
        if found and not (set(map(type, found)) == {int} and low <= min(found) and max(found) <= high):
            return False
    if any(set(map(type, columns[key])) != {str} for key in ("id", "title", "shard", "dtype", "sha256")):
        return False
    if not (sizes.keys() >= set(columns["shard"]) and set(columns["dtype"]) <= set(TOKEN_DTYPES)):
        return False
    if not (all(map(ID_PATTERN.fullmatch, columns["id"])) and all(map(_SHA256.fullmatch, columns["sha256"]))):
        return False
    if _SURROGATE.search("".join(columns["title"])):
        return False
    ends = np.array([sizes[shard] for shard in columns["shard"]])
    lengths = np.array(columns["num_tokens"])
    nowhere = -8 * int(lengths.max())  # where an array that does not exist ends in front of the tar
    for kind, width in {"tokens": np.array([_TOKEN_WIDTHS[dtype] for dtype in columns["dtype"]]), **_WIDTHS}.items():
        offsets = columns[f"{kind}_offset"]
        starts = np.array([nowhere if offset is None else offset for offset in offsets])
        if bool((starts + lengths * width > ends).any()):
            return False
    return True
