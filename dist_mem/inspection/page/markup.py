"""HTML elements as text in which everything that is not markup is escaped, and can steer no reader."""

from __future__ import annotations

import html
from collections.abc import Iterable

from dist_mem.runtime.figures import NO_FIGURE, is_figure
from dist_mem.runtime.terminal import make_printable


class Markup(str):
    """Text that is HTML already; any other str is escaped where it is put into an element."""


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element.

    Args:
        children: text, which is escaped, or `Markup`.
        attributes: values, which are escaped; `class_` is the attribute `class`, `data_x` is `data-x`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escape(str(value))}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{given}>{join_pieces(children)}</{name}>")


def join_pieces(children: Iterable[str]) -> Markup:
    """Return several pieces in a row, escaping those that are not `Markup`."""
    return Markup("".join(part if isinstance(part, Markup) else _escape(part) for part in children))


def _escape(text: str) -> str:
    return html.escape(make_printable(text))


def digits(value: float, sign: str = "") -> str:
    """Format a metric with three significant digits: 2,110, 75.8, 4.02, 0.0120; n/a for what is no figure.

    Args:
        sign: "+" also marks a positive value.
    """
    if not is_figure(value):
        return NO_FIGURE
    rounded, _, exponent = f"{value:.2e}".partition("e")
    if not exponent or not -4 <= int(exponent) < 6:
        return f"{value:{sign}.3g}"
    return f"{float(f'{rounded}e{exponent}'):{sign},.{max(0, 2 - int(exponent))}f}"


def short_count(number: int) -> str:
    """Format a count with three significant digits: 462 K, 1.23 M, 1.30 B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{digits(number / size)} {unit}"
    return f"{number}"


def table(caption: str, header: Iterable[str], rows: Iterable[Iterable[str]], *, num_text: int = 1) -> Markup:
    """Return a table that scrolls sideways if it is wider than the page.

    Args:
        num_text: the number of columns, from the left, that hold text; those after them hold numbers.
    """

    def cells(name: str, texts: Iterable[str]) -> Markup:
        numbered = enumerate(texts)
        return join_pieces(element(name, text, class_="text" if n < num_text else "number") for n, text in numbered)

    head = element("thead", element("tr", cells("th", header)))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    return element(
        "div", element("table", element("caption", caption), head, body), class_="wide", tabindex="0", role="region",
        aria_label=caption,
    )  # fmt: skip
