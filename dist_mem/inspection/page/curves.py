"""Curves of metrics.jsonl as inline SVG: one chart per metric, one line per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dist_mem.inspection.page.markup import Markup, element, joined
from dist_mem.tracking.tracker import Point

WIDTH, HEIGHT = 360, 210  # units of the drawing; a phone shows one unit as about one pixel
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 26  # margins of the axes
NUM_COLOURS = 6  # classes line-0 to line-5 of page.css
MAX_BUCKETS = 150  # of a line; each draws its smallest and its largest value, so that spikes stay
MAX_VALUE = 1e300  # of what is drawn
LOG_RATIO = 20.0  # values of a wider range get a logarithmic axis


class Curve(NamedTuple):
    """A metric of one run."""

    run: int  # number of the run, which sets the colour
    xs: list[int]  # steps
    ys: list[float]  # nan or infinite where the run logged that


class Axis(NamedTuple):
    """A scale of the drawing."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        """Return the place of a value between `low` (0) and `high` (1)."""
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)


def curves_of(runs: Sequence[Sequence[Point]]) -> dict[str, list[Curve]]:
    """Return the curves of every metric by its name: the loss, evaluations, then the others by name."""
    found: dict[str, list[Curve]] = {}
    for number, points in enumerate(runs):
        mine: dict[str, Curve] = {}
        for point in points:
            for name, value in point.metrics.items():
                curve = mine.setdefault(name, Curve(number, [], []))
                curve.xs.append(point.step)
                curve.ys.append(value)
        for name, curve in mine.items():
            found.setdefault(name, []).append(curve)
    return dict(sorted(found.items(), key=lambda item: (not is_main(item[0]), item[0] != "loss", item[0])))


def is_main(name: str) -> bool:
    """Return whether a metric is shown at first: the loss and the figures of evaluations."""
    return name == "loss" or name.startswith(("validation/", "test/", "train/"))


def is_drawn(value: float) -> bool:
    """Return whether a value has a place on an axis; above the limit, a distance may be no float."""
    return abs(value) < MAX_VALUE


def chart(name: str, curves: Sequence[Curve]) -> Markup:
    """Return one metric as a figure with its name, or a note if no value is finite."""
    values = [y for curve in curves for y in curve.ys if is_drawn(y)]
    if not values:
        return element("figure", element("figcaption", name), element("p", "no finite value", class_="empty"))
    x_axis = _axis([x for curve in curves for x in curve.xs])
    is_log = min(values) > 0 and max(values) / min(values) > LOG_RATIO
    y_axis = _axis(values, is_log=is_log)
    shown = joined([*_ticks(x_axis, y_axis), *(_line(curve, x_axis, y_axis) for curve in curves)])
    label = f"{name} by step, from {min(values):.4g} to {max(values):.4g}"
    drawing = element("svg", shown, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    caption = element("figcaption", name, element("small", " (log scale)" if is_log else ""))
    return element("figure", caption, drawing, class_="chart")


def _axis(values: Sequence[float], *, is_log: bool = False) -> Axis:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return Axis(low, high, is_log)


def _place(x: float, y: float) -> tuple[float, float]:
    """Return the drawing's coordinates of shares of the axes."""
    return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)


def _ticks(x_axis: Axis, y_axis: Axis) -> list[Markup]:
    parts = []
    for value in nice_ticks(y_axis):
        x, y = _place(0, y_axis.share(value))
        parts.append(element("line", x1=f"{x:.1f}", x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(element("text", short(value), x=f"{x - 5:.1f}", y=f"{y + 3.5:.1f}", text_anchor="end"))
    for value in nice_ticks(x_axis):
        x, y = _place(x_axis.share(value), 0)
        parts.append(element("text", short(value), x=f"{x:.1f}", y=f"{y + 14:.1f}", text_anchor="middle"))
    parts.append(element("text", "step", x=WIDTH - RIGHT, y=HEIGHT - 1, text_anchor="end"))
    return parts


def nice_ticks(axis: Axis, count: int = 4) -> list[float]:
    """Return about `count` round values within an axis: multiples of 1, 2 or 5 times a power of ten."""
    if axis.is_log:
        decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        factors = (1,) if len(decades) > count else (1, 3)
        return [f * 10.0**d for d in decades for f in factors if axis.low <= f * 10.0**d <= axis.high]
    rough = (axis.high - axis.low) / count
    if rough < 1e-300:
        return [axis.low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """Return a number in few characters: 1.5k, 2M, 0.25, 1e-05."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= abs(value) < 1e12:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _line(curve: Curve, x_axis: Axis, y_axis: Axis) -> Markup:
    """Return the paths of a curve, interrupted where a value is not finite; a point alone is a dot."""
    strokes: list[list[str]] = [[]]
    for x, y in _thinned(curve):
        if is_drawn(y):
            strokes[-1].append("{:.1f} {:.1f}".format(*_place(x_axis.share(x), y_axis.share(y))))
        else:
            strokes.append([])
    lines = "".join(f"M{'L'.join(stroke)}" for stroke in strokes if len(stroke) > 1)
    dots = "".join(f"M{stroke[0]}h0" for stroke in strokes if len(stroke) == 1)
    colour = f"line line-{curve.run % NUM_COLOURS}"
    return joined(
        element("path", d=path, class_=name) for path, name in ((lines, colour), (dots, f"{colour} dots")) if path
    )


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    """Return at most two points a bucket: its smallest and largest value, in order of their steps."""
    points = list(zip(curve.xs, curve.ys, strict=True))
    if len(points) <= 2 * MAX_BUCKETS:
        return points
    size = math.ceil(len(points) / MAX_BUCKETS)
    kept = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        odd = [point for point in bucket if not math.isfinite(point[1])][:1]
        finite = [point for point in bucket if math.isfinite(point[1])]
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])} if finite else set()
        kept += sorted([*odd, *ends])
    return kept


def charts(runs: Sequence[Sequence[Point]], labels: Sequence[str]) -> Markup:
    """Return all charts, those that are not main ones folded, with a legend of the runs."""
    found = curves_of(runs)
    if not found:
        return element("p", "These runs have logged no point (metrics.jsonl).", class_="empty")
    swatches = [
        element(
            "li",
            element("svg", element("path", d="M1 6H25", class_=f"line line-{n % NUM_COLOURS}"), viewBox="0 0 26 12"),
            element("span", label),
        )
        for n, label in enumerate(labels)
    ]
    main, others = (
        [chart(name, curves) for name, curves in found.items() if is_main(name) == wanted] for wanted in (True, False)
    )
    folded = element("details", element("summary", f"{len(others)} other metrics"), _grid(others)) if others else ""
    return joined([element("ul", *swatches, class_="legend"), _grid(main), folded])


def _grid(found: Sequence[Markup]) -> Markup:
    return element("div", *found, class_="charts")
