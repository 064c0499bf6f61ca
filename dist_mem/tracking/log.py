"""The log of a run, RUN/metrics.jsonl: everything that is recorded, one JSON object a line. It only grows.

    {"format_version": 4, "uid": "5c1f...", "run_name": "demo", "experiment": {"name": "dist_mem"}}
    {"kind": "point", "time": 1764000000123, "body": {"step": 10, "metrics": {"loss": 5.1}}}

    point                        metrics of a step; what JSON lacks is a text: "NaN", "Infinity"
    rewind                       a job continues from `step`: the points past it count no more, they are made again;
                                 nor do the last `surplus` points up to it, logged after the checkpoint was saved
    repeat                       a point made again with the values of before, apart from measurements such as times
    branch                       from here on, the steps `first` to `last` differ from what was logged before
    system                       system metrics, by the number of the sample
    params, tags, datasets, checkpoint, status, artifact, text

Every reader has a mark of how far it has read: MLflow in a tag of its run, TensorBoard and W&B in a file (readers.py).
One process appends, and others may read at the same time. So "the first 1200 entries" never changes, and no line may be
removed. A last line without a newline is still being written, or was when the process was killed: readers ignore it,
and the writer removes it when it opens the log again. The file of an evaluation, which MLflow alone reads, has this
format too.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import NAMED, json_text
from dist_mem.runtime.file_schema import (
    Schema,
    integer,
    leaf,
    list_of,
    named_metric,
    one_of,
    optional,
    read_json_line,
    record,
    table,
    text,
)
from dist_mem.runtime.files import fsync_path, is_missing, make_folder, naming, open_regular, write_text

METRICS_FILE = "metrics.jsonl"  # in the run directory
FORMAT_VERSION = 4
DAMAGED = "damaged"  # kind of an entry that cannot be read
EMPTIED = "emptied"  # kind of a line that a user has emptied, as _REMEDY says
STATUSES = ("FINISHED", "FAILED", "KILLED")  # of a run that has ended
COUNTED = ("point", "repeat", "rewind")  # kinds that say which points count
_BEGIN = b'{"kind": "'  # of every entry
_POINT = re.compile(_BEGIN + rb'(?:point|repeat)", "time": \d+, "body": {"step": (\d+),')  # begin of one, with its step
_BLOCK = 1 << 18  # bytes that are read at once from the end
_REMEDY = "; correct that line, or empty it and keep its end: MLflow counts lines"

_NO_LOG = "; this dist_mem did not write it: move it away"

_VERSION = record({"format_version": integer()}, is_open=True)
_EXPERIMENT = leaf('{"name": TEXT} or {"id": TEXT}', lambda value: _is_experiment(value))
_UID = leaf(
    "letters, digits, - and _",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\w-]{1,64}", value, re.ASCII)),
)
_HEADER = record({"uid": _UID, "run_name": text, "experiment": optional(_EXPERIMENT)}, is_open=True)
_step, _time = integer(), integer(high=253_402_300_799_999)  # to the end of the year 9999, the last one of `datetime`
_texts = table(text, keys=text)
_point = record({"step": _step, "metrics": table(named_metric, keys=text)}, is_open=True)
_dataset = record(
    {"profile": leaf("an object", lambda value: isinstance(value, dict))}
    | dict.fromkeys(("name", "digest", "source", "context"), text),
    is_open=True,
)


def _is_experiment(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and [*value] in (["name"], ["id"])
        and all(isinstance(each, str) for each in value.values())
    )


def _logged_point(key: str, value: Any) -> Iterator[str]:
    """Yield the problems of a point in the entry of a checkpoint, which is a list."""
    if isinstance(value, list) and len(value) == len(Entry._fields):
        yield from _ENTRIES["point"](key, dict(zip(Entry._fields, value, strict=True)))
    else:
        yield f"{key} must be a list of {', '.join(Entry._fields)}"


BODIES: Mapping[str, Schema] = {  # of every kind of entry
    "point": _point,
    "repeat": _point,
    "system": _point,
    "rewind": record({"step": _step}, {"surplus": integer()}, is_open=True),
    "branch": record({"first": _step, "last": _step, "before": _time}, is_open=True),
    "params": record({"params": _texts, "changes": text, "step": _step}, {"config": _texts}, is_open=True),
    "tags": _texts,
    "datasets": record({"datasets": list_of(_dataset)}, is_open=True),
    "checkpoint": record({"step": _step, "points": list_of(_logged_point)}, {"path": text}, is_open=True),
    "status": record({"status": one_of("RUNNING", *STATUSES)}, is_open=True),
    "artifact": record({"path": text}, is_open=True),
    "text": record({"text": text, "name": text}, is_open=True),
}
_ENTRIES = {
    kind: record({"kind": one_of(kind), "time": _time, "body": body}, is_open=False) for kind, body in BODIES.items()
}
_KIND = record({"kind": one_of(*BODIES)}, is_open=True)


def _entry(key: str, value: Any) -> Iterator[str]:
    """Yield the problems of an entry of any kind."""
    kind = value.get("kind") if isinstance(value, dict) else None
    yield from (_ENTRIES[kind] if isinstance(kind, str) and kind in _ENTRIES else _KIND)(key, value)


class LogError(UnusableError):
    """A log without a header, or of another format; or an entry that cannot be sent."""


class Point(NamedTuple):
    """The metrics of one step."""

    step: int
    time: float  # seconds since 1970
    metrics: Mapping[str, float]  # of training: "loss"; of an evaluation: "validation/word_perplexity"


class Entry(NamedTuple):
    """One entry of a log."""

    kind: str
    time: int  # milliseconds since 1970
    body: Mapping[str, Any]


class Header(NamedTuple):
    """The first line of a log: its id, and the name and experiment with which to create its MLflow run."""

    uid: str
    run_name: str
    experiment: Mapping[str, str] | None  # {"name": ...} or {"id": ...}; None: MLflow was off
    format_version: int = FORMAT_VERSION


def new_uid() -> str:
    """Return an id for a run, used before MLflow has given it one."""
    return uuid.uuid4().hex


# Reading


def read_header(path: Path) -> Header:
    """Read the header of a log. Raises LogError, or UnusableError for a pipe."""
    with open_regular(path) as file:
        return _header(file.readline(), path)


def _header(line: bytes, path: Path) -> Header:
    version = read_json_line(line, _VERSION, path, LogError, _NO_LOG, place="its header")["format_version"]
    if version != FORMAT_VERSION:
        raise LogError(f"{path}: format_version {version} is not {FORMAT_VERSION}, the one that this dist_mem reads")
    found = read_json_line(line, _HEADER, path, LogError, _NO_LOG, place="its header")
    return Header(found["uid"], found["run_name"], found["experiment"])


def read_points(path: Path) -> list[Point]:
    """Return the points that count, each step as it was last made, in order; an absent file has none.

    Raises:
        UnusableError: a line is no entry, or the file is a pipe.
    """
    if is_missing(path):
        return []
    with open_regular(path) as file:
        _header(file.readline(), path)
        lines = ((line, f"line {number}") for number, line in enumerate(file, start=2) if line.endswith(b"\n"))
        return select_counted(filter(None, (_check_line(line, path, COUNTED, place=place) for line, place in lines)))


def counted_steps(path: Path) -> list[int]:
    """Return the step of each point that counts, in order, without decoding the points; raises as `read_points`."""
    steps: list[int] = []
    with open_regular(path) as file:
        _header(file.readline(), path)
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                break
            if found := _POINT.match(line):
                steps.append(int(found[1]))
            elif (entry := _check_line(line, path, COUNTED, place=f"line {number}")) is None:
                continue
            elif entry.kind == "rewind":
                del steps[bisect_right(steps, entry.body["step"]) :]
                del steps[len(steps) - entry.body.get("surplus", 0) :]
            else:
                steps.append(entry.body["step"])
    return steps


def select_counted(entries: Iterable[Entry]) -> list[Point]:
    """Return the points that count, from the entries of a log that are points, repeats and rewinds, perhaps others."""
    points: list[Point] = []
    for entry in entries:
        if entry.kind == "rewind":
            points = [point for point in points if point.step <= entry.body["step"]]
            points = points[: len(points) - entry.body.get("surplus", 0)]
        elif entry.kind in COUNTED:
            points.append(as_point(entry))
    return points


def check_log(path: Path) -> None:
    """Check every entry of a log, so that its readers can rely on all of them.

    Raises:
        LogError: a line is no entry, or its body is not that of its kind.
        OSError: there is no such file.
        UnusableError: it is a pipe, a device or a folder.
    """
    with open_regular(path) as file:
        _header(file.readline(), path)
        for number, line in enumerate(file, start=2):
            if line.endswith(b"\n") and line.strip():
                read_json_line(line, _entry, path, LogError, _REMEDY, place=f"line {number}")


def _check_line(line: bytes, path: Path, kinds: Sequence[str], *, place: str) -> Entry | None:
    """Return an entry of some kinds; None for an emptied line and for other kinds, which are not decoded."""
    kind = line.removeprefix(_BEGIN).partition(b'"')[0].decode("ascii", "replace")
    if kind in kinds:
        return _with_floats(Entry(**read_json_line(line, _ENTRIES[kind], path, LogError, _REMEDY, place=place)))
    if line.strip() and not line.startswith(_BEGIN):
        raise LogError(f"{path} is damaged ({place} is no entry of a log){_REMEDY}")
    return None


def last_point(path: Path, metric: str) -> Point | None:
    """Return the last point that counts and has a metric, read from the end of the log; None: there is none.

    Raises:
        UnusableError: a line after it is no entry.
    """
    if is_missing(path):
        return None
    read_header(path)
    last_step, surplus = math.inf, 0  # of a step, as all surplus points are of the one that is restored
    for count, line in enumerate(_lines_backwards(path), start=1):
        entry = _check_line(line, path, COUNTED, place=f"line {count} from its end")
        if entry is None or entry.body["step"] > last_step:
            continue
        if entry.kind == "rewind":
            last_step, surplus = entry.body["step"], surplus + entry.body.get("surplus", 0)
        elif surplus:
            surplus -= 1
        elif metric in entry.body["metrics"]:
            return as_point(entry)
    return None


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the complete lines after the header, the last one first."""
    with open_regular(path) as file:
        begin, rest = file.seek(0, 2), None
        while begin:
            end, begin = begin, max(0, begin - _BLOCK)
            file.seek(begin)
            first, *lines = (file.read(end - begin) + (rest or b"")).split(b"\n")
            yield from reversed(lines[:-1] if rest is None else lines)  # the last of all is empty, or being written
            rest = first


def as_point(entry: Entry) -> Point:
    """Return the point of an entry."""
    return Point(entry.body["step"], entry.time / 1000, entry.body["metrics"])


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield every complete entry of a log, in order."""
    reader = LogReader(path)
    while entries := reader.batch(500):
        yield from entries
        reader.pass_batch()


def find_entries(path: Path, *kinds: str, first: int = 0) -> list[Entry]:
    """Return every entry of some kinds; faster on a large log than `read_entries`.

    Args:
        first: a step; points and repeats of earlier ones are left out, without decoding them.
    """
    begins = _begins(kinds)
    with open_regular(path) as file:
        lines = (line for line in file if line.startswith(begins) and line.endswith(b"\n"))
        found = [_decode(line) for line in lines if not ((at := _POINT.match(line)) and int(at[1]) < first)]
    return [entry for entry in found if entry.kind != DAMAGED]


def last_entry(path: Path, *kinds: str) -> Entry | None:
    """Return the last entry, of some kinds or any, read from the end of the log; None: there is none."""
    begins = _begins(kinds)
    found = (_decode(line) for line in _lines_backwards(path) if line.startswith(begins))
    return next((entry for entry in found if entry.kind not in (DAMAGED, EMPTIED)), None)


def _begins(kinds: Sequence[str]) -> tuple[bytes, ...]:
    """Return how the lines of these kinds begin; of no kinds, those of all."""
    return tuple(_BEGIN + kind.encode() + b'"' for kind in kinds) or (b"",)


def is_superseded(entry: Entry, branches: Iterable[Entry]) -> bool:
    """Whether a later job of the run logged this point again, with other values.

    Args:
        branches: the "branch" entries of the log.
    """
    return entry.kind == "point" and any(
        branch.body["first"] <= entry.body["step"] <= branch.body["last"] and entry.time < branch.body["before"]
        for branch in branches
    )


class LogReader:
    """A position in a log that another process may be writing; `pass_batch` moves it past the batch that was read."""

    def __init__(self, path: Path, num_done: int = 0, *, kinds: Sequence[str] = ()) -> None:
        """Start after the first `num_done` entries; at the first entry if there are fewer (an old copy).

        Args:
            kinds: of the entries to return, which all others are passed for without decoding them; empty: all.
        """
        self._path = path
        self._begins = _begins(kinds)
        with open_regular(path) as file:
            self._offset = start = len(file.readline())  # the header
            self.num_done = 0
            while self.num_done < num_done and (line := file.readline()).endswith(b"\n"):
                self.num_done += 1
                self._offset += len(line)
        if self.num_done < num_done:
            self.num_done, self._offset = 0, start
        self._ahead = (self.num_done, self._offset)

    def batch(self, size: int) -> list[Entry]:
        """Return the next entries, at most `size`; repeated calls return the same ones until `pass_batch`."""
        entries: list[Entry] = []
        num_done, offset = self.num_done, self._offset
        with open_regular(self._path) as file:  # each time, so that a network file system shows new entries
            file.seek(offset)
            while len(entries) < size and (line := file.readline()).endswith(b"\n"):
                if line.startswith(self._begins):
                    entries.append(_decode(line))
                num_done += 1
                offset += len(line)
        self._ahead = (num_done, offset)
        return entries

    def pass_batch(self) -> None:
        """Move past the last batch."""
        self.num_done, self._offset = self._ahead


# Writing


def write_log(path: Path, header: Header, entries: Iterable[Entry] = ()) -> None:
    """Write a complete log, atomically."""
    first = json_text({"format_version": header.format_version, **header._asdict()}) + "\n"
    make_folder(path.parent)
    write_text(path, first + "".join(_encode(entry) for entry in entries))


def _encode(entry: Entry) -> str:
    return json_text(entry._asdict(), is_exact=True) + "\n"


def _with_floats(entry: Entry) -> Entry:
    """Return an entry whose metrics are floats again where JSON has a text: "NaN", "Infinity"."""
    body = _floats(entry.body)
    if entry.kind == "checkpoint":
        body = {**body, "points": [(kind, time, _floats(point)) for kind, time, point in body["points"]]}
    return entry._replace(body=body)


def _floats(body: Mapping[str, Any]) -> Mapping[str, Any]:
    metrics = body.get("metrics")
    if not isinstance(metrics, Mapping) or NAMED.isdisjoint(v for v in metrics.values() if isinstance(v, str)):
        return body
    return {**body, "metrics": {name: float(value) if value in NAMED else value for name, value in metrics.items()}}


def _decode(line: bytes) -> Entry:
    if not line.strip():
        return Entry(EMPTIED, 0, {})
    try:
        value = json.loads(line)
    except (RecursionError, ValueError):
        value = None
    if any(_entry("", value)):
        return Entry(DAMAGED, 0, {"line": repr(line[:80])})
    return _with_floats(Entry(**value))


class Log:
    """The writer of a log, for one process; any of its threads may append."""

    def __init__(self, path: Path, guard: Callable[[], None] = lambda: None) -> None:
        """Open a log that `write_log` has created; `guard` raises when this process may no longer write."""
        self.path, self.guard = path, guard
        self.header = read_header(path)
        self._lock = threading.Lock()
        self.num_entries, self._latest = _cut_torn_line(path)
        self.advance_clock()  # all entries of this job are later than those of the last one
        opened = open_regular(path, "ab")
        self._file = TextIOWrapper(opened, "utf-8", newline="\n", line_buffering=True)  # kills lose one line at most

    def append(self, kind: str, body: Mapping[str, Any], *, at: float) -> int:
        """Add an entry; takes microseconds.

        Args:
            at: seconds since 1970.

        Returns:
            The time of the entry, in milliseconds. Times in a log never decrease, even if a run moves to a node whose
            clock is behind: of two points of one step, MLflow uses the later one.
        """
        self.guard()
        with self._lock:
            self._latest = max(self._latest, round(at * 1000))
            with naming(self.path):
                self._file.write(_encode(Entry(kind, self._latest, body)))
            self.num_entries += 1
            return self._latest

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Add an entry of now."""
        self.append(kind, body, at=time.time())

    def flush(self) -> None:
        """Flush all entries to disk. Raises OSError, which names the file."""
        with naming(self.path):
            fsync_path(self.path)

    def advance_clock(self) -> None:
        """Make all later entries later than the existing ones."""
        with self._lock:
            self._latest += 1

    def close(self) -> None:
        """Close the log for appending."""
        with suppress(OSError):  # a full disk: reported when the entry was appended
            self._file.close()
            self.flush()


def _cut_torn_line(path: Path) -> tuple[int, int]:
    """Remove an incomplete last line; return the number of entries, and the time of the last one, 0 without any."""
    num_lines = size = 0
    with open_regular(path, "r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                num_lines, size = num_lines + 1, size + len(line)
        file.truncate(size)
    last = last_entry(path)
    return num_lines - 1, last.time if last else 0
