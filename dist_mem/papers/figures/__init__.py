"""The registry of figures: every file of this folder draws one; there is no list to edit.

A file has a `FIGURE` (parts/source.py). It may have several names, because papers show two examples of the same kind as
two figures: `infinite.fig8` is the best example and `infinite.fig9` the second best.
"""

from __future__ import annotations

import importlib
import pkgutil

from dist_mem.config.check import hint
from dist_mem.errors import UnusableError
from dist_mem.papers.figures.parts.source import Figure
from dist_mem.runtime.terminal import list_names

# Figures of the papers that other commands draw.
ELSEWHERE = {
    "infinite.fig3": "dist-mem reproduce infinite.fig3, and for its right half: dist-mem reproduce infinite.fig3_basis",
    "lamemo.fig5": "dist-mem reproduce lamemo.fig5, or for your own runs: dist-mem evaluate RUN eval.mem_len=...",
}


def figures() -> dict[str, Figure]:
    """Return all figures by name, sorted."""
    found: dict[str, Figure] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "parts":
            figure: Figure = importlib.import_module(f"{__name__}.{module.name}").FIGURE
            found.update(dict.fromkeys(figure.names, figure))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[str, int]:
    paper, _, number = name.partition(".fig")
    return paper, int(number)


def figure_named(name: str) -> Figure:
    """Return a figure.

    Raises:
        UnusableError: there is none of this name, or another command draws it.
    """
    if name in ELSEWHERE:
        raise UnusableError(f"{name} is drawn by another command: {ELSEWHERE[name]}")
    known = figures()
    if name not in known:
        raise UnusableError(f"there is no figure {name!r}{hint(name, known)}; figures are{list_names(known)}")
    return known[name]
