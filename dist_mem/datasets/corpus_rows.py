"""Texts in files: a .txt file is one document; of JSON lines and .parquet files, each row is one.

Data flow: read_rows, one pass over a corpus -> Row, which identifies a text -> SourceDocument -> a worker: Row.read.

Rows are read from the first to the last, one batch of them in memory. A process keeps its last file open, so the
consecutive rows of all its pieces together cost one pass, also in compressed files, which have no other order.
pyarrow reads Parquet and Zstandard.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.datasets.source import decode_text, read_text, with_lf
from dist_mem.datasets.tree import suffix_of
from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import MAX_TEXT_BYTES

TEXT_SUFFIX = ".txt"
JSON_LINES = (
    *(".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"),
    *(".json.gz", ".json.zst"),  # so are large corpora named; a plain .json file may be one list of gigabytes
)
ROW_SUFFIXES = (*JSON_LINES, ".parquet")
SUFFIXES = (TEXT_SUFFIX, *ROW_SUFFIXES)
PYARROW_SUFFIXES = (".zst", ".parquet")
DEFAULT_ID_FIELD = "id"
DIGEST_BYTES = 16  # of a SHA-256
BATCH_ROWS = 64  # of a .parquet file in memory at a time
BUFFER_BYTES = 2**20  # of a column of a .parquet file, read at a time


class RowFile(NamedTuple):
    """A file of texts, and the fields to read."""

    path: Path
    text_field: str
    id_field: str | None  # None: "id", in rows that have it
    modified: int  # ns: a file that changes is another one

    def place(self, number: int) -> str:
        """Return how messages name a row."""
        suffix = suffix_of(self.path.name, SUFFIXES)
        if suffix == TEXT_SUFFIX:
            return str(self.path)
        row = "line" if suffix in JSON_LINES else "row"
        return f"{self.path}, {row} {number}"


class Content(NamedTuple):
    """What is read of a row."""

    id: str | None  # None: the row has none
    text: str  # with LF line ends, without a byte order mark


class CorpusRow(NamedTuple):
    """A text that is read again where it stands, and identified by its content."""

    file: RowFile
    number: int  # from 1; of .jsonl the line
    num_bytes: int  # of the text in UTF-8
    digest: bytes  # (DIGEST_BYTES,) of the text

    def read(self) -> str:
        """Return the text. Raises UnusableError if it is not what it was."""
        text = _reader(self.file).load(self.number).text
        if digest_of(text) != self.digest:
            raise self._change_error()
        return text

    def _change_error(self) -> UnusableError:
        return UnusableError(f"{self.file.place(self.number)} changed during the build: start the same command again")


Load = Callable[[], Content]


def digest_of(text: str) -> bytes:
    """Return the first bytes of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def check_library(path: Path) -> None:
    """Raise UnusableError if a file needs a library that is not installed."""
    if suffix_of(path.name, PYARROW_SUFFIXES):
        require("pyarrow", f"reading {path.name}")


def read_rows(file: RowFile, start: int = 1) -> Iterator[tuple[int, Load]]:
    """Yield the number of each row from `start` on, and a function that returns its content.

    Raises:
        UnusableError: the file is damaged, or lacks a field; the function: the row has no such text or id.
    """
    number = start - 1
    try:
        for number, load in _format_reader(file.path)(file, start):
            yield number, load
    except (EOFError, zlib.error, ValueError, NotImplementedError, OSError) as error:  # of gzip and pyarrow
        if isinstance(error, UnusableError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UnusableError(
            f"{file.place(number + 1)} or later: the file is damaged ({error}): copy it again"
        ) from error


def _format_reader(path: Path) -> Callable[[RowFile, int], Iterator[tuple[int, Load]]]:
    readers = {TEXT_SUFFIX: _read_text_file, ".parquet": _read_parquet}
    return readers.get(path.suffix.lower(), _read_json_lines)


def _read_text_file(file: RowFile, start: int) -> Iterator[tuple[int, Load]]:
    if start == 1:
        yield 1, lambda: Content(None, read_text(file.path))


def _read_json_lines(file: RowFile, start: int) -> Iterator[tuple[int, Load]]:
    with _open_lines(file.path) as lines:
        for number, line in enumerate(iter(partial(lines.readline, MAX_TEXT_BYTES + 1), b""), 1):
            if len(line) > MAX_TEXT_BYTES:
                raise UnusableError(f"{file.place(number)} has more than {MAX_TEXT_BYTES:,} bytes: cut it")
            if number >= start and not line.isspace():
                yield number, partial(_parse_line, file, number, line)


def _open_lines(path: Path) -> io.BufferedIOBase:
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _parse_line(file: RowFile, number: int, line: bytes) -> Content:
    where = file.place(number)
    names: list[str] = []  # two equal ones too

    def keep_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names[:] = [name for name, _ in pairs]  # of the outermost object, which comes last
        return dict(pairs)

    text = decode_text(line, where, has_mark=number == 1)
    try:
        fields = json.loads(text, object_pairs_hook=keep_names)
    except (RecursionError, ValueError) as error:
        raise UnusableError(f"{where} is not JSON ({error}): correct or delete it") from error
    if not isinstance(fields, dict):
        raise UnusableError(f"{where} is JSON but no object with fields: correct or delete it")
    _check_fields(file, names, where)
    return _content(file, where, fields)


def _read_parquet(file: RowFile, start: int) -> Iterator[tuple[int, Load]]:
    from pyarrow.parquet import ParquetFile

    # pre_buffer, the default, reads a row group whole before its first row: 177 MB instead of 18 for one of 160 MB
    with ParquetFile(file.path, pre_buffer=False, buffer_size=BUFFER_BYTES) as table:
        columns = _check_fields(file, table.schema_arrow.names, str(file.path))
        number = 1
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if number + num_rows <= start:
                number += num_rows
                continue
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                for place in range(batch.num_rows):
                    if number >= start:
                        yield number, partial(_batch_row, file, number, batch, place)
                    number += 1


def _names_in(file: RowFile, batch: Any) -> set[str]:
    return {file.text_field, file.id_field or DEFAULT_ID_FIELD}.intersection(batch.schema.names)


def _batch_row(file: RowFile, number: int, batch: Any, place: int) -> Content:
    where = file.place(number)
    try:
        fields = {name: batch.column(name)[place].as_py() for name in _names_in(file, batch)}
    except UnicodeDecodeError as error:
        raise UnusableError(f"{where} is not UTF-8 ({error}): correct or delete the row") from error
    return _content(file, where, fields)


def _check_fields(file: RowFile, names: Sequence[str], where: str) -> list[str]:
    """Return which fields to read; raise UnusableError if one is missing, or there are two of its name."""
    wanted = [(file.text_field, "--text-field"), (file.id_field, "--id-field")]
    for name, option in wanted:
        if name is not None and name not in names:
            listed = ", ".join(map(repr, names)) or "none"
            raise UnusableError(
                f"{where} has no field {name!r}; its fields are {listed}: name the right one by {option}"
            )
    for name in (file.text_field, file.id_field or DEFAULT_ID_FIELD):
        if names.count(name) > 1:
            raise UnusableError(
                f"{where} has {names.count(name)} fields {name!r}: rename or remove all but one, or name another "
                "one by --text-field or --id-field"
            )
    return [name for name in (file.text_field, file.id_field or DEFAULT_ID_FIELD) if name in names]


def _content(file: RowFile, where: str, fields: dict[str, Any]) -> Content:
    text, given = fields[file.text_field], fields.get(file.id_field or DEFAULT_ID_FIELD)
    if not isinstance(text, str):
        raise UnusableError(f"{where}: field {file.text_field!r} is {_kind(text)}, not text: correct or delete the row")
    if given is None and file.id_field is None:
        document_id = None
    elif isinstance(given, str | int) and not isinstance(given, bool) and str(given):
        document_id = str(given)
    else:
        name = file.id_field or DEFAULT_ID_FIELD
        raise UnusableError(f"{where}: field {name!r} is {_kind(given)}, no id: an id is a number or a text")
    try:
        ((document_id or "") + text).encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UnusableError(f"{where}: the text is not Unicode ({error.reason}): correct or delete the row") from error
    return Content(document_id, with_lf(text.removeprefix("\ufeff")))  # as `read_text` does


def _kind(value: Any) -> str:
    return "null" if value is None else "empty" if value == "" else type(value).__name__


class _Reader:
    """The rows of one file, in rising order at no cost; a step back begins again at the first."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.rows: Iterator[tuple[int, Load]] = iter(())
        self.last = sys.maxsize  # row read last; maxsize: open the file first

    def load(self, number: int) -> Content:
        if number <= self.last:
            self.rows = read_rows(self.file, number)
        self.last = sys.maxsize  # until this succeeds
        for found, load in self.rows:
            if found == number:
                content = load()
                self.last = number
                return content
        raise UnusableError(f"{self.file.path} has no row {number} any more: start the same command again")


@lru_cache(maxsize=1)
def _reader(file: RowFile) -> _Reader:
    return _Reader(file)
