"""A copy of a remote file in the cache, which is compared with the server's version before each use.

x.tar                the copy
.x.tar.version.json  what the server said of it, and when it was fetched
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.remote.fetch import (
    Address,
    RefusedError,
    UnreachableError,
    Verify,
    Version,
    download,
    version_of,
    writing,
)
from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, integer, optional, read_json, record, text
from dist_mem.runtime.files import write_text

_NOTE = record(
    {
        "format_version": integer(1),
        "fetched": text,
        "etag": optional(text),
        "modified": optional(text),
        "length": optional(integer()),
    },
    is_open=False,
)


class _Copy(NamedTuple):
    fetched: str  # date
    version: Version | None  # None: of a download that noted none


def update(source: Address, path: Path, *, limit: int, verify: Verify, report: Callable[[str], object]) -> None:
    """Fetch a file unless the copy at `path` is what the server has; the caller holds a lock on it.

    Args:
        limit, verify: as in `download`.
        report: takes a line that says what is used.

    Raises:
        RemoteError: as `download`; with a copy, only if the server answers.
    """
    copy = _copy_at(path)
    try:
        version = version_of(source)
    except UnreachableError as error:
        if copy is None:
            raise
        report(
            f"{source.shown}: from the cache, fetched on {copy.fetched}, because the server does not answer: {error}"
        )
        return
    except RefusedError as error:
        if copy is None:
            raise
        raise RefusedError(f"{error}; or give {path}, a copy fetched on {copy.fetched}") from error
    if copy is not None and copy.version is not None and copy.version.is_that_of(version):
        report(f"{source.shown}: from the cache, fetched on {copy.fetched}; delete {path} to fetch it again")
        return
    report(f"fetching {source.shown}" + (f", of which a copy of {copy.fetched} may be older" if copy else ""))
    note = _note_of(path)
    with writing(path.parent):
        note.unlink(missing_ok=True)  # it must never describe another copy
    download(source, path, limit=limit, verify=verify)
    with writing(path.parent):
        body = {"format_version": 1, "fetched": datetime.now(UTC).date().isoformat(), **version._asdict()}
        write_text(note, json_text(body) + "\n")


def _copy_at(path: Path) -> _Copy | None:
    if not path.exists():
        return None
    note = _note_of(path)
    if not note.exists():
        return _Copy(date_of(path), None)
    body = read_json(note, UnusableError, ": delete it")
    check(body, _NOTE, note, UnusableError, ": delete it")
    return _Copy(body["fetched"], Version(body["etag"], body["modified"], body["length"]))


def date_of(path: Path) -> str:
    """Return the day on which a file was written."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()


def _note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.version.json")
