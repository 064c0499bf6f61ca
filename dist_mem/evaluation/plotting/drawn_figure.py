"""A drawn picture with its numbers and caption, and its three files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.evaluation.plotting.style import save
from dist_mem.runtime.csv_text import csv_text
from dist_mem.runtime.files import make_folder, write_text

Cell = str | int | float


class Table(NamedTuple):
    """The numbers of a figure."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def to_csv(self) -> str:
        """Return the table as CSV, with full precision."""
        return csv_text([self.header, *self.rows])


class DrawnFigure(NamedTuple):
    """A drawn figure."""

    picture: Any  # matplotlib.figure.Figure
    table: Table  # every number that is plotted, and those of layers that the picture leaves out
    caption: str  # what is shown, how it was measured, and what is not as in the paper
    text: str = ""  # Markdown after the caption, such as excerpts


def write_figure(drawn: DrawnFigure, folder: Path, stem: str, *, form: str) -> list[Path]:
    """Write picture, numbers and caption, each atomically, and return their paths."""
    make_folder(folder)
    files = [folder / f"{stem}.{ending}" for ending in (form, "csv", "md")]
    save(drawn.picture, files[0], caption=drawn.caption)
    write_text(files[1], drawn.table.to_csv())
    text = f"{drawn.caption}\n\n{drawn.text}".strip()
    write_text(files[2], f"{text}\n")
    return files
