"""Attention by distance: how much of the last layer's attention goes how far back (Ji et al. 2022, figure 1, sec. 6).

As in the paper: for every predicted token, the largest attention in each interval of 5 tokens to its left, up to 100,
averaged over 15 K tokens, on a log scale. The paper does not say what is done with heads; here their mean is taken
first. Rows of several tokens (compressed ones, a signal) share their mass evenly among them. A long-term signal is a
softmax of its own, and a line of its own. Rows that summarise all the past have no distance: the caption gives their
share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import add_grid, new_picture, styles
from dist_mem.memory.parts.inspection import SIGNAL, SUMMARY, Inspection
from dist_mem.papers.figures.parts.source import Figure, FigureSource
from dist_mem.papers.figures.parts.words import mass_by_distance, token_mass

INTERVAL, REACH = 5, 100  # tokens
NUM_TOKENS = 15_000


def attention_by_distance(source: FigureSource, num_tokens: int) -> tuple[dict[str, Tensor], int]:
    """Return the mean over tokens of the largest attention in each interval, and the number of tokens.

    The tensors (REACH / INTERVAL,) float64 are by softmax: "" for that over segment and memory, "signal"; "summary"
    is the mean share () of rows that summarise all the past, which the first lacks.

    Raises:
        UnusableError: no document has more than REACH tokens.
    """
    sums: dict[str, Tensor] = {}
    count = 0
    for step, layers in source.read_all():
        if not layers[-1].rows:
            why = "its memory has no `inspect` that gives rows"
            raise source.missing_error("lamemo.fig1", "attention weights", why)
        predicted = step.first_input + 1 + torch.arange(step.num_inputs)
        far = (predicted >= REACH).nonzero().flatten()[: num_tokens - count]  # with REACH tokens before them
        count += len(far)
        for name, mass in _by_softmax(layers[-1], step.num_inputs).items():
            largest = mass if name == SUMMARY else mass.unflatten(1, (-1, INTERVAL)).amax(dim=2)
            sums[name] = sums.get(name, 0.0) + largest[far].sum(dim=0)
        if count >= num_tokens:
            break
    if not count:
        raise UnusableError(f"split {source.split}: no document has more than {REACH} tokens, as lamemo.fig1 needs")
    return {name: total / count for name, total in sums.items()}, count


def _by_softmax(layer: Inspection, num_queries: int) -> dict[str, Tensor]:
    """Return the mass by distance, the mean over the heads, (T, REACH) float64, of each softmax; of summaries (T,)."""
    found: dict[str, Tensor] = {}
    for kind, rows in layer.rows.items():
        if kind == SUMMARY:
            found[SUMMARY] = rows.weights[:, 0, :num_queries].double().mean(dim=0).sum(dim=-1).cpu()
            continue
        name = SIGNAL if kind == SIGNAL else ""
        mass = mass_by_distance(token_mass(rows, num_queries), REACH).mean(dim=0)
        found[name] = found.get(name, 0.0) + mass
    return found


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    wanted = sources[0].settings.num_tokens or NUM_TOKENS
    picture, axes = new_picture(3.2)
    middles = [begin + (INTERVAL + 1) / 2 for begin in range(0, REACH, INTERVAL)]
    rows: list[tuple[str, str, int, int, float]] = []
    counts, summaries = [], ""
    for source, style in zip(sources, styles(len(sources)), strict=True):
        curves, count = attention_by_distance(source, wanted)
        counts.append(count)
        if SUMMARY in curves:
            share = float(curves.pop(SUMMARY))
            summaries += f" Of {source.label}, {share:.2f} is read from a summary of all the past, at no distance."
        for softmax, curve in curves.items():
            values = curve.tolist()
            dashes = ":" if softmax else style["linestyle"]
            label = f"{source.label}, long-term signal" if softmax else source.label
            shown = [value if value > 0 else float("nan") for value in values]  # 0 is not on a log scale
            axes.plot(middles, shown, marker="o", markersize=3, label=label, color=style["color"], linestyle=dashes)
            parts = zip(range(1, REACH, INTERVAL), values, strict=True)
            rows += [
                (source.label, softmax or "segment and memory", start, start + INTERVAL - 1, value)
                for start, value in parts
            ]
    axes.set_yscale("log")
    axes.set_xlim(REACH, 0)  # the past is on the left, as in a text
    axes.set_xlabel("distance to the predicted token (tokens)")
    axes.set_ylabel("attention of the last layer")
    add_grid(axes)
    picture.legend(loc="outside lower center")
    tokens = " / ".join(f"{count:,}" for count in counts)
    caption = (
        f"Attention of the last layer by distance, mean over {tokens} tokens of split {sources[0].split}: of each "
        f"token, the largest weight in each interval of {INTERVAL} tokens to its left, after the mean over heads. "
        f"Where a line ends, nothing is read.{summaries}"
    )
    return DrawnFigure(picture, Table(("run", "softmax", "from", "to", "attention"), rows), caption)


FIGURE = Figure(
    names=("lamemo.fig1",),
    title="attention of the last layer by distance",
    draw=draw,
    most_runs=6,
    runs="RUN [RUN ...], any memories",
)
