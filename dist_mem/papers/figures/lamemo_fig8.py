"""Training curves of several runs (Ji et al. 2022, figure 8), from their metrics.jsonl.

The paper compares disentangled positions (`memory.positions: disentangled`) with those of Transformer-XL (`shared`);
any runs can be compared. Points of updates that a rollback repeated are those of the newest branch.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import new_picture, styles
from dist_mem.papers.figures.parts.source import Figure, FigureSource
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.tracking.progress import LOSS


def training_curve(source: FigureSource) -> dict[int, float]:
    """Return the training loss by step.

    Raises:
        UnusableError: the run has no metrics, as an export.
    """
    path = source.checkpoint.run_dir / METRICS_FILE
    losses = {point.step: point.metrics[LOSS] for point in read_points(path) if LOSS in point.metrics}
    if not losses:
        raise UnusableError(f"{path} has no training loss: lamemo.fig8 takes run directories, not exports")
    return dict(sorted(losses.items()))


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    picture, axes = new_picture(3.0)
    rows = []
    for source, style in zip(sources, styles(len(sources)), strict=True):
        losses = training_curve(source)
        axes.plot(list(losses), list(losses.values()), label=source.label, **style)
        rows += [(source.label, step, loss) for step, loss in losses.items()]
    axes.set_xlabel("step (updates)")
    axes.set_ylabel("training loss (nats per token)")
    picture.legend(loc="outside lower center")
    caption = "Training loss by step, as logged in metrics.jsonl; not smoothed."
    return DrawnFigure(picture, Table(("run", "step", "loss"), rows), caption)


FIGURE = Figure(
    names=("lamemo.fig8",), title="training curves", draw=draw, most_runs=8, least_runs=2, runs="RUN RUN [RUN ...]"
)
