"""The page of faults quotes what the code says, with exit codes that there are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dist_mem import errors
from tests.support.paths import PACKAGE, ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
CODES = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
LEAST = 8  # characters of a part of a message that identify it
_VALUES = re.compile(r"[\d.,]*\d[\d.,]*|'[^']*'|\S*/\S*|\.\.\.|[;.:] ")  # those of the page; ends of a clause
OF_OTHERS = re.compile(r"\[Errno |No such file or directory|Input/output error|address already in use|Client\w+Error")


class Row(NamedTuple):
    """A row of one of the page's tables."""

    fault: str
    messages: list[str]
    codes: list[int]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("| ") and cells[2] != "code":
            messages = [text for text in re.findall("`([^`]*)`", cells[1]) if " " in text]  # not only a file
            found.append(Row(cells[0], messages, [int(code) for code in cells[2].split(", ") if code]))
    return found


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a program, those of f-strings cut at their values."""
    if path.suffix == ".sh":
        yield from re.split(r"\$\w+|[\"\n]", path.read_text(encoding="utf-8"))
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.splitlines()


def test_the_page_has_rows_with_known_codes() -> None:
    assert len(rows()) > 90
    assert {code for row in rows() for code in row.codes} <= CODES


def test_a_message_of_every_row_is_one_of_the_code(subtests: pytest.Subtests) -> None:
    """Of those that quote one, and not only what the system or a library says."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "launch").glob("*.sh")]
    texts = {text.strip() for path in paths for text in texts_of(path) if len(text.strip()) >= LEAST}
    for row in rows():
        ours = [message for message in row.messages if not OF_OTHERS.search(message)]
        parts = [part.strip() for message in ours for part in _VALUES.split(message) if len(part.strip()) >= LEAST]
        with subtests.test(row=row.fault):
            is_ours = any(text in message for message in ours for text in texts)  # a message has several texts,
            is_part = any(part in text for part in parts for text in texts)  # or the page a part of one
            assert not ours or is_ours or is_part, "no such text in the package"
