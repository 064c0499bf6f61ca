"""The page of faults: every row names its exit code, and a test asserts both the row's message and that code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem import errors
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
CODES = {value: name for name, value in vars(errors).items() if name.startswith("EXIT_")}
_BORDERS = re.compile(r"[\d.,]*\d[\d.,]*|\\.|\.\*|\n")  # numbers, which differ from those on the page, and patterns
LEAST = 11  # characters of a phrase that identifies a message


class Row(NamedTuple):
    """A row of one of the page's tables."""

    fault: str
    message: str
    codes: list[int]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("| ") and cells[2] != "code":
            found.append(Row(cells[0], cells[1], [int(code) for code in cells[2].split(", ") if code]))
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


def python_files() -> list[Path]:
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]


def test_the_page_has_rows_with_known_codes() -> None:
    assert len(rows()) > 90
    assert {code for row in rows() for code in row.codes} <= set(CODES)


def quoting() -> list[Row]:
    """Return the rows that quote a message, and not only a file."""
    return [row for row in rows() if row.codes and any(" " in text for text in re.findall("`([^`]*)`", row.message))]


def test_a_test_asserts_message_and_code_of_every_row(subtests: pytest.Subtests) -> None:
    for row in quoting():
        with subtests.test(row=row):
            parts = [part.strip() for text in re.findall("`([^`]*)`", row.message) for part in _BORDERS.split(text)]
            parts = [part for part in parts if len(part) >= LEAST]
            files = [
                path
                for path in python_files()
                if any(phrase in row.message or any(part in phrase for part in parts) for phrase in asserted(path)[0])
            ]
            assert files, f"no test has a phrase of: {row.message}"
            for code in row.codes:
                assert any(code in asserted(path)[1] for path in files), f"{files} assert no exit code {code}"
