"""Schemas of JSON files: keys and values are checked once, when a file is read, so later code can rely on them.

    ENTRY = record({"name": plain_name, "bytes": integer(low=0)})
    body = read_json(path, ShardError)
    check(body, record({"shards": rows(ENTRY)}), path, ShardError)

A hash in a file shows that the content is as written, not that its writer knew the format or meant well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import NAMED
from dist_mem.runtime.files import read_regular
from dist_mem.runtime.names import PLAIN, is_plain, is_plain_path
from dist_mem.runtime.terminal import cut_short

MAX_INTEGER = 2**63 - 1
Schema = Callable[[str, Any], Iterator[str]]  # (key, value) -> its problems, one line each


def read_json(path: Path, error: type[UnusableError], remedy: str = "", *, inside: Path | None = None) -> Any:
    """Return the content of a JSON file.

    Args:
        inside: as for `open_regular`.

    Raises:
        OSError: as `open_regular`.
        UnusableError: `error`, with the remedy: it is not JSON.
    """
    content = read_regular(path, inside=inside)
    try:
        return json.loads(content)
    except (RecursionError, ValueError) as caught:
        raise error(f"{path} is damaged (not readable as JSON: {caught}){remedy}") from caught


def read_json_lines(path: Path, schema: Schema, error: type[UnusableError], remedy: str = "") -> list[Any]:
    """Return the content of a file with one JSON value a line, each of which matches the schema; [] if it is absent.

    Raises:
        OSError: the file cannot be read.
        UnusableError: `error`, with the line, the first problem and the remedy.
    """
    try:
        lines = read_regular(path).splitlines()
    except FileNotFoundError:
        return []
    return [
        read_json_line(line, schema, path, error, remedy, place=f"line {number}")
        for number, line in enumerate(lines, start=1)
    ]


def read_json_line(
    line: bytes, schema: Schema, path: Path, error: type[UnusableError], remedy: str = "", *, place: str
) -> Any:
    """Return the JSON value of a line, which matches the schema. Raises `error`, as `read_json_lines`."""
    try:
        body = json.loads(line)
    except (RecursionError, ValueError) as caught:
        raise error(f"{path} is damaged ({place} is not JSON: {caught}){remedy}") from caught
    problem = next(schema("", body), None)
    if problem is not None:
        raise error(f"{path} is damaged ({place}: {problem}){remedy}")
    return body


def check(body: Any, schema: Schema, path: Path, error: type[UnusableError], remedy: str = "") -> None:
    """Raise `error`, with the first problem, if the content of the file at `path` does not match the schema."""
    problem = next(schema("", body), None)
    if problem is not None:
        raise error(f"{path} is damaged ({problem}){remedy}")


def leaf(must_be: str, fits: Callable[[Any], bool]) -> Schema:
    """Return the schema of a single value that `fits`; `must_be` describes it in messages."""

    def find(key: str, value: Any) -> Iterator[str]:
        if not fits(value):
            yield f"{key} is {_format_value(value)}, but must be {must_be}"

    return find


def _format_value(value: Any) -> str:
    return cut_short(ascii(value), 80)


def integer(low: int = 0, high: int = MAX_INTEGER) -> Schema:
    """Return the schema of an integer from `low` to `high`."""
    return leaf(f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def one_of(*values: str) -> Schema:
    """Return the schema of a text that is one of `values`."""
    return leaf(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MAX_INTEGER)  # a longer one fits no float


number = leaf("a finite number", lambda value: _is_number(value) and isfinite(value))
metric = leaf("a number", _is_number)  # of a run, which may diverge to NaN or infinity
named_metric = leaf("a number", lambda value: _is_number(value) or (isinstance(value, str) and value in NAMED))
text = leaf("text", lambda value: isinstance(value, str))
boolean = leaf("true or false", lambda value: type(value) is bool)
sha256 = leaf("a SHA-256", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))
plain_name = leaf(PLAIN, is_plain)
plain_path = leaf("a path of plain names below this folder", is_plain_path)


def optional(schema: Schema) -> Schema:
    """Return the schema of a value or null."""
    return lambda key, value: iter(()) if value is None else schema(key, value)


def list_of(item: Schema, *, low: int = 0, high: int | None = None) -> Schema:
    """Return the schema of a list of `low` to `high` items (None: any number)."""

    def find(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, list) or len(value) < low or (high is not None and len(value) > high):
            yield f"{key} is {_format_value(value)}, but must be a list" + (f" of at least {low}" if low else "")
            return
        for index, child in enumerate(value):
            yield from item(f"{key}[{index}]", child)

    return find


def table(value_schema: Schema, *, keys: Schema = text) -> Schema:
    """Return the schema of an object whose keys are data too."""

    def find(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{key} is {_format_value(value)}, but must be an object"
            return
        for name, child in value.items():
            yield from keys(f"a key of {key}", name)
            yield from value_schema(f"{key}[{name!a}]", child)

    return find


def record(required: Mapping[str, Schema], further: Mapping[str, Schema] | None = None, *, is_open: bool) -> Schema:
    """Return the schema of an object with `required` keys; `further` may be missing, `is_open` allows any others."""
    known = {**required, **(further or {})}

    def find(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{key or 'it'} is {_format_value(value)}, but must be an object"
            return
        of = f"{key} has" if key else "it has"
        yield from (f"{of} no {name}" for name in required if name not in value)
        yield from (f"{of} an unknown key {_format_value(name)}" for name in value if not is_open and name not in known)
        for name, schema in known.items():
            if name in value:
                yield from schema(f"{key}.{name}" if key else name, value[name])

    return find
