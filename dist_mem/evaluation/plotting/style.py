"""How figures look: in the column of a page, readable in print, and told apart by people who see colours differently.

The colours are those of Okabe and Ito (2008, "Color Universal Design"); ordered lines take them from matplotlib's
`cividis`, which is dark at one end and light at the other. Lines differ in dashes too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dist_mem.runtime.files import write_bytes

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000"),
)
LINE_COLORS = tuple(color for color in COLORS if color != YELLOW)  # yellow is too light for a line on white
WIDTH = 6.3  # inches, the text of an A4 page
DPI = 200
DASHES = ("-", "--", "-.", ":")
MARK = "mark"  # gid of lines that are no data
_SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "dist_mem",  # equal data, equal file
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is a dollar
}

ParamsT = ParamSpec("ParamsT")
ReturnT = TypeVar("ReturnT")


def use_style() -> AbstractContextManager[None]:
    """Return a context in which figures are drawn and saved in this style."""
    from cycler import cycler
    from matplotlib import rc_context  # takes a second to import

    return rc_context({**_SETTINGS, "axes.prop_cycle": cycler(color=LINE_COLORS)})


def in_style(draw: Callable[ParamsT, ReturnT]) -> Callable[ParamsT, ReturnT]:
    """Return a function that draws and saves in this style."""

    @functools.wraps(draw)
    def draw_in_style(*args: ParamsT.args, **options: ParamsT.kwargs) -> ReturnT:
        with use_style():
            return draw(*args, **options)

    return draw_in_style


def new_picture(
    height: float, *, width: float = WIDTH, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Return a `Picture`, as wide as the text by default, and its axes (an array if there are several)."""
    from dist_mem.evaluation.plotting.picture import Picture  # takes a second to import

    picture = Picture(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(rows, columns, **options)


def styles(number: int) -> list[dict[str, Any]]:
    """Return colour and dashes of unordered lines."""
    colors = itertools.islice(itertools.cycle(LINE_COLORS), number)
    return [{"color": color, "linestyle": DASHES[place % len(DASHES)]} for place, color in enumerate(colors)]


def ordered_styles(number: int) -> list[dict[str, Any]]:
    """Return colour and dashes of lines in an order, such as layers."""
    from matplotlib import colormaps

    shades = colormaps["cividis"]
    places = [0.78 * place / max(1, number - 1) for place in range(number)]  # the last is too light
    return [{"color": shades(place), "linestyle": DASHES[index % len(DASHES)]} for index, place in enumerate(places)]


def add_grid(axes: Any) -> None:
    """Draw light horizontal lines at the ticks."""
    axes.grid(visible=True, axis="y", color="0.9", linewidth=0.6, gid=MARK)
    axes.set_axisbelow(True)


def mark_lines(axes: Any, places: Sequence[float], label: str | None = None) -> None:
    """Draw dashed vertical lines that are no data."""
    for number, place in enumerate(places):
        axes.axvline(
            place, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)), gid=MARK, label=None if number else label
        )


def save(picture: Any, path: Path, *, caption: str) -> None:
    """Write a picture atomically, in the format of its suffix, with its caption in the file."""
    content, kind = BytesIO(), path.suffix.removeprefix(".")
    notes: dict[str, str | None] = {"Title": path.stem, "Description": caption}
    if kind == "svg":
        notes["Date"] = None
    picture.savefig(content, format=kind, dpi=DPI, metadata=notes)
    write_bytes(path, content.getvalue())
