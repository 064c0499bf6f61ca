"""Draw the picture of docs/results/state_passing.md, from the cells in docs/results/state_passing.

python docs/images/draw_state_passing.py
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from dist_mem.evaluation.plot import save_picture
from dist_mem.evaluation.plotting.style import add_grid, in_style, new_picture, styles
from dist_mem.evaluation.position import position_bins
from dist_mem.evaluation.scores import report_from

CELLS = Path(__file__).parents[1] / "results" / "state_passing"
STATES = ("empty", "passed", "carried")
FROM = 64  # positions; those of the first segment see no state
COLUMNS = 3

Curve = dict[float, float]  # middle of an octave -> loss


def curves() -> dict[str, dict[str, list[Curve]]]:
    """Return the loss by position of every finished run: memory -> state -> its seeds."""
    found: dict[str, dict[str, list[Curve]]] = defaultdict(lambda: {state: [] for state in STATES})
    for path in sorted(CELLS.glob("*-seed*.json")):
        memory, _, state = path.stem.partition("-seed")[0].rpartition(" ")
        body = json.loads(path.read_text(encoding="utf-8"))
        bins = position_bins(report_from(next(iter(body["reports"].values())), path))
        curve = {math.sqrt(each.first * each.last): each.loss for each in bins if each.first >= FROM}
        found[memory][state].append(curve)
    return found


@in_style
def draw(path: Path) -> None:
    """Draw a panel for each memory: the mean over its seeds, and thinner each of them."""
    memories = curves()
    rows = math.ceil(len(memories) / COLUMNS)
    figure, panels = new_picture(1.9 * rows, rows=rows, columns=COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axes, (memory, of_state) in zip(panels.flat, memories.items(), strict=False):
        add_grid(axes)
        for state, style in zip(STATES, styles(len(STATES)), strict=True):
            seeds = of_state[state]
            for curve in seeds if len(seeds) > 1 else ():
                axes.plot(list(curve), list(curve.values()), color=style["color"], linewidth=0.5)
            if seeds:
                axes.plot(list(seeds[0]), [fmean(seed[x] for seed in seeds) for x in seeds[0]], label=state, **style)
        axes.set_title(memory)
        axes.set_xscale("log", base=2)
        axes.set_xticks([128, 1024, 8192], ["128", "1,024", "8,192"])
    for axes in list(panels.flat)[len(memories) :]:
        axes.axis("off")
    labels = [f"trained with {state} states" for state in STATES]
    figure.legend(panels[0][0].get_legend_handles_labels()[0], labels, loc="outside upper center", ncols=len(STATES))
    figure.supxlabel("position in the book (tokens)")
    figure.supylabel("loss (nats per token)")
    save_picture(figure, path)


if __name__ == "__main__":
    draw(Path(__file__).parent / "state_passing.png")
