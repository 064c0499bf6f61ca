"""A mixture: several sources of documents, each with a share of the tokens (`data.mixture`).

    sources, parts -> MixturePlan: the order of documents -> the lane that is free first, as in data/plan.py

The next document is that of the source which is farthest behind its share: document j of source i has the time (tokens
of i before j) / weight of i, and documents are read in the order of these times. So no source is more than one of its
documents ahead of its share, and it is behind by at most its share of one document of each. Each epoch of a source has
an order of its own. A source that has given all its epochs gives nothing more, and the others share its part in
proportion to their weights.

Weights may change when a run is resumed. A lane then ends its document, and what it reads next follows the new weights.
For that the plan is a function of all weights so far (`MixturePart`), which every checkpoint has; what lanes have begun
to read before a change stays as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist_mem.config import DataConfig, TrainConfig
from dist_mem.data.plan import MIN_TRAINING_LEN, Deal, DocumentPlan, permutation
from dist_mem.runtime.file_schema import integer, leaf, list_of, optional, record
from dist_mem.runtime.terminal import count_noun

_PART = {
    "step": integer(),
    "segments_per_update": integer(1),
    "weights": list_of(leaf("a weight", lambda value: type(value) in (int, float) and value >= 0)),
    "epochs": list_of(optional(integer(1))),
}
MIXTURE_PART = record(_PART, is_open=False)  # in a checkpoint and in the history of a run
ROUND = 2**14  # documents of an epoch of the plan: a mixture has none of its own


class MixturePart(NamedTuple):
    """A part of a run with the same weights, and the same number of segments in an update."""

    step: int  # of the state that it begins with
    segments_per_update: int
    weights: Sequence[float]  # of every source, 0: it gives nothing
    epochs: Sequence[int | None]  # most epochs of every source, of the whole run; None: no limit

    def has_shares_of(self, other: MixturePart) -> bool:
        """Whether both have the same sources, weights and limits."""
        return (list(self.weights), list(self.epochs)) == (list(other.weights), list(other.epochs))


def mixture_parts(
    before: Sequence[Mapping[str, Any]], data: DataConfig, train: TrainConfig, step: int
) -> list[MixturePart]:
    """Return the parts of a run that continues from a step with these settings; none without a mixture.

    Args:
        before: those of its checkpoint, as `_asdict`; none at step 0.
    """
    if not data.mixture:
        return []
    parts = [MixturePart(**part) for part in before if part["step"] < step]
    weights, epochs = zip(*((source.weight, source.epochs) for source in data.mixture), strict=True)
    present = MixturePart(step, train.segments_per_update, weights, epochs)
    if parts and parts[-1].has_shares_of(present) and parts[-1].segments_per_update == train.segments_per_update:
        return parts
    return [*parts, present]


def weighted_shares(parts: Sequence[MixturePart], step: int) -> list[float]:
    """Return the share of the tokens that the weights give every source in the first `step` updates.

    A source that ended by `epochs` has given less.
    """
    shares = [0.0] * len(parts[-1].weights)  # sources are only added, at the end
    ends = [*(part.step for part in parts[1:]), step]
    num_segments = [(end - part.step) * part.segments_per_update for part, end in zip(parts, ends, strict=True)]
    for part, number in zip(parts, num_segments, strict=True):
        for source, weight in enumerate(part.weights):
            shares[source] += number / sum(num_segments) * weight / sum(part.weights)
    return shares


def source_settings(data: DataConfig) -> list[DataConfig]:
    """Return the settings of every source: those of the run, with its directory as `path`. Without one, of the run."""
    return [replace(data, path=source.path) for source in data.mixture] or [data]


def source_names(data: DataConfig) -> list[str]:
    """Return a name for every source: its path from the folder that holds all."""
    paths = [Path(source.path).absolute() for source in data.mixture]
    folder = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [os.fspath(path.relative_to(folder)) for path in paths]


class SourceUse(NamedTuple):
    """What a run has begun to read of a source."""

    share: float  # of the tokens of all sources
    epochs: float  # documents begun, as a fraction of those of the source


class Round(NamedTuple):
    """A round of a mixture, in the order in which its documents are dealt."""

    documents: np.ndarray  # (documents,) int32
    starts: np.ndarray  # (documents,) segments that its lane has read before each
    loads: np.ndarray  # (G,) segments of every lane before the round
    given: tuple[np.ndarray, np.ndarray]  # (sources,) documents and tokens of every source before it

    def begins_before(self, segments: int) -> bool:
        """Whether a lane begins its first document before it has read so many segments; False if it has none."""
        return len(self.starts) > 0 and int(self.starts[0]) < segments


class MixturePlan(DocumentPlan):
    """Training order of the documents of several sources; endless, unless every source has a last epoch.

    Documents are numbered through all sources, in their order: new ones are appended. An epoch of the plan is a round
    of `ROUND` documents.
    """

    remedy = "give more sources of data.mixture a weight"

    def __init__(
        self,
        lengths: Sequence[np.ndarray],
        parts: Sequence[MixturePart],
        *,
        num_lanes: int,
        seg_len: int,
        seed: int,
        cut: str = "start",
    ) -> None:
        """Make the plan of a run.

        Args:
            lengths: of the documents of every source, in tokens, after `cut_lengths`.
            parts: of the run so far, the present one last.

        Raises:
            ValueError: a source with a weight has no document of two tokens, or these have fewer than lanes.
        """
        super().__init__(np.concatenate(lengths), num_lanes=num_lanes, seg_len=seg_len, seed=seed, cut=cut)
        self.parts = parts
        self.firsts = np.cumsum([0, *map(len, lengths)])  # (sources + 1,) number of each source's first document
        self._usable_of = [self._usable[(self._usable >= a) & (self._usable < b)] for a, b in pairwise(self.firsts)]
        for number, (weight, usable) in enumerate(zip(parts[-1].weights, self._usable_of, strict=True)):
            if weight > 0 and not len(usable):
                raise ValueError(
                    f"data.mixture[{number}]: no document has at least {MIN_TRAINING_LEN} tokens: build its split from "
                    "texts, or set its weight to 0"
                )
        self._check_lanes(
            sum(len(usable) for weight, usable in zip(parts[-1].weights, self._usable_of, strict=True) if weight > 0)
        )
        # segments that every lane has read where the weights change, and the part that begins there
        bounds = [0]
        for part, following in pairwise(parts):
            bounds.append(bounds[-1] + (following.step - part.step) * part.segments_per_update)
        self._part_bounds = bounds
        changes = [0, *(index for index in range(1, len(parts)) if not parts[index].has_shares_of(parts[index - 1]))]
        self._eras = [(bounds[index], parts[index]) for index in changes]
        self._era = 0
        self._orders: list[list[np.ndarray]] = [[] for _ in lengths]  # of every source, in each of its epochs
        # (sources,) documents and tokens of every source that are dealt, and its tokens of the present weights
        self._given, self._tokens, self._paced = np.zeros((3, len(lengths)), dtype=np.int64)
        self._rounds: list[Round] = []
        self._lock = threading.Lock()  # the thread that reads ahead and the loop, which records shares, both deal

    def segments_read(self, step: int) -> int:
        """Return the segments that every lane has read after `step` updates."""
        part = self.parts[-1]
        return self._part_bounds[-1] + (step - part.step) * part.segments_per_update

    def check_steps(self, steps: int) -> None:
        """Raise ValueError if the sources have given all their epochs before so many updates are made."""
        part = self.parts[-1]
        if any(weight > 0 and epochs is None for weight, epochs in zip(part.weights, part.epochs, strict=True)):
            return
        number = 0
        while len(self._deal(number).documents):
            number += 1
        segments = min(self._heap) // self.num_lanes
        if segments < self.segments_read(steps):
            enough = part.step + max(0, segments - self._part_bounds[-1]) // part.segments_per_update
            raise ValueError(
                f"train.steps = {steps:,}, but all sources of data.mixture reach their epochs after "
                f"{count_noun(enough, 'step')}: give fewer steps, more epochs, or a source without a limit"
            )

    def use_of_sources(self, step: int) -> list[SourceUse]:
        """Return what the run has begun to read of every source after `step` updates."""
        segments = self.segments_read(step)
        number, last = 0, self._round(0)
        while (one := self._round(number)).begins_before(segments):
            number, last = number + 1, one
        begun = last.documents[: int(last.starts.searchsorted(segments))]
        documents, tokens = (x + y for x, y in zip(last.given, self._count(begun), strict=True))
        shares = tokens / max(1, int(tokens.sum()))
        epochs = documents / [max(1, len(usable)) for usable in self._usable_of]
        return [SourceUse(*use) for use in zip(shares.tolist(), epochs.tolist(), strict=True)]

    def documents(self, epoch: int, lane: int) -> list[int]:
        """Return the documents of a lane in a round, as `DocumentPlan`.

        Raises:
            ValueError: all sources are exhausted.
        """
        if not len(self._deal(epoch).documents):
            raise ValueError(
                "all sources of data.mixture have reached their epochs: set more epochs, or fewer train.steps"
            )
        return super().documents(epoch, lane)

    def epochs_done(self, lane: int, epoch: int, place: int, offset: int) -> float:
        """Return the segments read by a lane at a cursor, as a fraction of its part of all sources."""
        deal = self._deal(epoch)
        first = int(deal.bounds[lane])
        of_round = int(deal.segments_before[first + place]) - int(deal.segments_before[first])
        read = int(self._rounds[epoch].loads[lane]) + of_round + -(-offset // self.seg_len)
        return read * self.num_lanes / self.num_segments

    def _round(self, number: int) -> Round:
        self._deal(number)
        return self._rounds[number]

    def _deal(self, epoch: int) -> Deal:
        with self._lock:
            return super()._deal(epoch)

    def _deal_next(self) -> Deal:
        orders, keys, missing = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)], ROUND
        loads, given = np.sort(self._heap), (self._given.copy(), self._tokens.copy())
        loads = loads[np.argsort(loads % self.num_lanes)] // self.num_lanes
        while missing:
            order, is_last = self._next_documents(missing), self._era + 1 == len(self._eras)
            if is_last and not len(order):
                break
            heap = self._heap.copy()
            found = self._assign(order)
            kept = len(order) if is_last else int((found // self.num_lanes).searchsorted(self._eras[self._era + 1][0]))
            begins_era = not is_last and (kept < len(order) or not len(order))
            if begins_era:  # what begins later follows the next weights
                self._heap, order = heap, order[:kept]
                found = self._assign(order)
                self._era += 1
            documents, tokens = self._count(order)
            self._given, self._tokens = self._given + documents, self._tokens + tokens
            self._paced = np.zeros_like(tokens) if begins_era else self._paced + tokens
            orders.append(order)
            keys.append(found)
            missing -= len(order)
        order, key = np.concatenate(orders), np.concatenate(keys)
        self._rounds.append(Round(order.astype(np.int32), key // self.num_lanes, loads, given))
        return self._sort_by_lane(order, key)

    def _count(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many of these documents, and of their tokens, every source has, (sources,) int64."""
        sources = self.firsts.searchsorted(order, side="right") - 1
        documents = np.bincount(sources, minlength=len(self._usable_of))
        return documents, np.bincount(sources, self.lengths[order], len(documents)).astype(np.int64)

    def _next_documents(self, most: int) -> np.ndarray:
        """Return the next documents by the present weights, at most so many; none if all sources are exhausted."""
        part = self._eras[self._era][1]
        numbers, times = [np.empty(0, dtype=np.int64)], [np.empty(0)]
        for source, (weight, epochs) in enumerate(zip(part.weights, part.epochs, strict=True)):
            size, given = len(self._usable_of[source]), int(self._given[source])
            left = most if epochs is None else min(most, epochs * size - given)
            if weight > 0 and size and left > 0:
                own = self._documents_of(source, given, left)
                before = np.cumsum(self.lengths[own]) - self.lengths[own] + self._paced[source]
                numbers.append(own)
                with np.errstate(over="ignore"):  # infinite: after all others
                    times.append(before / weight)
        order = np.argsort(np.concatenate(times), kind="stable")[:most]
        return np.concatenate(numbers)[order]

    def _documents_of(self, source: int, first: int, count: int) -> np.ndarray:
        """Return the documents [first, first + count) that a source gives, through all its epochs."""
        size, orders = len(self._usable_of[source]), self._orders[source]
        epochs = range(first // size, (first + count - 1) // size + 1)
        while len(orders) < epochs.stop:
            orders.append(self._order_of(source, len(orders)))
        return np.concatenate([orders[epoch] for epoch in epochs])[first - epochs.start * size :][:count]

    def _order_of(self, source: int, epoch: int) -> np.ndarray:
        """Return the order of a source in an epoch; the last documents of the one before do not come first again.

        Otherwise two lanes could read the same document side by side. That can still happen where a source has fewer
        documents than lanes read of it at once.
        """
        usable = self._usable_of[source]
        order = usable[permutation(len(usable), seed=self.seed, epoch=epoch, source=source)]
        if epoch:
            apart = min(self.num_lanes, len(usable) // 2)
            recent = self._orders[source][epoch - 1][len(usable) - apart :]
            others = np.flatnonzero(~np.isin(order, recent))[:apart]
            order = np.concatenate((order[others], np.delete(order, others)))
        return order.astype(np.int32)


def describe_sources(plan: MixturePlan, names: Sequence[str], steps: int) -> list[str]:
    """Return a line for every source: its weight, its size, and how often a run of so many updates reads it."""
    part, total = plan.parts[-1], sum(plan.parts[-1].weights)
    lines = []
    for number, (name, use) in enumerate(zip(names, plan.use_of_sources(steps), strict=True)):
        first, stop = plan.firsts[number : number + 2].tolist()
        size = f"{count_noun(stop - first, 'document')}, {int(plan.lengths[first:stop].sum()):,} tokens"
        limit = part.epochs[number]
        ends = "" if limit is None else f" of at most {limit}"
        ends += "; then the others share its part" if limit is not None and use.epochs >= limit else ""
        lines.append(
            f"{name}: weight {part.weights[number] / total:.2%}, {size}; {use.epochs:.3g} epochs{ends}, "
            f"{use.share:.2%} of the tokens in {count_noun(steps, 'step')}"
        )
    return lines
