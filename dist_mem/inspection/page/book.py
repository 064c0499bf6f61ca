"""The book of the page: every token's text and losses exactly, and details of as many tokens as there is room for.

    stored = encoded(Book("Middlemarch", trained_name, pieces, reading, removed), room=9_000_000)

Losses are stored as float32, as they were computed, so that the gains sum up to the total that is shown. The details of
a token are where each layer looked, and what removing a passage did; if they do not fit, the tokens whose loss the
memory changed least go without. Shape letters: N tokens of the document, K passages per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dist_mem.inspection.counterfactual import Counterfactual
from dist_mem.inspection.page.columns import column
from dist_mem.inspection.reading import DocumentReading
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.terminal import make_printable

MASS_STEPS = 255  # a mass of 1 is stored as this
RISE_STEPS = 1000  # per nat
MOST_REMOVED = 3  # passages kept per token: those whose removal raises its loss most
NO_PASSAGE = 2**32 - 1  # fewer than that were removed


class PageBook(NamedTuple):
    """What the page needs of one document."""

    title: str
    run: str  # label of the run that read it
    pieces: Sequence[bytes]  # the text of every token id
    reading: DocumentReading
    removed: Counterfactual | None  # None: no passage was removed
    borders: np.ndarray  # (segments,) position of each segment's first token
    num_words: int  # as `InspectionSubject.num_words`
    other: str | None = None  # label of the run of `reading.other`
    not_removed: str | None = None  # why passages could not be removed; None: they could, or nobody asked


def encode_book(book: PageBook, *, room: int) -> dict[str, Any]:
    """Return the book as JSON, of which the details are cut to about `room` bytes."""
    reading = book.reading
    tokens = np.asarray(reading.document.tokens)
    used, ids = _used_pieces(tokens)
    nll, windowed, against = reading.nll.numpy(), reading.windowed.numpy(), reading.compared_losses
    scored = ~np.isnan(nll)
    content: dict[str, Any] = {
        "title": make_printable(book.title),
        "run": make_printable(book.run),
        "other": None if book.other is None else make_printable(book.other),
        "not_removed": book.not_removed,
        "num_tokens": len(tokens),
        "num_scored": int(scored.sum()),
        "pieces": [book.pieces[token].decode("latin-1") for token in used.tolist()],
        "ids": column(ids, "u4"),
        "nll": column(nll, "f4"),
        "without": column(windowed, "f4"),
        "others": None if against is None else column(against.numpy(), "f4"),
        "borders": column(book.borders, "u4"),
        "total": {
            "nll": math.fsum(nll[scored].tolist()),
            "without": math.fsum(windowed[scored].tolist()),
            "emptied": math.fsum(reading.without.numpy()[scored].tolist()),
        },
    }
    return {**content, **_fit_details(book, room - len(json_text(content)))}


def _used_pieces(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that occur, the most frequent first, and for each token the place of its id among them."""
    used, places, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return used[order], rank[places]


def _fit_details(book: PageBook, room: int) -> dict[str, Any]:
    """Return the details of all tokens, or of those with the largest gains, so that they fit into `room` bytes."""
    change = np.abs(book.reading.gain.numpy())
    ranked = np.argsort(-np.nan_to_num(change, nan=-1.0), kind="stable")
    count = int(np.count_nonzero(~np.isnan(change)))
    while True:
        kept = np.sort(ranked[:count])
        found = {"detailed": column(np.diff(kept, prepend=0), "u4"), **_details(book, kept)}
        size = len(json_text(found))
        if size <= room or not count:
            return found
        count = int(count * max(0.0, 0.95 * room / size))


def _details(book: PageBook, kept: np.ndarray) -> dict[str, Any]:
    """Return where the layers looked and what removals did, for the tokens at the positions `kept`."""
    layers = [
        {
            "layer": number + 1,
            "kind": kind,
            "mass": _masses(looked.mass.numpy()[kept]),
            "back": column(kept[:, None] - looked.begin.numpy()[kept], "u4"),
            "length": column((looked.end - looked.begin).numpy()[kept], "u4"),
            "shares": _masses(looked.shares.numpy()[kept]),
            "most": looked.shares.shape[1],
        }
        for number, layer in enumerate(book.reading.layers)
        for kind, looked in layer.items()
    ]
    return {"looked": layers, "removed": None if book.removed is None else _encode_removed(book.removed, kept)}


def _masses(values: np.ndarray) -> dict[str, str]:
    return column(np.rint(values.clip(0, 1) * MASS_STEPS), "u1")


def _encode_removed(removed: Counterfactual, kept: np.ndarray) -> dict[str, Any]:
    """Return the passages that were removed, and for each token those whose removal raises its loss most."""
    passages = removed.passages()
    number = {passage: place for place, passage in enumerate(passages)}
    place = np.full((removed.num_tokens, MOST_REMOVED), NO_PASSAGE, dtype=np.int64)
    rise = np.zeros((removed.num_tokens, MOST_REMOVED))
    for first, within, rises in removed.removals:
        values = rises.numpy()[:, : removed.num_tokens - first]
        order = np.argsort(-values, axis=0, kind="stable")[:MOST_REMOVED]
        here = first + np.flatnonzero(~np.isnan(values[0]))
        chosen = order[:, here - first].T
        place[here, : chosen.shape[1]] = np.array([number[passage] for passage in within])[chosen]
        rise[here, : chosen.shape[1]] = np.take_along_axis(values, order, axis=0)[:, here - first].T
    steps = np.rint(rise[kept] * RISE_STEPS).clip(-(2**15), 2**15 - 1)
    return {
        "begin": column(np.array([passage.begin for passage in passages]) + 1, "u4"),  # 0 is BOS
        "end": column(np.array([passage.end for passage in passages]) + 1, "u4"),
        "place": column(place[kept], "u4"),
        "rise": column(steps, "i2"),
        "most": MOST_REMOVED,
    }
