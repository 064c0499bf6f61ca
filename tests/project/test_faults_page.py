"""The page of faults: a test hears what every row quotes, with the row's exit code."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest

from dist_mem import errors
from tests.support.messages import known, on_one_line
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
CODES = {value: name for name, value in vars(errors).items() if name.startswith("EXIT_")}
_VALUES = re.compile(r"[\d.,]*\d[\d.,]*|'[^']*'|\S*/\S*|\.\.\.|[;.] ")  # not those of the page; ends of a clause
LEAST = 11  # characters of a part that identifies a message
# Phrases of rows whose messages tests/messages.txt has not, and the test in which the fault happens.
NOT_KEPT = {
    "SIGHUP on rank": "tests/runtime/test_distributed.py::"
    "test_a_closed_terminal_stops_what_sigterm_stops_unless_it_was_ignored_at_the_start",
}


class Row(NamedTuple):
    """A row of one of the page's tables."""

    fault: str
    message: str
    codes: list[int]

    def quoted(self) -> list[str]:
        """Return its messages, and not only a file."""
        return [text for text in re.findall("`([^`]*)`", self.message) if " " in text]

    def is_heard(self, code: int) -> bool:
        """Return whether a line of tests/messages.txt is one of its messages, with the code."""
        messages = [identifying(on_one_line(text)) for text in self.quoted()]
        lines = heard().get(code, [])
        return any(parts and any(all(part in line for part in parts) for line in lines) for parts in messages)


def identifying(message: str) -> list[str]:
    return [part.strip() for part in _VALUES.split(message) if len(part.strip()) >= LEAST]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("| ") and cells[2] != "code":
            found.append(Row(cells[0], cells[1], [int(code) for code in cells[2].split(", ") if code]))
    return found


@cache
def heard() -> dict[int, list[str]]:
    """Return by exit code what tests hear when something is refused: tests/messages.txt."""
    lines = [re.match(r"(?:\w+, )?exit code (\d+): (.*)", text) for texts in known().values() for text in texts]
    found: dict[int, list[str]] = {}
    for line in filter(None, lines):
        found.setdefault(int(line[1]), []).append(line[2])
    return found


def test_the_page_has_rows_with_known_codes() -> None:
    assert len(rows()) > 90
    assert {code for row in rows() for code in row.codes} <= set(CODES)


def test_a_test_hears_message_and_code_of_every_row(subtests: pytest.Subtests) -> None:
    """Of those that quote a message; for those of `NOT_KEPT` there is the test, and no more."""
    left = dict(NOT_KEPT)
    for row in rows():
        for code in row.codes if row.quoted() else []:
            with subtests.test(row=row, code=code):
                test = next((left.pop(phrase) for phrase in list(left) if phrase in row.message), None)
                if test is None:
                    assert row.is_heard(code), "no test keeps such a message with this code"
                else:
                    assert not row.is_heard(code), "a test keeps this: take it out of NOT_KEPT"
                    path, _, name = test.partition("::")
                    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    assert not left, "no row has these phrases"
