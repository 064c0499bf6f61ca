"""Values of `${oc.env:NAME}`, which may be secrets: they are used but neither printed nor stored.

A configuration is stored with unresolved interpolations. For values that must stay the same when a run is resumed, a
checkpoint stores checksums. All output passes through `hide`, which replaces a value by its interpolation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

from dist_mem.config.blocks import as_tree, value_at
from dist_mem.config.interpolations import find_interpolations, of_type, watch
from dist_mem.config.keys import type_of
from dist_mem.config.schema import Config
from dist_mem.runtime.environment import is_set
from dist_mem.runtime.terminal import StyledText

_SHORTEST = 4  # characters; a shorter text, or a number, is no secret and occurs in too many other words
_IN_WORDS = 8  # characters; a shorter text is replaced as a whole word alone: `data` is a part of `metadata`
_read: dict[str, str] = {}  # value -> interpolation, for all values this process has read
_num_reads = 0


class FromEnvironment(NamedTuple):
    """A value that depends on the environment, directly or through another key."""

    written: str  # the interpolation
    value: Any  # also None if it cannot be resolved


def watch_environment() -> None:
    """Record from now on the values of `${oc.env:...}`; further calls have no effect."""
    watch(_record)


def _record(name: str, value: Any) -> None:
    global _num_reads
    _num_reads += 1
    if is_set(name):  # otherwise it is the default, which the file shows anyway
        _read[str(value)] = f"${{oc.env:{name}}}"


def from_environment(document: Mapping[str, Any]) -> dict[str, FromEnvironment]:
    """Return key -> value for all values of a document that depend on the environment."""
    watch_environment()
    found, before = {}, _num_reads
    for key, written, value in find_interpolations(document):
        if _num_reads > before:
            with suppress(ValueError):  # a text that is no value of its type
                value = of_type(type_of(Config, key), value)
            found[key] = FromEnvironment(written, value)
        before = _num_reads
    return found


def hide(text: str) -> str:
    """Replace every recorded value in the text by its interpolation, except numbers and very short texts."""
    pieces = {
        piece: written
        for value, written in _read.items()
        for piece in (value, repr(value)[1:-1], *value.splitlines())
        if len(piece) >= _SHORTEST and not re.fullmatch(r"[\d.,+-]+", piece)
    }
    for piece in sorted(pieces, key=len, reverse=True):
        is_part = len(piece) >= _IN_WORDS
        text = pieces[piece].join(text.split(piece) if is_part else re.split(rf"(?<!\w){re.escape(piece)}(?!\w)", text))
    return text


def hide_all(text: str, document: Mapping[str, Any]) -> str:
    """`hide` for a message about this document: also replaces numbers and short texts that are whole words."""
    for written, value in from_environment(document).values():
        if str(value):
            text = written.join(re.split(rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)", text))
    return hide(text)


def as_written(config: Config, key: str) -> Any:
    """Return the value of a key for display: resolved, or the interpolation if it depends on the environment."""
    found = from_environment(config.document).get(key)
    return value_at(as_tree(config), key) if found is None else found.written


def checksum(key: str, value: Any) -> str:
    """Return a checksum by which a changed value is noticed."""
    return hashlib.sha256(f"{key}={value!r}".encode()).hexdigest()[:16]


class HidingStream:
    """A text stream that passes everything written to it through `hide`."""

    def __init__(self, stream: TextIO) -> None:
        watch_environment()  # not every command calls load_config
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(StyledText(hide(text)) if isinstance(text, StyledText) else hide(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
