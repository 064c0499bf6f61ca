"""Values of `${oc.env:NAME}`: they may be secrets, so they are used but neither shown nor stored.

A configuration is stored unresolved, with the interpolation; of what must stay the same when a run is resumed a
checkpoint has checksums beside it. What is printed passes through `hide`, which puts the interpolation in place of a
value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TextIO

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from dist_mem.config.check import flatten, is_interpolation
from dist_mem.runtime.environment import is_set

_SHORTEST = 4  # characters; a shorter text, or a number, is no secret and stands in too many other words
_read: dict[str, str] = {}  # value -> interpolation, of all that this process has read
_num_reads = 0


class FromEnvironment(NamedTuple):
    """A value that reads the environment, itself or through another key."""

    written: str
    value: Any  # None too where it cannot be resolved


def watch_environment() -> None:
    """Note from now on what `${oc.env:...}` yields; calling it again changes nothing."""
    OmegaConf.register_resolver("oc.env", _env, replace=True)


def _env(*arguments: Any) -> Any:
    global _num_reads
    _num_reads += 1
    value = oc.env(*arguments)
    if is_set(arguments[0]):  # else it is the default, which stands in the file
        _read[str(value)] = f"${{oc.env:{arguments[0]}}}"
    return value


def from_environment(config: Any) -> dict[str, FromEnvironment]:
    """Key -> value, of all that reads the environment."""
    watch_environment()
    found = {}
    for key, written in flatten(OmegaConf.to_container(config, resolve=False)).items():
        if is_interpolation(written):
            before, value = _num_reads, None
            with suppress(OmegaConfBaseException):
                value = OmegaConf.select(config, key)
            if _num_reads > before:
                found[key] = FromEnvironment(written, value)
    return found


def hide(text: str) -> str:
    """The text with the interpolation in place of every value that was read, but for numbers and very short texts."""
    pieces = {
        piece: written
        for value, written in _read.items()
        for piece in (value, repr(value)[1:-1], *value.splitlines())
        if len(piece) >= _SHORTEST and not re.fullmatch(r"[\d.,+-]+", piece)
    }
    for piece in sorted(pieces, key=len, reverse=True):
        text = text.replace(piece, pieces[piece])
    return text


def hide_all(text: str, config: Any) -> str:
    """`hide` for a message about this configuration: numbers and short texts too, where they are words."""
    for written, value in from_environment(config).values():
        if str(value):
            text = written.join(re.split(rf"(?<!\w){re.escape(str(value))}(?!\w)", text))
    return hide(text)


def as_written(config: Any, key: str) -> Any:
    """The value of a key for people: resolved, but as it is written if it reads the environment."""
    found = from_environment(config).get(key)
    return OmegaConf.select(config, key) if found is None else found.written


def checksum(key: str, value: Any) -> str:
    """Of a value, so that another one is noticed."""
    return hashlib.sha256(f"{key}={value!r}".encode()).hexdigest()[:16]


def checksums(config: Any, *, which: Callable[[str], bool]) -> dict[str, str]:
    """Checksums, by key, of the values that read the environment and for whose key `which` holds."""
    return {key: checksum(key, found.value) for key, found in from_environment(config).items() if which(key)}


def replace_texts(config: Any, *, but: Callable[[str], bool]) -> None:
    """Put `***` in place of the texts that read the environment, unless `but` holds for their key."""
    for key, found in from_environment(config).items():
        if isinstance(found.value, str) and not but(key):
            OmegaConf.update(config, key, "***")


class HidingStream:
    """A text stream to which everything is written through `hide`."""

    def __init__(self, stream: TextIO) -> None:
        watch_environment()  # not every command loads a whole configuration
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
