"""LaMemo's alpha: how much of a memory row's old context stays when it looks ahead (Ji et al. 2022, figure 6, sec. 6).

As in the paper: by position in the memory, the mean over 100 segments, of 8 layers spread over the model. The mean is
over heads too. Only segments with a full memory count, because an empty row has no context.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import new_picture, ordered_styles
from dist_mem.papers.figures.parts.source import Figure, FigureSource

NUM_SEGMENTS = 100
MOST_LAYERS = 8


def mean_alpha(source: FigureSource, num_segments: int) -> tuple[dict[int, Tensor], int]:
    """Return alpha (M,) of every layer that has it, oldest row first, and the number of segments it is the mean of.

    Raises:
        UnusableError: the memory has no alpha, or no segment of the split has a full memory.
    """
    sums: dict[int, Tensor] = {}
    count = 0
    for _, layers in source.read_all():
        found = {number: layer.values["alpha"] for number, layer in enumerate(layers) if "alpha" in layer.values}
        if not found:
            raise source.missing_error("lamemo.fig6", "the coefficient alpha", "give a run of memory.kind lamemo")
        spans = layers[next(iter(found))].rows["memory"].spans
        if bool((spans.begin == spans.end).any()):
            continue
        for number, alpha in found.items():
            sums[number] = sums.get(number, 0.0) + alpha[0].double().mean(dim=0).cpu()  # over the heads
        count += 1
        if count == num_segments:
            break
    if not count:
        raise UnusableError(f"split {source.split}: no document is long enough to fill the memory; give another split")
    return {number: total / count for number, total in sums.items()}, count


def shown_layers(layers: Sequence[int]) -> list[int]:
    """Return at most MOST_LAYERS layers, spread evenly, the first and the last among them."""
    number = min(MOST_LAYERS, len(layers))
    places = torch.linspace(0, len(layers) - 1, number).round().int().tolist()
    return [layers[place] for place in places]


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source = sources[0]
    wanted = source.settings.num_tokens
    num_segments = NUM_SEGMENTS if wanted is None else max(1, wanted // source.trained_model.config.train.seg_len)
    alpha, count = mean_alpha(source, num_segments)
    shown = shown_layers(list(alpha))
    picture, axes = new_picture(3.0)
    for number, style in zip(shown, ordered_styles(len(shown)), strict=True):
        axes.plot(range(len(alpha[number])), alpha[number].tolist(), label=f"layer {number + 1}", **style)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position in the memory (tokens; 0: the oldest)")
    axes.set_ylabel("alpha")
    picture.legend(loc="outside right center")
    rows = [
        (number + 1, place, value) for number, values in alpha.items() for place, value in enumerate(values.tolist())
    ]
    caption = (
        f"LaMemo's alpha, the share of the old context in a refreshed memory row, mean over {count} segments of split "
        f"{source.split} and all heads. 1: the row keeps its past; 0: it is all future. "
        "The last layer refreshes nothing."
    )
    return DrawnFigure(picture, Table(("layer", "position", "alpha"), rows), caption)


FIGURE = Figure(names=("lamemo.fig6",), title="LaMemo's alpha by layer and position in the memory", draw=draw)
