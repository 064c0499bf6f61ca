"""The index of a split: a short index.json, and documents.safetensors, whose columns describe the documents.

    index.json               names, totals, the tars; size and checksum of documents.safetensors; written last
    documents.safetensors    for each document a row of every column: its tar, the places of its arrays, counts, texts

Every opening compares documents.safetensors with its checksum, checks the values, and maps the columns, so all ranks of
a node share them: a Python object for each of ten million documents would take tens of GB in every rank. The columns
take 105 bytes per document, its id and its title. An entry is made from them when it is read. Any program that reads
safetensors can read the file; the library's own reader copies instead of mapping.
"""

from __future__ import annotations

import hashlib
import json
import os
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from safetensors.numpy import save

from dist_mem.data.metadata import BUILD_FIRST, REMEDY, ShardError, read_metadata, reading
from dist_mem.data.tar import ID_PATTERN, MASK_DTYPE, MAX_ID_LEN, MAX_TOKENS, RECALL_DTYPE
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import (
    check,
    integer,
    leaf,
    list_of,
    one_of,
    optional,
    plain_name,
    record,
    sha256,
    text,
)
from dist_mem.runtime.files import open_regular, sha256_of, write_bytes, write_text
from dist_mem.runtime.names import PLAIN, is_plain

FORMAT_VERSION = 2
INDEX_NAME = "index.json"
DOCUMENTS_NAME = "documents.safetensors"
MAX_COUNT = 2**53
MAX_INDEX_BYTES = 2**26  # of index.json, about 400,000 tars
BLOCK_BYTES = 2**22  # of a text that is checked at once
NO_YEAR = -(2**31)
NO_OFFSET = -1
_TEXTS = ("id", "title")  # those of all documents are one column, *_text, which *_ends cuts
_DTYPES = {  # of the columns
    **dict.fromkeys(("num_tokens", "words", "bytes", "tokens_offset", "mask_offset", "recall_offset"), "<i8"),
    **dict.fromkeys((f"{name}_ends" for name in _TEXTS), "<i8"),
    "year": "<i4",  # NO_YEAR: not known
    "shard": "<i4",  # its number in index.json
    "token_bytes": "|u1",  # of one token: 2 or 4
    "sha256": "|u1",  # (documents, 32)
    **dict.fromkeys((f"{name}_text" for name in _TEXTS), "|u1"),  # (bytes,)
}
_IN_ID = np.array([ID_PATTERN.fullmatch(chr(code)) is not None for code in range(256)])
_RANGES = {
    "num_tokens": (0, int(MAX_TOKENS)),
    **dict.fromkeys(("words", "bytes", "tokens_offset"), (0, MAX_COUNT)),
    **dict.fromkeys(("mask_offset", "recall_offset"), (NO_OFFSET, MAX_COUNT)),
}
_SUMS = {"num_tokens": "num_tokens", "counted_words": "words", "num_bytes": "bytes"}  # of the split, of its documents
_COUNT = integer(high=MAX_COUNT)
_TAR = leaf(f"{PLAIN}, and end in .tar", lambda name: is_plain(name) and name.endswith(".tar"))
_INDEX = record(
    {
        "format_version": integer(1),
        "name": plain_name,
        "split": plain_name,
        "tokenizer_fingerprint": text,
        "recipe": text,
        "official_words": optional(integer(1)),
        **dict.fromkeys(("num_documents", *_SUMS), _COUNT),
        "shards": list_of(record({"name": _TAR, "bytes": _COUNT, "sha256": sha256}, is_open=False)),
        "documents": record({"name": one_of(DOCUMENTS_NAME), "bytes": integer(1), "sha256": sha256}, is_open=False),
        "fingerprint": sha256,
    },
    is_open=False,
)
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class DocumentEntry:
    """Location of a document's arrays; offsets are bytes from the start of the tar to the first array element."""

    id: str
    title: str
    year: int | None
    words: int
    bytes: int
    num_tokens: int
    shard: str
    dtype: str  # of the tokens: "<u2" or "<u4"
    tokens_offset: int
    mask_offset: int | None
    recall_offset: int | None
    sha256: str  # of the token bytes, followed by those of mask and recall where they exist


@dataclass(frozen=True)
class ShardEntry:
    """A tar of the index."""

    name: str
    bytes: int
    sha256: str


class DocumentTable(Sequence[DocumentEntry]):
    """The entries of a split. Each is made when it is read. Equal to any sequence of the same entries."""

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash either

    def __init__(self, columns: Columns, shards: Sequence[ShardEntry], numbers: range | None = None) -> None:
        """`columns` as in documents.safetensors; `numbers`: of the rows that belong to the table (None: all)."""
        self._columns = columns
        self._shards = shards
        self._rows = range(len(columns["num_tokens"])) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> DocumentEntry: ...
    @overload
    def __getitem__(self, number: slice) -> DocumentTable: ...
    def __getitem__(self, number: int | slice) -> DocumentEntry | DocumentTable:
        if isinstance(number, slice):
            return DocumentTable(self._columns, self._shards, self._rows[number])
        return self._entry(self._rows[number])

    def __iter__(self) -> Iterator[DocumentEntry]:
        return map(self._entry, self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"DocumentTable of {len(self)} documents"

    @property
    def num_tokens(self) -> np.ndarray:
        """Length of each document in tokens, (documents,) int64, read-only."""
        return self._column("num_tokens")

    @property
    def has_recall(self) -> bool:
        """Whether recall distances of any document are recorded."""
        return bool((self._column("recall_offset") != NO_OFFSET).any())

    def shard_of(self, number: int) -> ShardEntry:
        """Return the tar of a document."""
        return self._shards[int(self._columns["shard"][self._rows[number]])]

    def in_shard(self, shard: ShardEntry) -> list[int]:
        """Return the numbers of the documents in a tar."""
        return np.flatnonzero(self._column("shard") == self._shards.index(shard)).tolist()

    def _column(self, name: str) -> np.ndarray:
        column = self._columns[name]
        numbers = self._rows
        return column if numbers == range(len(column)) else column[np.arange(numbers.start, numbers.stop, numbers.step)]

    def _entry(self, row: int) -> DocumentEntry:
        columns = self._columns
        year = int(columns["year"][row])
        mask_offset, recall_offset = int(columns["mask_offset"][row]), int(columns["recall_offset"][row])
        return DocumentEntry(
            id=self._text("id", row),
            title=self._text("title", row),
            year=None if year == NO_YEAR else year,
            words=int(columns["words"][row]),
            bytes=int(columns["bytes"][row]),
            num_tokens=int(columns["num_tokens"][row]),
            shard=self._shards[int(columns["shard"][row])].name,
            dtype=f"<u{int(columns['token_bytes'][row])}",
            tokens_offset=int(columns["tokens_offset"][row]),
            mask_offset=None if mask_offset == NO_OFFSET else mask_offset,
            recall_offset=None if recall_offset == NO_OFFSET else recall_offset,
            sha256=columns["sha256"][row].tobytes().hex(),
        )

    def _text(self, name: str, row: int) -> str:
        ends = self._columns[f"{name}_ends"]
        start = int(ends[row - 1]) if row else 0
        return self._columns[f"{name}_text"][start : int(ends[row])].tobytes().decode()


class ColumnParts:
    """Collects the columns of a split, tar by tar, with a fraction of the memory that their entries would take."""

    def __init__(self) -> None:
        self._parts = {name: [np.empty((0, 32) if name == "sha256" else 0, dtype)] for name, dtype in _DTYPES.items()}
        self._ends = dict.fromkeys(_TEXTS, 0)  # bytes so far

    def add(self, entries: Sequence[DocumentEntry], shard: int) -> None:
        """Append the documents of a tar; `shard` is its number."""
        absent = {"year": NO_YEAR, "mask_offset": NO_OFFSET, "recall_offset": NO_OFFSET}
        for name in ("year", *_RANGES):
            values = [getattr(entry, name) for entry in entries]
            self._append(name, [absent[name] if value is None else value for value in values])
        self._append("shard", [shard] * len(entries))
        self._append("token_bytes", [np.dtype(entry.dtype).itemsize for entry in entries])
        digests = bytes.fromhex("".join(entry.sha256 for entry in entries))
        self._append("sha256", np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32))
        for name in _TEXTS:
            texts = [getattr(entry, name).encode() for entry in entries]
            ends = self._ends[name] + np.cumsum([len(each) for each in texts], dtype=np.int64)
            self._append(f"{name}_ends", ends)
            self._append(f"{name}_text", np.frombuffer(b"".join(texts), dtype=np.uint8))
            self._ends[name] = int(ends[-1])

    def join_columns(self) -> dict[str, np.ndarray]:
        """Return the columns."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    def _append(self, name: str, values: Any) -> None:
        self._parts[name].append(np.asarray(values, dtype=_DTYPES[name]))


def write_index(split_dir: Path, head: Mapping[str, Any], columns: Columns) -> None:
    """Write documents.safetensors and then index.json, each atomically. Raises OSError.

    Args:
        head: the keys of index.json but `documents` and `fingerprint`, which follow from the rest.
    """
    path = split_dir / DOCUMENTS_NAME
    write_bytes(path, save({name: columns[name] for name in _DTYPES}))
    documents = {"name": DOCUMENTS_NAME, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    body = {**head, "documents": documents}
    body["fingerprint"] = fingerprint_of(body)
    write_text(split_dir / INDEX_NAME, json_text(body, indent=1) + "\n")


def read_index_json(path: Path) -> dict[str, Any]:
    """Read and check an index.json.

    Raises:
        ShardError: it is missing, damaged, or of another format.
    """
    with reading(path, BUILD_FIRST), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > MAX_INDEX_BYTES:
        raise ShardError(f"{path} has {size:,} bytes, so it is of an older format, with all documents in it{REMEDY}")
    body = read_metadata(path, version=FORMAT_VERSION)
    if body.get("fingerprint") != fingerprint_of(body):
        raise ShardError(f"{path} is damaged (its content does not match its fingerprint){REMEDY}")
    check(body, _INDEX, path, ShardError, REMEDY)
    if len({shard["name"] for shard in body["shards"]}) < len(body["shards"]):
        raise ShardError(f"{path} is damaged (shards has a name twice){REMEDY}")
    return body


def fingerprint_of(body: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of all keys but `fingerprint` as JSON with sorted keys and no spaces."""
    content = {key: value for key, value in body.items() if key != "fingerprint"}
    return hashlib.sha256(json_text(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def map_documents(path: Path, head: Mapping[str, Any], index_path: Path) -> DocumentTable:
    """Check a documents.safetensors and map its columns.

    Args:
        head, index_path: content and path of the index.json.

    Raises:
        ShardError: it is missing or damaged, or belongs to another index.json.
    """
    stated = head["documents"]
    with reading(path, f", but {index_path} names it{REMEDY}"), open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if (file.tell(), found) != (stated["bytes"], stated["sha256"]):
            raise ShardError(
                f"{path} has {file.tell():,} bytes with sha256 {found[:12]}, but {index_path} says "
                f"{stated['bytes']:,} with {stated['sha256'][:12]}; one is damaged, or they are of two builds{REMEDY}"
            )
        content = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    columns = _cut_columns(content, head["num_documents"])
    problem = "its columns are not those of an index" if columns is None else next(_problems(columns, head), None)
    if columns is None or problem is not None:
        raise ShardError(f"{path} is damaged ({problem}){REMEDY}")
    return DocumentTable(columns, [ShardEntry(**shard) for shard in head["shards"]])


def _cut_columns(content: np.ndarray, num_documents: int) -> dict[str, np.ndarray] | None:
    """Return the columns in the content of a safetensors file; None if it does not have them in these shapes."""
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    values = content[begin:]
    try:
        header = json.loads(content[8:begin].tobytes())
        return {
            name: values[slice(*header[name]["data_offsets"])].view(dtype).reshape(_shape(name, num_documents))
            for name, dtype in _DTYPES.items()
        }
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _shape(name: str, num_documents: int) -> tuple[int, ...]:
    if name.endswith("_text"):
        return (-1,)
    return (num_documents, 32) if name == "sha256" else (num_documents,)


def _problems(columns: Columns, head: Mapping[str, Any]) -> Iterator[str]:
    """Yield what no reader could use, though the checksum is right: its writer need not have known the format.

    A problem makes those after it meaningless.
    """
    text_sizes = {f"{name}_ends": (0, len(columns[f"{name}_text"])) for name in _TEXTS}
    for name, (low, high) in {**_RANGES, "shard": (0, len(head["shards"]) - 1), **text_sizes}.items():
        values = columns[name]
        for row in _first((values < low) | (values > high)):
            yield f"{name} of document {row} is {values[row]}, but must be from {low} to {high}"
    for row in _first(~np.isin(columns["token_bytes"], (2, 4))):
        yield f"token_bytes of document {row} is {columns['token_bytes'][row]}, but must be 2 or 4"
    for name in _TEXTS:
        yield from _text_problems(name, columns[f"{name}_ends"], columns[f"{name}_text"])
    shards = [ShardEntry(**shard) for shard in head["shards"]]
    sizes = np.array([shard.bytes for shard in shards], dtype=np.int64)[columns["shard"]]
    widths = {"tokens": columns["token_bytes"], "mask": MASK_DTYPE.itemsize, "recall": RECALL_DTYPE.itemsize}
    for kind, width in widths.items():
        offsets = columns[f"{kind}_offset"]
        for row in _first((offsets != NO_OFFSET) & (offsets + columns["num_tokens"] * width > sizes)):
            entry = DocumentTable(columns, shards)[row]
            yield f"{kind} of document {entry.id} end behind the end of {entry.shard}"
    for total, name in _SUMS.items():
        if head[total] != (found := int(columns[name].sum())):
            yield f"its documents have {found} {name}, but {total} of {INDEX_NAME} is {head[total]}"


def _text_problems(name: str, ends: np.ndarray, joined: np.ndarray) -> Iterator[str]:
    lengths = np.diff(ends, prepend=0)
    if (ends[-1] if len(ends) else 0) != len(joined) or (lengths < 0).any():
        yield f"{name}_ends do not cut {name}_text into texts"
        return
    if name == "id":
        for row in _first((lengths < 1) | (lengths > MAX_ID_LEN)):
            yield f"the id of document {row} has {lengths[row]} bytes, but must have 1 to {MAX_ID_LEN}"
        for place in _first(~_IN_ID[joined]):
            yield f"an id has the byte {joined[place]:#04x}, which no id may have"
        return
    decode = getincrementaldecoder("utf-8")().decode
    try:
        for first in range(0, len(joined) + 1, BLOCK_BYTES):
            decode(joined[first : first + BLOCK_BYTES].data, final=first + BLOCK_BYTES > len(joined))
    except UnicodeDecodeError as error:
        yield f"a {name} is no UTF-8: {error.reason}"
        return
    starts = ends[ends < len(joined)]
    yield from (
        f"the {name} of document {row} ends within a character" for row in _first(joined[starts] & 0xC0 == 0x80)
    )


def _first(is_wrong: np.ndarray) -> Iterator[int]:
    """Yield the first place that is wrong, if any is."""
    yield from np.flatnonzero(is_wrong)[:1].tolist()
