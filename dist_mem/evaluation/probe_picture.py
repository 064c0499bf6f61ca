"""The picture of the passage that an evaluation of a training reads: where each layer looked, by age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_mem.evaluation.plotting.drawn import Drawn, Table, write_figure
from dist_mem.evaluation.plotting.style import new_picture, ordered_styles, styled
from dist_mem.evaluation.probe_measures import BANDS
from dist_mem.memory.parts.inspection import SIGNAL

_TITLES = {"attention": "attention to stored rows", SIGNAL: "mass on the signal"}


def write_passage_picture(layers: Sequence[Mapping[str, float]], folder: Path, *, step: int) -> list[Path]:
    """Write picture, numbers and caption into the folder; return their paths, none if no layer reads a memory.

    Args:
        layers: `measures.mass_by_age` of every layer.
    """
    kinds = [kind for kind in _TITLES if any(kind in layer for layer in layers)]
    if not kinds:
        return []
    rows = [
        (number, kind, band, layer.get(f"{kind}_{band}", 0.0))
        for number, layer in enumerate(layers, start=1)
        for kind in kinds
        for band, _, _ in BANDS
    ]
    with styled():
        picture, axes = new_picture(2.8, columns=len(kinds), squeeze=False, sharey=True)
        names = [band.replace("_to_", "-").replace("_up", "+") for band, _, _ in BANDS]
        for (column,), kind in zip(axes.T, kinds, strict=True):
            for number, style in enumerate(ordered_styles(len(layers)), start=1):
                shares = [share for layer, of, _, share in rows if (layer, of) == (number, kind)]
                column.plot(names, shares, marker="o", markersize=3, label=f"layer {number}", **style)
            column.set_title(_TITLES[kind])
            column.set_xlabel("age (segments back)")
        axes[0, 0].set_ylabel("share of a query's reading")
        axes[0, 0].legend()
        caption = (
            f"Where each layer looked at step {step}, in the passage that every evaluation reads: the mean share of a "
            "query's reading by the age of what is read, over heads, queries and segments."
        )
        drawn = Drawn(picture, Table(("layer", "reading", "segments_back", "share"), rows), caption)
        return write_figure(drawn, folder, f"passage-step-{step:08d}", form="svg")
