"""The variance of the positional term q R of relative attention (Ji et al. 2022, appendix B and figure 7).

For a random vector x whose D elements have variance s and covariance c, the paper derives Var(x R_t) = D/2 s + 2 c g(t)
with g(t) = sum over k and l != k of sin(w_k t) cos(w_l t), an odd function that is steep at 0: one bias cannot bound it
on both sides. On the left is g, for D = 64 as in the paper and for the run's D. On the right is what the paper does not
measure: the variance of the positional term of a trained model, R_t' C R_t, where C is the covariance of the vectors
x = W_R' (q + v) over the run's own queries. Distances below 0, to the right, occur only in look-ahead attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dist_mem.evaluation.plotting.drawn_figure import DrawnFigure, Table
from dist_mem.evaluation.plotting.style import BLACK, BLUE, VERMILION, mark_lines, new_picture, ordered_styles
from dist_mem.memory.base import MemoryOutput
from dist_mem.nn.layers import RelativeProjections, sinusoid_table
from dist_mem.papers.figures.parts.source import Figure, FigureSource

PAPER_D = 64
REACH = 100  # tokens to both sides
NUM_TOKENS = 2_000
SMOOTH = 10  # points of the curve of g per token


def g(places: Tensor, d_model: int) -> Tensor:
    """Return g at real distances (P,), float64."""
    frequencies = torch.pow(10000.0, -2.0 * torch.arange(1, d_model // 2 + 1, dtype=torch.float64) / d_model)
    angles = places.double()[:, None] * frequencies
    sine, cosine = angles.sin(), angles.cos()
    return sine.sum(dim=1) * cosine.sum(dim=1) - (sine * cosine).sum(dim=1)


def positional_variances(source: FigureSource, distances: Tensor, num_tokens: int) -> list[Tensor]:
    """Return the variance of (q + v) W_R R_t over the run's queries at each distance, (P,) float64, of every layer.

    It is the mean over the heads; keys are to the left (v, not the bias of look-ahead attention).

    Raises:
        UnusableError: a layer has no relative positions.
    """
    memories = source.trained_model.model.memories()
    parts = [next((p for p in memory.modules() if isinstance(p, RelativeProjections)), None) for memory in memories]
    if None in parts:
        raise source.missing_error(
            "lamemo.fig7",
            "relative positions",
            "give a run of memory.kind transformer_xl, lamemo, or another with them",
        )
    table = sinusoid_table(distances, source.config.model.d_model, torch.float64)  # (P, D)
    seen: list[list[Tensor]] = [[] for _ in memories]

    def keep(number: int) -> Any:
        def hook(_: Any, inputs: tuple[Any, Any, Tensor], output: MemoryOutput) -> None:
            seen[number].append(output.query[:, 0, : int(inputs[2])].double().cpu())

        return hook

    handles = [memory.register_forward_hook(keep(number)) for number, memory in enumerate(memories)]
    count = 0
    try:
        for step, _ in source.read_all():
            count += step.num_inputs
            if count >= num_tokens:
                break
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for queries, part in zip(seen, parts, strict=True):
        assert part is not None
        weight = part.position.weight.detach().double().cpu().unflatten(0, (part.num_heads, -1))  # (H, K, D)
        positional = torch.cat(queries, dim=1) + part.position_bias.detach().double().cpu()[:, None]  # (H, tokens, K)
        terms = positional @ (weight @ table.T)  # (H, tokens, P)
        found.append(terms.var(dim=1).mean(dim=0))
    return found


def draw(name: str, sources: Sequence[FigureSource]) -> DrawnFigure:
    source = sources[0]
    d_model = source.config.model.d_model
    whole = torch.arange(-REACH, REACH + 1)
    smooth = torch.linspace(-REACH, REACH, 2 * REACH * SMOOTH + 1, dtype=torch.float64)
    measured = positional_variances(source, whole, source.settings.num_tokens or NUM_TOKENS)
    picture, (left, right) = new_picture(3.2, columns=2)
    rows: list[tuple[str, int, float, float]] = []
    for width, color, dashes in ((PAPER_D, BLUE, "-"), (d_model, VERMILION, "--")):
        values = g(smooth, width)
        scaled = (values / width**2).tolist()
        left.plot(smooth.tolist(), scaled, color=color, linestyle=dashes, label=f"D = {width}")
        rows += [("g / D^2", width, place, value) for place, value in zip(smooth.tolist(), scaled, strict=True)]
    left.set_xlabel("t (tokens)")
    left.set_ylabel("g(t) / D^2")
    left.legend(frameon=False)
    for number, (values, style) in enumerate(zip(measured, ordered_styles(len(measured)), strict=True)):
        right.plot(whole.tolist(), values.tolist(), label=f"layer {number + 1}", **style)
        rows += [
            ("variance", number + 1, place, value) for place, value in zip(whole.tolist(), values.tolist(), strict=True)
        ]
    right.set_xlabel("t (tokens; below 0: to the right)")
    right.set_ylabel("variance of the positional term")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        mark_lines(axes, [0.0])
        axes.tick_params(color=BLACK)
    caption = (
        f"Left: g(t) of appendix B, divided by D squared, for the paper's D = {PAPER_D} and the run's D = {d_model}. "
        f"Right: variance of the positional term (q + v) W_R R_t over queries of split {source.split}, before "
        "the division by the root of the head width, mean over "
        f"heads, of {source.label}."
    )
    return DrawnFigure(picture, Table(("curve", "D or layer", "t", "value"), rows), caption)


FIGURE = Figure(names=("lamemo.fig7",), title="g(t), and the variance of the positional term (appendix B)", draw=draw)
