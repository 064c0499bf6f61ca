"""Which words gain: the largest gains, and the gain by word class, by distance to a name's last mention, by position.

A word's gain is the sum of its tokens' gains, in nats. Shape letters: N tokens of the document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from dist_mem.inspection.words import CLASSES, NAME, TextWord, distances_to_last
from dist_mem.runtime.terminal import span

TOP = 20  # largest gains: as many as Hutchins et al. 2022, sec. 4.6, look at
FIRST_BAND = 32  # tokens; each following band of distances is twice as wide
PARTS = 10  # of a document, by position


class WordGain(NamedTuple):
    """A word whose tokens are scored, and what it gains."""

    word: TextWord
    gain: float  # nats
    distance: int | None  # tokens to the last mention of this name; None: no name, or its first mention


class Group(NamedTuple):
    """The words of a class, a band of distances or a part of the document."""

    label: str
    num_words: int
    gain: float  # nats, sum

    @property
    def mean(self) -> float:
        """Nats per word; nan if the group is empty."""
        return self.gain / self.num_words if self.num_words else math.nan

    def share(self, total: float) -> float:
        """Share of the total gain; nan if the group is empty, or there is no gain."""
        return self.gain / total if self.num_words and total else math.nan


class Aggregates(NamedTuple):
    """What gains in one document."""

    num_tokens: int  # scored
    total: float  # nats, the sum over all scored tokens, also those that belong to no word
    top: list[WordGain]  # the largest gains, largest first
    by_class: list[Group]
    by_distance: list[Group]  # names, by distance to their last mention
    by_position: list[Group]  # all words, by part of the document

    @property
    def names_in_top(self) -> int:
        """How many of the largest gains are names."""
        return sum(found.word.kind == NAME for found in self.top)

    @property
    def share_of_names(self) -> float:
        """Share of the total gain that is of names; nan without names, or without a gain."""
        return self.by_class[CLASSES.index(NAME)].share(self.total)


def aggregate(words: Sequence[TextWord], gain: Tensor) -> Aggregates:
    """Return what gains: `gain` (N,), nan where a token is not scored."""
    found = word_gains(words, gain)
    scored = gain[~gain.isnan()]
    names = [each for each in found if each.word.kind == NAME]
    return Aggregates(
        num_tokens=len(scored),
        total=math.fsum(scored.tolist()),
        top=sorted(found, key=lambda each: -each.gain)[:TOP],
        by_class=[_group(kind, (each for each in found if each.word.kind == kind)) for kind in CLASSES],
        by_distance=_by_distance(names),
        by_position=_by_position(found, len(gain)),
    )


def word_gains(words: Sequence[TextWord], gain: Tensor) -> list[WordGain]:
    """Return the gains of the words all of whose tokens are scored, in order."""
    values = gain.tolist()
    pairs = zip(words, distances_to_last(words), strict=True)
    sums = ((word, math.fsum(values[word.first : word.end]), distance) for word, distance in pairs)
    return [WordGain(word, total, distance) for word, total, distance in sums if not math.isnan(total)]


def _group(label: str, found: Iterable[WordGain]) -> Group:
    gains = [each.gain for each in found]
    return Group(label, len(gains), math.fsum(gains))


def _by_distance(names: Sequence[WordGain]) -> list[Group]:
    """Return the names by distance, in bands that double; first mentions come last."""
    far = max((name.distance or 0 for name in names), default=0)
    edges = [0, FIRST_BAND]
    while edges[-1] < far:
        edges.append(2 * edges[-1])
    groups = [
        _group(f"{low + 1} to {high}", (name for name in names if low < (name.distance or 0) <= high))
        for low, high in pairwise(edges)
    ]
    return [*groups, _group("first mention", (name for name in names if name.distance is None))]


def _by_position(found: Sequence[WordGain], num_tokens: int) -> list[Group]:
    groups = []
    for part in range(PARTS):
        low, high = (edge * num_tokens // PARTS for edge in (part, part + 1))
        groups.append(_group(span(low, high), (each for each in found if low <= each.word.first < high)))
    return groups
