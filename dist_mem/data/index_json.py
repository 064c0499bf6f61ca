"""Read and check an index.json of any size, with memory for the columns of its documents, not for its text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_mem.data.document_table import ColumnParts, ShardEntry
from dist_mem.data.index_schema import DocumentChecks, check_head
from dist_mem.data.json_stream import object_parts
from dist_mem.data.metadata import BUILD_FIRST, REMEDY, ShardError, check_version, reading

BLOCK_BYTES = 2**22  # of one read
_BEFORE_DOCUMENTS = ("counted_words", "shards")  # the fingerprint needs one of them first, the checks the other


@dataclass(frozen=True)
class IndexContent:
    """The content of an index.json."""

    head: dict[str, Any]  # all keys but shards and documents
    shards: list[ShardEntry]
    documents: ColumnParts
    sha256: str  # of the bytes of the file


def read_index_json(path: Path) -> IndexContent:
    """Read and check an index.json.

    Raises:
        ShardError: it is missing, damaged, or of a newer format.
    """
    reader = _Reader()
    digest = hashlib.sha256()
    with reading(path, BUILD_FIRST):
        try:
            for key, value, is_list in object_parts(_blocks(path, digest)):
                reader.add(key, value, is_list=is_list)
        except (ValueError, RecursionError) as error:
            raise ShardError(f"{path} is damaged (not readable as JSON: {error}){REMEDY}") from error
    return reader.finish(path, digest.hexdigest())


def fingerprint_of(body: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of all keys but `fingerprint` as JSON with sorted keys and no spaces."""
    content = {key: value for key, value in body.items() if key != "fingerprint"}
    return hashlib.sha256(_canonical(content)).hexdigest()


class _Reader:
    """Takes the parts of an index.json. The fingerprint is computed as they come, if they come in the usual order."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._in_documents = False
        self._hash = hashlib.sha256()
        self._checks = DocumentChecks([])
        self._columns = ColumnParts([])
        self._late: str | None = None  # a key that should have come before the documents

    def add(self, key: str, value: Any, *, is_list: bool) -> None:
        if not is_list:
            self._head[key] = value
        elif key != "documents":
            self._head.setdefault(key, []).extend(value)
        else:
            if key not in self._head:
                self._begin_documents()
            self._add_documents(value)

    def finish(self, path: Path, sha256: str) -> IndexContent:
        head = self._head
        check_version(head, path)
        if self._late is None and head.get("fingerprint") != self._fingerprint():
            raise ShardError(f"{path} is damaged (its content does not match its fingerprint){REMEDY}")
        check_head(head, path)
        if self._late is not None:
            raise ShardError(f"{path} is damaged ({self._late} must come before documents){REMEDY}")
        may_repeat = self._checks.finish(head)
        problem = self._checks.problem
        if problem is None and may_repeat and self._columns.has_repeated_id():
            problem = "documents has an id twice"
        if problem is not None:
            raise ShardError(f"{path} is damaged ({problem}){REMEDY}")
        shards = [ShardEntry(**shard) for shard in head["shards"]]
        rest = {key: value for key, value in head.items() if key not in ("shards", "documents")}
        return IndexContent(rest, shards, self._columns, sha256)

    def _begin_documents(self) -> None:
        self._late = next((key for key in _BEFORE_DOCUMENTS if key not in self._head), None)
        earlier = {key: value for key, value in self._head.items() if key < "documents"}
        self._head["documents"] = []
        self._hash.update(_canonical(earlier)[:-1] + b',"documents":[')
        if self._late is None:
            self._checks = DocumentChecks(self._head["shards"])

    def _add_documents(self, entries: list[Any]) -> None:
        if self._late is not None or not entries:
            return
        self._hash.update((b"," if self._in_documents else b"") + _canonical(entries)[1:-1])
        self._in_documents = True
        self._checks.add(entries)
        if self._checks.problem is None:
            if not self._columns.num_documents:
                self._columns = ColumnParts([shard["name"] for shard in self._head["shards"]])
            self._columns.add(entries)

    def _fingerprint(self) -> str:
        if self._head.get("documents") != []:
            return fingerprint_of(self._head)  # they are missing or no list
        later = {key: value for key, value in self._head.items() if key > "documents" and key != "fingerprint"}
        digest = self._hash.copy()
        digest.update(b"]" + (b"," + _canonical(later)[1:] if later else b"}"))
        return digest.hexdigest()


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _blocks(path: Path, digest: Any) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            yield block
