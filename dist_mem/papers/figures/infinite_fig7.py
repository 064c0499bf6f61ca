"""Where in its long-term memory an infinity-former looks, by layer and head (Martins et al. 2022, figure 7, app. D).

As in the paper: the histogram of the attention to each region of the signal, in the first, the middle and the last
layer, when predicting the tokens of a split. Dashed lines are the borders between updates, tau, tau^2, ...: the newest
rows are on the right. The bars are densities: 1 everywhere is even attention, and their integral is the mass within
[0, 1], at most 1. The paper shows no heads; here each is a line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import mark_lines, new_picture, styles
from dist_mem.memory.parts.signal_places import NUM_BINS
from dist_mem.papers.figures.parts.signal import is_empty, signal_layers, signal_memories, update_marks
from dist_mem.papers.figures.parts.source import Figure, FigureSource

NUM_TOKENS = 15_000
BARS = 64  # of the NUM_BINS bins
MOST_HEADS = 7  # lines in a plot; with more, only their mean is drawn


def densities(source: FigureSource, num_tokens: int) -> tuple[Tensor, int]:
    """Return the mean density over the signal, (layers, H, BARS) float64, and the number of queries it is the mean of.

    The layers are those that have a signal.

    Raises:
        UnusableError: the memory has no signal, or no document is long enough for rows to enter it.
    """
    signal_memories(source, "infinite.fig7")
    total, count = torch.zeros(()), 0
    for step, layers in source.read_all():
        signals = [layer.rows["signal"] for layer in signal_layers(layers)]
        if is_empty(signals[0]):
            continue
        mass = torch.stack([rows.weights[:, 0, : step.num_inputs].cpu() for rows in signals])
        total = total + mass.double().sum(dim=2)
        count += step.num_inputs
        if count >= num_tokens:
            break
    if not count:
        raise UnusableError(
            f"split {source.split}: no document is long enough for rows to enter the long-term memory: give another"
        )
    return (total / count).unflatten(2, (BARS, NUM_BINS // BARS)).sum(dim=3) * BARS, count


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source = sources[0]
    found, count = densities(source, source.settings.num_tokens or NUM_TOKENS)
    num_layers, num_heads, _ = found.shape
    shown = sorted({0, (num_layers - 1) // 2, num_layers - 1})
    memories = signal_memories(source, name)
    picture, plots = new_picture(2.6, columns=len(shown), sharey=True, squeeze=False)
    middles = [(bar + 0.5) / BARS for bar in range(BARS)]
    for axes, layer in zip(plots[0], shown, strict=True):
        mean = found[layer].mean(dim=0).tolist()
        axes.fill_between(middles, mean, color="0.85", label="mean of the heads")
        heads = found[layer] if num_heads <= MOST_HEADS else found[layer, :0]
        for head, (values, style) in enumerate(zip(heads, styles(len(heads)), strict=True)):
            axes.plot(middles, values.tolist(), label=f"head {head + 1}", **{**style, "linewidth": 1.0})
        mark_lines(axes, update_marks(memories[layer].options.tau), "borders between updates")
        axes.set_xlim(0, 1)
        axes.set_title(f"layer {memories[layer].spec.layer_index + 1} of {memories[layer].spec.num_layers}")
        axes.set_xlabel("place in the signal (1: newest)")
    plots[0][0].set_ylim(0, 1.05 * float(found[shown].max()))
    plots[0][0].set_ylabel("attention density")
    handles, labels = plots[0][0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4)
    rows = [
        (memories[layer].spec.layer_index + 1, head + 1, place, value)
        for layer in range(num_layers)
        for head in range(num_heads)
        for place, value in zip(middles, found[layer, head].tolist(), strict=True)
    ]
    caption = (
        f"Attention to the long-term memory by place in its signal, mean over {count:,} tokens of split "
        f"{source.split}. "
        "Even attention is 1 everywhere; the newest rows are on the right, and dashed lines part what successive "
        "updates have brought."
    )
    return DrawnFigure(picture, Table(("layer", "head", "place", "density"), rows), caption)


FIGURE = Figure(names=("infinite.fig7",), title="attention to the long-term memory by layer and head", draw=draw)
