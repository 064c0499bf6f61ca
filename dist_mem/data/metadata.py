"""Read the JSON files of a data directory, and refuse damaged ones and unknown formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.file_schema import read_json

REMEDY = ": build the dataset again"
BUILD_FIRST = ": build the dataset first, or point data.path at one that is built"


class ShardError(UnusableError):
    """A shard or an index is missing, damaged or of another format."""


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Raise ShardError if a path that the user gave is wrong: missing, in no folder, or without permission.

    `remedy` ends the message, as REMEDY does. Other errors of the system (a disk, a network) stay as they are.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(run_error(error), UnusableError):
            raise
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ShardError(f"{path} {problem}{remedy}") from error


def read_metadata(path: Path, *, version: int = 1) -> dict[str, Any]:
    """Read a JSON file of a data directory.

    Raises:
        ShardError: it is missing or damaged, or its `format_version` is not `version`.
    """
    with reading(path, BUILD_FIRST):
        try:
            body = read_json(path, ShardError)
        except ShardError as error:
            raise ShardError(f"{error}{REMEDY}") from error
    found = body.get("format_version") if isinstance(body, dict) else None
    if type(found) is not int:
        raise ShardError(f"{path} is damaged (it has no format_version){REMEDY}")
    if found != version:
        remedy = ": update dist_mem" if found > version else REMEDY
        raise ShardError(f"{path} has format_version {found}, but this dist_mem reads {version}{remedy}")
    return dict(body)
