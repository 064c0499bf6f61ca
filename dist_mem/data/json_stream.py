"""Read a JSON object part by part, so that a file of gigabytes needs the memory of its largest value, not of all.

The standard library decodes a text at once. Here its decoder is given one value after the other; only the object itself
and the lists in it are taken apart.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

LIST_PART = 4096  # items of a list that come at once
MAX_VALUE = 2**26  # characters of one value, or of one item of a list

_DECODER = json.JSONDecoder()
_OF_NUMBER = re.compile(r"[-+.eE\d]*")
_BLANKS = re.compile(r"[ \t\n\r]*")


class Part(NamedTuple):
    """A key and its value; of a list, which comes in several parts of the same key, some of the items."""

    key: str
    value: Any
    is_list: bool


def object_parts(blocks: Iterable[bytes]) -> Iterator[Part]:
    """Yield the parts of a JSON object in the order of the text; a list has at least one part, perhaps without items.

    Args:
        blocks: the text in UTF-8, cut anywhere.

    Raises:
        ValueError: it is not JSON, no object, or has a key twice.
        RecursionError: a value is nested too deeply.
    """
    text = _Text(blocks)
    seen: set[str] = set()
    text.take("{")
    is_next = text.skip() != "}"
    while is_next:
        key = text.value() if text.skip() == '"' else text.fail("expected a key")
        if key in seen:
            text.fail(f"the key {key!a} comes twice")
        seen.add(key)
        text.take(":")
        if text.skip() == "[":
            yield from (Part(key, items, is_list=True) for items in _items(text))
        else:
            yield Part(key, text.value(), is_list=False)
        is_next = text.skip() == ","
        if is_next:
            text.take(",")
    text.take("}")
    if text.skip():
        text.fail("there is text behind the object")


def _items(text: _Text) -> Iterator[list[Any]]:
    text.take("[")
    items: list[Any] = []
    is_next = text.skip() != "]"
    while is_next:
        text.skip()
        items.append(text.value())
        is_next = text.skip() == ","
        if is_next:
            text.at += 1
            if len(items) == LIST_PART:
                yield items
                items = []
    text.take("]")
    yield items


class _Text:
    """A text that is decoded block by block; of what is decoded, only the part from `at` on is still needed."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode  # as json.loads decodes bytes
        self._text = ""
        self._before = 0  # characters in front of `_text`
        self._is_all = False
        self.at = 0

    def skip(self) -> str:
        """Skip blanks; return the character there, or nothing at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self.at)
            assert blanks is not None, "the pattern matches no character, too"
            self.at = blanks.end()
            if self.at < len(self._text) or self._is_all:
                return self._text[self.at : self.at + 1]
            self._read()

    def take(self, mark: str) -> None:
        """Skip blanks and this character."""
        if self.skip() != mark:
            self.fail(f"expected {mark}")
        self.at += 1

    def value(self) -> Any:
        """Return the value that begins here."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self.at)
            except json.JSONDecodeError as error:
                if self._is_all or len(self._text) - self.at > MAX_VALUE:
                    self.at = error.pos
                    self.fail(error.msg)
            else:
                rest = _OF_NUMBER.match(self._text, end)  # "1" or "1.", whose number may go on in the next block
                assert rest is not None, "the pattern matches no character, too"
                if rest.end() < len(self._text) or self._is_all:
                    self.at = end
                    return value
            self._read()

    def fail(self, problem: str) -> Any:
        """Raise the error of a problem at this place."""
        raise ValueError(f"{problem}, at character {self._before + self.at}")

    def _read(self) -> None:
        block = next(self._blocks, b"")
        self._is_all = not block
        self._before += self.at
        self._text = self._text[self.at :] + self._decode(block, self._is_all)
        self.at = 0
