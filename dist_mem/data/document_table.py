"""The documents of a split as columns: arrays, in memory or mapped from a file, from which entries are made on demand.

A Python object for each of ten million documents would take tens of GB in every rank. The columns take about 100 bytes
a document and its id and title; ranks that map the same file share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np

TOKEN_DTYPES = ("<u2", "<u4")
NO_YEAR = -(2**31)
NO_OFFSET = -1
_WHOLE = ("num_tokens", "words", "bytes", "tokens_offset", "mask_offset", "recall_offset")
_TEXTS = ("id", "title")
# name -> dtype and bytes or elements of a row; None: a text, of all rows together, cut at the ends in *_ends
COLUMNS: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys((*_WHOLE, *(f"{name}_ends" for name in _TEXTS)), ("<i8", 1)),
    "year": ("<i4", 1),
    "shard": ("<i4", 1),  # its number
    "dtype": ("|u1", 1),  # its number in TOKEN_DTYPES
    "sha256": ("|u1", 32),
    **dict.fromkeys((f"{name}_text" for name in _TEXTS), ("|u1", None)),
}
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

    def __init__(self, columns: Columns, shards: Sequence[ShardEntry], rows: range | None = None) -> None:
        """`columns` as in COLUMNS, (documents,) or (documents, 32); `rows`: those that belong to it (None: all)."""
        self._columns = columns
        self._shards = shards
        self._rows = range(len(columns["num_tokens"])) if rows is None else rows

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

    def _column(self, name: str) -> np.ndarray:
        column = self._columns[name]
        rows = self._rows
        return column if rows == range(len(column)) else column[np.arange(rows.start, rows.stop, rows.step)]

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
            dtype=TOKEN_DTYPES[int(columns["dtype"][row])],
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
    """Collects the columns of a table from entries as JSON has them, which must be valid."""

    def __init__(self, shards: Sequence[str]) -> None:
        """`shards`: the names of the tars."""
        self._numbers = {shard: number for number, shard in enumerate(shards)}
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        self._ends = dict.fromkeys(_TEXTS, 0)  # bytes so far
        self.num_documents = 0

    def add(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries."""
        self.num_documents += len(entries)
        for name in _WHOLE:
            self._append(name, [NO_OFFSET if entry[name] is None else entry[name] for entry in entries])
        self._append("year", [NO_YEAR if entry["year"] is None else entry["year"] for entry in entries])
        self._append("shard", [self._numbers[entry["shard"]] for entry in entries])
        self._append("dtype", [TOKEN_DTYPES.index(entry["dtype"]) for entry in entries])
        digests = bytes.fromhex("".join(entry["sha256"] for entry in entries))
        self._parts["sha256"].append(np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32))
        for name in _TEXTS:
            texts = [entry[name].encode() for entry in entries]
            ends = self._ends[name] + np.cumsum([len(text) for text in texts], dtype=np.int64)
            self._append(f"{name}_ends", ends)
            self._parts[f"{name}_text"].append(np.frombuffer(b"".join(texts), dtype=np.uint8))
            self._ends[name] = int(ends[-1]) if len(ends) else self._ends[name]

    def of(self, name: str) -> list[np.ndarray]:
        """Return the parts of a column, in order; they may be few or none."""
        return self._parts[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column."""
        return column_shape(name, self.num_documents, sum(len(part) for part in self._parts[name]))

    def has_repeated_id(self) -> bool:
        """Return whether two documents have the same id."""
        seen: set[bytes] = set()
        for ends, text in zip(self._parts["id_ends"], self._parts["id_text"], strict=True):
            starts = [0, *(ends - (int(ends[-1]) - len(text))).tolist()]
            seen.update(text[start:stop].tobytes() for start, stop in pairwise(starts))
        return len(seen) < self.num_documents

    def whole(self) -> dict[str, np.ndarray]:
        """Return the columns in memory, read-only."""
        columns = {}
        for name, (dtype, _) in COLUMNS.items():
            columns[name] = np.concatenate([np.empty((0, *self.shape(name)[1:]), dtype), *self.of(name)])
            columns[name].flags.writeable = False
        return columns

    def _append(self, name: str, values: Iterable[int] | np.ndarray) -> None:
        self._parts[name].append(np.asarray(values, dtype=COLUMNS[name][0]))


def column_shape(name: str, num_documents: int, num_text_bytes: int) -> tuple[int, ...]:
    """Return the shape of a column: (documents,), (documents, 32), or (bytes,) of the texts of all documents."""
    width = COLUMNS[name][1]
    if width is None:
        return (num_text_bytes,)
    return (num_documents,) if width == 1 else (num_documents, width)
