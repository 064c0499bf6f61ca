"""How commands print: one width, aligned tables, names in columns, and colour where a terminal shows it.

No line is cut: `WIDTH` limits texts of several words. Files and pipes get the same lines without colour.

Titles, names and messages of others may hold characters that steer a terminal. All output of `dist-mem` passes through
`PlainStream`, which lets only `StyledText` contain them: print one `StyledText`, alone, to show colours.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, TextIO

from dist_mem.runtime.environment import wants_colour

WIDTH = 100  # characters
_SHORT = 60  # characters of a list of names that stays on the line of its message
_FIGURE = re.compile(r"[-+]?[\d.,:]+(e[-+]?\d+)?( ?[%a-zA-Z/]{1,3})?( \([^()]*\))?|n/a|-?inf|nan|")
_COLOURS = {"error:": "1;31", "FAIL": "1;31", "warning:": "33", "WARNING": "33", "notice:": "36", "ok": "32"}


# Controls of C0 and C1 but tab and line feed, the bidirectional ones, line separators, and halves of characters.
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_DIGEST = re.compile(r"\b[0-9a-f]{13,}\b")


class StyledText(str):
    """Text whose control characters are the program's own; any other str loses its own where it is printed."""

    def __str__(self) -> str:
        return self  # so that `print` gives the stream this object


def make_printable(text: str) -> str:
    """Return the text with the characters that could steer a terminal as U+FFFD; line feed and tab are kept."""
    return _STEERING.sub("\ufffd", text)


def on_one_line(text: str) -> str:
    """Return the text in one printable line, with blanks for its line breaks."""
    return make_printable(" ".join(text.splitlines()))


def in_style(text: str, code: str) -> StyledText:
    """Return the text between the sequence that begins a style, `1;31`, and the one that ends it."""
    return StyledText(f"\x1b[{code}m{make_printable(text)}\x1b[0m")


def colour_first_word(text: str, stream: TextIO) -> StyledText:
    """Return the text with its first word in its colour: `error:` red, `warning:` yellow, `ok` green.

    Args:
        stream: where the text will be printed; one that shows no colour gets the text without.
    """
    word, _, rest = text.partition(" ")
    if word not in _COLOURS or not wants_colour("auto", stream):
        return StyledText(make_printable(text))
    return StyledText(f"{in_style(word, _COLOURS[word])} {make_printable(rest)}")


class PlainStream:
    """A text stream that writes only `StyledText` as it is, and any other text by `make_printable`.

    A carriage return that begins a text, as progress bars of libraries write it, becomes a line feed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        begin = "\n" if text.startswith("\r") else ""
        self._stream.write(text if isinstance(text, StyledText) else begin + make_printable(text.removeprefix("\r")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BarStream:
    """A stream for a progress bar of this program, which moves the cursor; its texts must be printable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(StyledText(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def short_digest(digest: str) -> str:
    """Return a commit or checksum with its first 12 digits, which is enough to compare two; `+` at its end stays."""
    return _DIGEST.sub(lambda found: found[0][:12], digest)


def cut_short(text: str, most: int) -> str:
    """Return at most so many letters of a text, the last three of them dots where it is longer."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, the head first: columns of figures to the right, all others to the left."""
    columns = list(zip(*(map(on_one_line, row) for row in rows), strict=True))
    lines = zip(*(_pad_column(column, is_first=number == 0) for number, column in enumerate(columns)), strict=True)
    return ["  ".join(line).rstrip() for line in lines]


def _pad_column(column: Sequence[str], *, is_first: bool) -> list[str]:
    width = max(map(len, column))
    is_figures = not is_first and all(_FIGURE.fullmatch(text) for text in column[1:])
    return [f"{text:>{width}}" if is_figures else f"{text:<{width}}" for text in column]


def count_noun(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number and its noun, in the plural unless the number is 1."""
    plural = plural or (f"{singular}es" if singular.endswith("ch") else f"{singular}s")
    return f"{number:,} {singular if number == 1 else plural}"


def some(names: Iterable[object], most: int = 8, *, separator: str = ", ") -> str:
    """Return the first names, and how many there are beside them: `0, 1, 2 and 509 more`."""
    texts = list(map(str, names))
    return separator.join(texts[:most]) + (f" and {len(texts) - most:,} more" if len(texts) > most else "")


def span(begin: int, end: int) -> str:
    """Return how all commands and pages name the tokens [begin, end) of a document, counted from 0: `192 to 255`."""
    return f"{begin:,} to {end - 1:,}" if begin < end else "none"


def label_lines(pairs: Iterable[tuple[str, str]], *, indent: str = "") -> list[str]:
    """Return one line per label and its text; a text that is too long continues below its beginning."""
    pairs = [(on_one_line(label), on_one_line(text)) for label, text in pairs]
    width = max((len(label) for label, _ in pairs), default=0)
    return [line for label, text in pairs for line in wrap_lines(text, begin=f"{indent}{label:<{width}}  ")]


def wrap_lines(text: str, *, begin: str = "") -> list[str]:
    """Return the text in lines of at most WIDTH, the first after `begin`, the others below its end."""
    if len(begin) + len(text) <= WIDTH:
        return [f"{begin}{text}".rstrip()]
    return textwrap.wrap(
        text, WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def list_names(names: Iterable[str]) -> str:
    """Return names for the end of a message: `: A, B` on its line if they are few, else below it in columns.

    Names with one beginning (`lamemo.fig1`, `lamemo.fig6`; `configs/demo.yaml`) start on a line of their own.
    """
    names = list(names)
    text = ", ".join(names)
    if len(text) <= _SHORT:
        return f": {text}"
    width = max(map(len, names)) + 2
    each = max(1, (WIDTH - 2) // width)
    lines = []
    for _, alike in groupby(names, key=lambda name: name.rpartition("/")[0] or name.rpartition(".")[0]):
        group = list(alike)
        lines += [group[begin : begin + each] for begin in range(0, len(group), each)]
    return ":\n" + "\n".join("  " + "".join(f"{name:<{width}}" for name in line).rstrip() for line in lines)
