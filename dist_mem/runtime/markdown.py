"""Tables in Markdown whose cells hold texts of others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a table."""
    return [table_row(head), table_row(["---"] * len(head)), *map(table_row, rows)]


def table_row(cells: Iterable[str]) -> str:
    """Return a row of a table; a bar, a line break or a tag in a cell is a part of its text."""
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", " ".join(text.splitlines()).replace("|", r"\|"))  # "< 1" is no tag
