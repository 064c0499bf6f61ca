"""The JSON of an inspection: every column of the reading, of the counterfactual and of the aggregates.

Columns have a value per token of the document; null stands for a token that is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dist_mem.inspection.aggregates import Aggregates, Group
from dist_mem.inspection.counterfactual import Counterfactual
from dist_mem.inspection.reading import DocumentReading
from dist_mem.inspection.words import TextWord

FORMAT_VERSION = 1
DIGITS = 7  # after the point; the error of a sum of a million tokens is below 1e-4
LATER = 20  # tokens of each passage that are kept, those that get worst


def content_of(
    reading: DocumentReading,
    removed: Counterfactual | None,
    words: Sequence[TextWord],
    gains: Mapping[str, Tensor],
    aggregates: Aggregates,
) -> dict[str, Any]:
    """Return what the JSON says of one document; `gains` by the name of what the memory is compared with."""
    losses = {"nll": reading.nll, "without_memory": reading.without, "windowed": reading.windowed}
    losses |= {} if reading.emptied is None else {"emptied": reading.emptied}
    losses |= {} if reading.other is None else {"other": reading.other}
    losses |= {} if reading.other_windowed is None else {"other_windowed": reading.other_windowed}
    return {
        "format_version": FORMAT_VERSION,
        "metrics": {name: float(gain.nansum()) for name, gain in gains.items()},
        "tokens": reading.document.tokens.tolist(),
        "pieces": reading.pieces,
        "words": [list(word) for word in words],
        "losses": {name: column(values) for name, values in losses.items()},
        "layers": [
            {kind: {name: _round(part) for name, part in looked._asdict().items()} for kind, looked in layer.items()}
            for layer in reading.layers
        ],
        "passages": None if removed is None else passages_content(removed),
        "aggregates": aggregates_content(aggregates),
    }


def column(values: Tensor) -> list[float | None]:
    """Return a value per token, rounded; None for nan."""
    return [None if math.isnan(value) else round(value, DIGITS) for value in values.tolist()]


def _round(values: Tensor) -> Any:
    if not values.is_floating_point():
        return values.tolist()
    if values.dim() > 1:
        return [_round(row) for row in values]
    return [round(value, 4) for value in values.tolist()]


def passages_content(removed: Counterfactual) -> dict[str, Any]:
    """Return per token the passage that it needs most, and per passage the tokens that need it most."""
    needed = removed.most_harmful()
    later = []
    for passage in removed.passages():
        places, rise = removed.rises(passage)
        worst = rise.topk(min(LATER, len(rise)))
        pairs = zip(places[worst.indices].tolist(), worst.values.tolist(), strict=True)
        tokens = [[position, round(value, DIGITS)] for position, value in pairs if value > 0.0]
        later.append({**passage._asdict(), "nats": float(rise.sum()), "tokens": tokens})
    most = {"begin": needed.begin.tolist(), "end": needed.end.tolist(), "rise": column(needed.rise)}
    return {"most_harmful": most, "removed": later}


def aggregates_content(found: Aggregates) -> dict[str, Any]:
    """Return the aggregates with their groups as objects."""

    def groups(named: Sequence[Group]) -> list[dict[str, Any]]:
        return [{"label": each.label, "words": each.num_words, "nats": each.gain} for each in named]

    return {
        "tokens": found.num_tokens,
        "nats": found.total,
        "names_in_top": found.names_in_top,
        "share_of_names": None if math.isnan(found.share_of_names) else found.share_of_names,
        "top": [{**each.word._asdict(), "gain": each.gain, "distance": each.distance} for each in found.top],
        "by_class": groups(found.by_class),
        "by_distance": groups(found.by_distance),
        "by_position": groups(found.by_position),
    }
