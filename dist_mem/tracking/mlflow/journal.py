"""The journal of a run: the entries for MLflow, written first and sent later. One JSON object a line.

    RUN/mlflow/train.jsonl
    {"format_version": 3, "uid": "5c1f...", "run_name": "demo", "experiment": {"name": "dist_mem"}}
    {"kind": "point", "time": 1764000000123, "body": {"step": 10, "metrics": {"loss": 5.1}}}

One process appends; delivery.py reads, in that process or in another one (`dist-mem track sync`). A journal only
grows, so that "the first 1200 entries" never changes. A last line without a newline is still being written, or was
when the process was killed: readers ignore it, and the writer removes it when it opens the journal again.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError, reason_of
from dist_mem.runtime.files import check_regular, fsync_path, make_folder, naming, write_text

JOURNAL = Path("mlflow") / "train.jsonl"  # in the run directory; journals of evaluations are in the same folder
FORMAT_VERSION = 3
DAMAGED = "damaged"  # kind of an entry that cannot be read


class JournalError(UnusableError):
    """A journal without a header, or of a newer format; or an entry that cannot be sent."""


class Entry(NamedTuple):
    """One entry of a journal."""

    # point | system | superseded | params | tags | datasets | checkpoint | description | status | artifact | text
    kind: str
    time: int  # milliseconds since 1970
    body: Mapping[str, Any]


class Header(NamedTuple):
    """The first line of a journal: its id, and the name and experiment with which to create its MLflow run."""

    uid: str
    run_name: str
    experiment: Mapping[str, str]  # {"name": ...} or {"id": ...}
    format_version: int = FORMAT_VERSION  # of the journal, for as long as it exists


def new_uid() -> str:
    """Return an id for a run, used before MLflow has given it one."""
    return uuid.uuid4().hex


def read_header(path: Path) -> Header:
    """Read the header of a journal. Raises JournalError, or UnusableError for a pipe."""
    check_regular(path)
    with path.open("rb") as file:
        line = file.readline()
    try:
        content = json.loads(line)
        version = content["format_version"]
        if version == FORMAT_VERSION:
            return Header(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(
            f"{path}: the first line is no header of a journal ({reason_of(error)}); move the file away"
        ) from error
    raise JournalError(f"{path}: format_version {version} is not {FORMAT_VERSION}, the one that this dist_mem reads")


def write_journal(path: Path, header: Header, entries: Iterable[Entry] = ()) -> None:
    """Write a complete journal, atomically."""
    first = json.dumps({"format_version": header.format_version, **header._asdict()}) + "\n"
    make_folder(path.parent)
    write_text(path, first + "".join(_encode(entry) for entry in entries))


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield every complete entry of a journal, in order."""
    reader = JournalReader(path)
    while entries := reader.batch(500):
        yield from entries
        reader.done()


def find_entries(path: Path, kind: str) -> list[Entry]:
    """Return every entry of one kind; faster on a large journal than `read_entries`."""
    begin = json.dumps({"kind": kind})[:-1].encode()
    with path.open("rb") as file:
        found = [_decode(line) for line in file if line.startswith(begin) and line.endswith(b"\n")]
    return [entry for entry in found if entry.kind != DAMAGED]


def is_superseded(entry: Entry, records: Iterable[Entry]) -> bool:
    """Whether a later job of the run logged this point again, with other values.

    Args:
        records: the "superseded" entries of the journal.
    """
    return entry.kind == "point" and any(
        record.body["first"] <= entry.body["step"] <= record.body["last"] and entry.time < record.body["before"]
        for record in records
    )


def _encode(entry: Entry) -> str:
    return json.dumps(entry._asdict()) + "\n"


def _decode(line: bytes) -> Entry:
    try:
        return Entry(**json.loads(line))
    except (ValueError, TypeError):
        return Entry(DAMAGED, 0, {"line": repr(line[:80])})


class Journal:
    """The writer of a journal, for one process; any of its threads may append."""

    def __init__(self, path: Path, guard: Callable[[], None] = lambda: None) -> None:
        """Open a journal that `write_journal` has created; `guard` raises when this process may no longer write."""
        self.path, self.guard = path, guard
        self.header = read_header(path)
        self._lock = threading.Lock()
        self._latest = _cut_torn_line(path)
        self.advance_clock()  # all entries of this job are later than those of the last one
        self._file = path.open(
            "a", encoding="utf-8", newline="\n", buffering=1
        )  # line-buffered: kills lose one at most

    def append(self, kind: str, body: Mapping[str, Any], *, time: float) -> int:
        """Add an entry; takes microseconds.

        Args:
            time: seconds since 1970.

        Returns:
            The time of the entry, in milliseconds. Times in a journal never decrease, even if a run moves to a node
            whose clock is behind: of two points of one step, MLflow uses the later one.
        """
        self.guard()
        with self._lock:
            self._latest = max(self._latest, int(time * 1000))
            with naming(self.path):
                self._file.write(_encode(Entry(kind, self._latest, body)))
            return self._latest

    def flush(self) -> None:
        """Flush all entries to disk. Raises OSError, which names the file."""
        with naming(self.path):
            fsync_path(self.path)

    def advance_clock(self) -> int:
        """Make all later entries later than the existing ones; return their earliest time, in milliseconds."""
        with self._lock:
            self._latest += 1
            return self._latest

    def close(self) -> None:
        """Close the journal for appending."""
        with suppress(OSError):  # a full disk: reported when the entry was appended
            self._file.close()
            self.flush()


def _cut_torn_line(path: Path) -> int:
    """Remove an incomplete last line; return the time of the last complete entry, 0 if there is none."""
    size, last = 0, b""
    with path.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                size, last = size + len(line), line
        file.truncate(size)
    return _decode(last).time


class JournalReader:
    """A position in a journal that another process may be writing; `done` moves it past the batch that was read."""

    def __init__(self, path: Path, num_done: int = 0) -> None:
        """Start after the first `num_done` entries; at the first entry if there are fewer (an old copy)."""
        self._path = path
        with path.open("rb") as file:
            self._offset = start = len(file.readline())  # the header
            self.num_done = 0
            while self.num_done < num_done and (line := file.readline()).endswith(b"\n"):
                self.num_done += 1
                self._offset += len(line)
        if self.num_done < num_done:
            self.num_done, self._offset = 0, start
        self._ahead = (self.num_done, self._offset)

    def batch(self, size: int) -> list[Entry]:
        """Return the next entries, at most `size`; repeated calls return the same ones until `done`."""
        entries: list[Entry] = []
        offset = self._offset
        with self._path.open("rb") as file:  # each time, so that a network file system shows new entries
            file.seek(offset)
            while len(entries) < size and (line := file.readline()).endswith(b"\n"):
                entries.append(_decode(line))
                offset += len(line)
        self._ahead = (self.num_done + len(entries), offset)
        return entries

    def done(self) -> None:
        """Move past the last batch."""
        self.num_done, self._offset = self._ahead
