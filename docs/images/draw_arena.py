"""Draw the pictures that explain docs/results/arena.md, from the cells in docs/results/arena.

python docs/images/draw_arena.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dist_mem.evaluation.plot import Line, draw_lines, label_beside, plot_recall, save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.scores import Report, report_from

CELLS = Path(__file__).parents[1] / "results" / "arena"
IMAGES = Path(__file__).parent
COPIES = 1.7  # loss below which a model copies, as in the page
COPYING = ("infinity-former as published", "Transformer-XL", "none", "Titans", "Gated DeltaNet", "Mamba-2")
ORDERS = tuple(
    row for other in ("Gated DeltaNet", "Infini", "Titans") for row in (f"XL then {other}", f"{other} then XL")
)
RECALL = ("XL then Gated DeltaNet", "infinity-former as published", "compressive", "Transformer-XL", "Titans", "none")


def cell(row: str) -> dict[str, Any]:
    """Return the finished run of a row with seed 0."""
    body: dict[str, Any] = json.loads((CELLS / f"{row}-seed0.json").read_text(encoding="utf-8"))
    return body


def report(row: str) -> Report:
    """Return what the evaluation of a row found."""
    path = CELLS / f"{row}-seed0.json"
    return report_from(next(iter(cell(row)["reports"].values())), path)


@in_style
def draw_curves(rows: tuple[str, ...], name: str) -> None:
    """Draw the training loss of rows by update, seed 0."""
    figure, axes = new_picture(3.2)
    add_grid(axes)
    curves = {row: cell(row)["curve"] for row in rows}
    lines = [Line(row, [step for step, *_ in curve], [loss for _, loss, *_ in curve]) for row, curve in curves.items()]
    ends = draw_lines(axes, lines)
    for line in axes.lines:
        line.set_marker("")
    axes.axhline(COPIES, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0.9, 2.6)
    axes.set_xscale("log")
    axes.set_xlim(left=50)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("update")
    axes.set_ylabel("training loss (nats per token)")
    figure.draw_without_rendering()  # the scales are known then
    label_beside(axes, ends)
    save_picture(figure, IMAGES / name)


if __name__ == "__main__":
    draw_curves(COPYING, "arena_copying.png")
    draw_curves(ORDERS, "arena_order.png")
    plot_recall([(row, report(row)) for row in RECALL], IMAGES / "arena_recall.png", accuracy=True)
