"""Write tables as CSV in UTF-8; the only module of the package that does.

No byte order mark comes first. Excel needs one to read letters beyond ASCII on a double click; but programs that read
columns by name (Python's csv, R, awk) would take it for a part of the first name, so libraries that write CSV put none
there by default. Excel reads the file by Data > From Text/CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from contextlib import suppress

from dist_mem.runtime.figures import NO_FIGURE, is_figure
from dist_mem.runtime.terminal import make_printable

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV with LF line ends.

    Titles come from other people. What could steer a terminal, or turn letters around, becomes U+FFFD. A text that a
    spreadsheet would run as a formula gets an apostrophe in front, by which spreadsheets know a text (OWASP, "CSV
    Injection"); numbers stay as they are, and what is no figure is `n/a`.
    """
    return "".join(map(_line, rows))


def _line(row: Iterable[object]) -> str:
    text = io.StringIO()
    # Quotes these two characters.
    csv.writer(text, lineterminator="\r\n").writerow([_make_harmless(cell) for cell in row])
    return text.getvalue().removesuffix("\r\n") + "\n"


def _make_harmless(cell: object) -> object:
    if not is_figure(cell):
        return NO_FIGURE
    if not isinstance(cell, str):
        return cell
    cell = make_printable(cell)
    if not cell.lstrip(" ").startswith(_FORMULA_STARTS):
        return cell
    with suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"
