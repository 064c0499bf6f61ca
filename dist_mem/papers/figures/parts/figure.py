"""What a figure of a paper is: its names, how many runs it takes, and the function that draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dist_mem.evaluation.plotting.drawn import Drawn
from dist_mem.papers.figures.parts.source import Source


class Figure(NamedTuple):
    """A figure that can be made from runs."""

    names: Sequence[str]  # as in the papers: infinite.fig7
    title: str
    draw: Callable[[str, Sequence[Source]], Drawn]  # of the name, from the runs
    most_runs: int = 1
    least_runs: int = 1
    runs: str = "RUN"  # what they are, for help
