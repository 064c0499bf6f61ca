"""Tables in Markdown whose cells hold texts of others."""

from __future__ import annotations

from collections.abc import Iterable


def row(cells: Iterable[str]) -> str:
    """Return a row of a table; a bar, a line break or a tag in a cell is a part of its text."""
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", r"\|").replace("<", "&lt;")
