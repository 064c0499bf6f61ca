"""What a figure is: its names, how many runs it takes, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dist_mem.papers.figures.parts.source import Source
from dist_mem.runtime.csv_text import csv_text

Cell = str | int | float


class Table(NamedTuple):
    """The numbers of a figure."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def to_csv(self) -> str:
        """Return the table as CSV, with full precision."""
        return csv_text([self.header, *self.rows])


class Drawn(NamedTuple):
    """A drawn figure."""

    picture: Any  # matplotlib.figure.Figure
    table: Table  # every number that is plotted, and those of layers that the picture leaves out
    caption: str  # what is shown, how it was measured, and what is not as in the paper
    text: str = ""  # Markdown after the caption, such as excerpts


class Figure(NamedTuple):
    """A figure that can be made from runs."""

    names: Sequence[str]  # as in the papers: infinite.fig7
    title: str
    draw: Callable[[str, Sequence[Source]], Drawn]  # of the name, from the runs
    most_runs: int = 1
    least_runs: int = 1
    runs: str = "RUN"  # what they are, for help
