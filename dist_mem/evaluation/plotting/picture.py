"""A figure that shows every text as it is written: names of runs and words of books are no formulas.

Texts between dollars would be formulas of matplotlib, one dollar an error; and for a letter that the font lacks it
warns, and draws a box. Import this module where a picture is drawn: matplotlib takes a second.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogFormatterMathtext


class Picture(Figure):
    """The figure of every picture of this project; the style's `text.parse_math` is off for the labels of ticks."""

    def draw(self, renderer: Any) -> None:
        for axes in self.axes:
            _without_formulas(axes.xaxis)
            _without_formulas(axes.yaxis)
        for text in self.findobj(Text):
            text.set_parse_math(False)
            text.set_text(make_drawable(text.get_text(), text.get_fontproperties()))
        super().draw(renderer)


def make_drawable(text: str, font: FontProperties | None = None) -> str:
    """Return a text as a font, of labels by default, can draw it: U+FFFD stands for a letter that it lacks."""
    known = _letters(findfont(font or FontProperties()))
    return "".join(letter if letter == "\n" or ord(letter) in known else "\ufffd" for letter in text)


@cache
def _letters(file: str) -> frozenset[int]:
    return frozenset(get_font(file).get_charmap())


def _without_formulas(axis: Any) -> None:
    """Give a log scale ticks with plain numbers; matplotlib writes its powers as formulas."""
    if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
        axis.set_major_formatter(LogFormatter(axis.get_transform().base))
    if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
        axis.set_minor_formatter(LogFormatter(axis.get_transform().base, minor_thresholds=(1, 0.4)))
