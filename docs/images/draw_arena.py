"""Draw the pictures that explain docs/results/arena.md, from the cells in docs/results/arena.

python docs/images/draw_arena.py
"""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

from dist_mem.evaluation.plot import Line, draw_lines, label_beside, plot_recall, save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture
from dist_mem.evaluation.scores import Report, report_from

CELLS = Path(__file__).parents[1] / "results" / "arena"
IMAGES = Path(__file__).parent
COPIES = 1.7  # loss below which a model copies, as in the page
COPYING = ("DeltaNet", "Transformer-XL", "none", "Titans", "Gated DeltaNet", "GLA")
ORDERS = tuple(
    row for other in ("Gated DeltaNet", "Infini", "Titans") for row in (f"XL then {other}", f"{other} then XL")
)
RECALL = {  # row -> seed
    **dict.fromkeys(("DeltaNet", "GLA", "compressive", "Transformer-XL", "none"), 0),
    "Gated DeltaNet then XL": 1,
}


def cells(row: str) -> list[dict[str, Any]]:
    """Return the finished runs of a row, by seed."""
    paths = sorted(CELLS.glob(f"{glob.escape(row)}-seed*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def report(row: str, seed: int) -> Report:
    """Return what the evaluation of a row found."""
    return report_from(next(iter(cells(row)[seed]["reports"].values())), CELLS)


@in_style
def draw_curves(rows: tuple[str, ...], name: str) -> None:
    """Draw the training loss of rows by update: of seed 0, and thinner of the other seeds."""
    figure, axes = new_picture(3.2)
    add_grid(axes)
    curves = {row: [list(zip(*body["curve"], strict=True)) for body in cells(row)] for row in rows}
    ends = draw_lines(axes, [Line(row, list(first[0]), list(first[1])) for row, (first, *_) in curves.items()])
    for line, (_, *others) in zip(list(axes.lines), curves.values(), strict=True):
        line.set_marker("")
        for steps, losses, *_ in others:
            axes.plot(steps, losses, color=line.get_color(), linewidth=0.6)
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
    shown = [(f"{row}, seed {seed}" if seed else row, report(row, seed)) for row, seed in RECALL.items()]
    plot_recall(shown, IMAGES / "arena_recall.png", accuracy=True)
