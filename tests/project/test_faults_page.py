"""The page of faults: a test hears what every row quotes, with the row's exit code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem import errors
from tests.support.messages import known
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
CODES = {value: name for name, value in vars(errors).items() if name.startswith("EXIT_")}
_BORDERS = re.compile(r"[\d.,]*\d[\d.,]*|\\.|\.\*|\n")  # numbers, which differ from those on the page, and patterns
_VALUES = re.compile(rf"{_BORDERS.pattern}|'[^']*'|\S*/\S*|\.\.\.|; ")  # and names, paths, ends of a clause
LEAST = 11  # characters of a phrase that identifies a message


class Row(NamedTuple):
    """A row of one of the page's tables."""

    fault: str
    message: str
    codes: list[int]

    def quoted(self) -> list[str]:
        """Return its messages."""
        return re.findall("`([^`]*)`", self.message)

    def phrases(self) -> list[str]:
        """Return all parts of its messages that identify them."""
        return [part for text in self.quoted() for part in parts(text, _BORDERS)]

    def is_heard(self, code: int) -> bool:
        """Return whether tests/messages.txt has the longest part of one of its messages, with the code."""
        longest = [max(parts(text, _VALUES), key=len, default="") for text in self.quoted()]
        return any(part and part in heard().get(code, "") for part in longest)


def parts(text: str, borders: re.Pattern[str]) -> list[str]:
    return [part.strip() for part in borders.split(text) if len(part.strip()) >= LEAST]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("| ") and cells[2] != "code":
            found.append(Row(cells[0], cells[1], [int(code) for code in cells[2].split(", ") if code]))
    return found


@cache
def heard() -> dict[int, str]:
    """Return by exit code what tests hear when something is refused: tests/messages.txt."""
    lines = [re.match(r"(?:\w+, )?exit code (\d+): (.*)", text) for texts in known().values() for text in texts]
    found: dict[int, str] = {}
    for line in filter(None, lines):
        found[int(line[1])] = f"{found.get(int(line[1]), '')}{line[2]}\n"
    return found


@cache
def asserted(path: Path) -> tuple[frozenset[str], frozenset[int]]:
    """Return the phrases and the exit codes that a test file mentions."""
    names = {name: code for code, name in CODES.items()}
    phrases, codes = set[str](), set[int]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            phrases.update(part.strip() for part in (node.value, *_BORDERS.split(node.value)))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            codes.add(node.value)
        elif isinstance(node, ast.Name | ast.Attribute):
            codes.add(names.get(node.id if isinstance(node, ast.Name) else node.attr, -1))
    return frozenset(phrase for phrase in phrases if len(phrase) >= LEAST), frozenset(codes)


def in_sources(row: Row, code: int) -> bool:
    """Return whether a test that keeps no messages has a phrase of the row, and the code."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]
    return any(
        phrase in row.message or any(part in phrase for part in row.phrases())
        for path in files
        if code in asserted(path)[1]
        for phrase in asserted(path)[0]
    )


def test_the_page_has_rows_with_known_codes() -> None:
    assert len(rows()) > 90
    assert {code for row in rows() for code in row.codes} <= set(CODES)


def test_a_test_hears_message_and_code_of_every_row(subtests: pytest.Subtests) -> None:
    """Of those that quote a message, and not only a file; the messages of code 0 are no refusals."""
    for row in rows():
        for code in row.codes:
            if any(" " in text for text in row.quoted()):
                with subtests.test(row=row, code=code):
                    assert row.is_heard(code) or in_sources(row, code), "no test has such a message with this code"
