"""The plan: which lane reads which document when.

It is a pure function of (seed, document lengths, G, T). It does not depend on ranks, so the global batch of step s is
the same set of segments on any number of ranks; only `lanes_of_rank` assigns lanes to ranks. data/lanes.py reads it.

There are two layouts. `documents`: in each epoch the documents are permuted and each is assigned to the lane that is
free first, so that lanes stay busy although books differ a thousandfold in length. `stream`: the corpus in its original
order is one token stream cut into G contiguous lanes, as Transformer-XL's published code does for WikiText-103, enwik8
and text8.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

DEALT_AT_ONCE = 2**16  # documents whose costs are Python objects, which take ten times the memory of an array
MIN_TRAINING_LEN = 2  # tokens; the only input of a document of one token is BOS, and in blocks it has no input at all


class Cursor(NamedTuple):
    """The position of a lane; resume seeks to it."""

    epoch: int
    place: int  # in the lane's documents of that epoch; always 0 in the stream layout
    offset: int  # tokens already read of that document, or of the lane's part of the stream


START = Cursor(0, 0, 0)


class Deal(NamedTuple):
    """The documents of every lane in one epoch of the `documents` layout."""

    documents: np.ndarray  # (documents,) int32, those of lane 0 in reading order, then those of lane 1, ...
    bounds: np.ndarray  # (G + 1,) int64, lane l has documents[bounds[l]:bounds[l + 1]]
    segments_before: np.ndarray  # (documents + 1,) int64, running sum of the segments of `documents`


def lanes_of_rank(num_lanes: int, world_size: int, rank: int, micro_lanes: int) -> range:
    """Return the global lane ids of a rank: the same number on all ranks, a multiple of `micro_lanes`.

    Ids >= G are idle lanes.
    """
    groups = -(-num_lanes // (world_size * micro_lanes))
    held = groups * micro_lanes
    return range(rank * held, (rank + 1) * held)


def cut_lengths(num_tokens: Sequence[int] | np.ndarray, max_document_len: int | None) -> np.ndarray:
    """Return the number of tokens read of each document, (documents,) int64: all, or at most `max_document_len`."""
    lengths = np.asarray(num_tokens, dtype=np.int64)
    return lengths if max_document_len is None else np.minimum(lengths, max_document_len)


def num_segments_of(lengths: np.ndarray, seg_len: int) -> np.ndarray:
    """Return the number of segments of each document, ceil(length / T); the last (or first) one may be short."""
    return -(-lengths // seg_len)


def segment_starts(length: int, *, seg_len: int, cut: str = "start") -> np.ndarray:
    """Return the first token of each segment of a document of `length` tokens, (ceil(length / T),) int64.

    If the document is cut from its start, the last segment may be short; if from its end, the first (`data.cut`).
    """
    if cut == "start" or length == 0:
        return np.arange(0, length, seg_len)
    return np.concatenate(([0], np.arange((length - 1) % seg_len + 1, length, seg_len)))


def permutation(size: int, *, seed: int, epoch: int, source: int | None = None) -> np.ndarray:
    """Return the epoch's order of `size` documents, (size,) int64; those of each source of a mixture have their own.

    It is a stable sort of the raw PCG64 stream: numpy guarantees that stream (NEP 19), but may change
    `Generator.permutation`, and a run resumed under a newer numpy must get the same plan.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch) if source is None else (seed, epoch, source)))
    return np.argsort(bits.random_raw(size), kind="stable")


class DocumentPlan:
    """Endless training order of whole documents: each document once per epoch, without a wait between epochs.

    `documents` is a pure function. Epochs are computed in order, because a lane's load carries over to the next one,
    and are cached: 12 bytes per document and epoch.
    """

    remedy = "data.layout=stream"  # for fewer documents than lanes

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, *, num_lanes: int, seg_len: int, seed: int, cut: str = "start"
    ) -> None:
        """Raise ValueError if fewer documents than lanes can be read: two lanes would then read the same one."""
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.num_lanes, self.seg_len, self.seed, self.cut = num_lanes, seg_len, seed, cut
        self.skipped: list[int] = np.flatnonzero(self.lengths < MIN_TRAINING_LEN).tolist()
        self._usable = np.flatnonzero(self.lengths >= MIN_TRAINING_LEN)
        self._check_lanes(len(self._usable))
        self._segments = num_segments_of(self.lengths, seg_len)
        self.num_segments = int(self._segments[self._usable].sum())  # of one epoch, all lanes
        self._deals: list[Deal] = []
        # load * G + lane: one integer compares faster than a tuple, and the lane breaks ties
        self._heap = list(range(num_lanes))
        # the lane's load when each document was last assigned, and the largest of them: see _keep_apart
        self._started = np.full(len(self.lengths), -1, dtype=np.int64)
        self._last_start = -1

    def _check_lanes(self, num_readable: int) -> None:
        """Raise ValueError if so many documents that can be read are fewer than lanes."""
        if num_readable < self.num_lanes:
            fewer = f"set train.global_batch_size to at most {num_readable}, or {self.remedy}"
            raise ValueError(
                f"train.global_batch_size = {self.num_lanes}, but only {num_readable} documents have at least "
                f"{MIN_TRAINING_LEN} tokens, and each lane needs its own: "
                f"{fewer if num_readable else 'build the split from texts'}"
            )

    def documents(self, epoch: int, lane: int) -> list[int]:
        """Return this lane's document numbers in this epoch, in order; none if it is still busy with a long book."""
        deal = self._deal(epoch)
        return deal.documents[deal.bounds[lane] : deal.bounds[lane + 1]].tolist()

    def epochs_done(self, lane: int, epoch: int, place: int, offset: int) -> float:
        """Return the epochs completed by a lane at a cursor, by the share of segments read."""
        deal = self._deal(epoch)
        first, stop = int(deal.bounds[lane]), int(deal.bounds[lane + 1])
        before, after = int(deal.segments_before[first]), int(deal.segments_before[stop])
        done = int(deal.segments_before[first + place]) - before + -(-offset // self.seg_len)
        return epoch + (done / (after - before) if after > before else 1.0)

    def check_cursor(self, lane: int, cursor: Cursor) -> None:
        """Raise ValueError if the cursor is not a position of this plan."""
        if cursor.epoch < 0:
            raise _foreign_cursor(lane, cursor)
        documents = self.documents(cursor.epoch, lane)
        at_end = cursor.place == len(documents) and cursor.offset == 0
        if not at_end and not (
            0 <= cursor.place < len(documents) and 0 <= cursor.offset < self.lengths[documents[cursor.place]]
        ):
            raise _foreign_cursor(lane, cursor)

    def advance(self, lane: int, cursor: Cursor, num_segments: int) -> Cursor:
        """Return the cursor of a lane after it has read `num_segments` more; no document is opened.

        A damaged document that a lane skips (`data.on_corrupt: skip`) is not known to a plan: it counts as read.
        """

        def starts_of(number: int) -> np.ndarray:
            return segment_starts(int(self.lengths[number]), seg_len=self.seg_len, cut=self.cut)

        place, left = cursor.place, num_segments  # segments from the beginning of the document at `place`
        if cursor.offset:
            left += int(np.searchsorted(starts_of(self.documents(cursor.epoch, lane)[place]), cursor.offset))
        for epoch in count(cursor.epoch):
            numbers = self.documents(epoch, lane)[place:]
            ends = np.cumsum(num_segments_of(self.lengths[numbers], self.seg_len))
            ended = int(np.searchsorted(ends, left, side="right"))  # documents read to their end
            left -= int(ends[ended - 1]) if ended else 0
            if ended < len(numbers):
                return Cursor(epoch, place + ended, int(starts_of(numbers[ended])[left]))
            place = 0
        raise AssertionError("a plan is endless")

    def _deal(self, epoch: int) -> Deal:
        while len(self._deals) <= epoch:
            self._deals.append(self._deal_next())
        return self._deals[epoch]

    def _deal_next(self) -> Deal:
        order = self._usable[permutation(len(self._usable), seed=self.seed, epoch=len(self._deals))]
        order = self._keep_apart(order)
        keys = self._assign(order)
        self._started[order] = keys // self.num_lanes
        self._last_start = int(keys[-1]) // self.num_lanes
        return self._sort_by_lane(order, keys)

    def _assign(self, order: np.ndarray) -> np.ndarray:
        """Assign each document to the lane that is free first; return load * G + lane before it, (documents,) int64."""
        heap = self._heap
        keys = np.empty(len(order), dtype=np.int64)
        for first in range(0, len(order), DEALT_AT_ONCE):
            part = slice(first, first + DEALT_AT_ONCE)
            costs = (self._segments[order[part]] * self.num_lanes).tolist()
            keys[part] = [heapq.heapreplace(heap, heap[0] + cost) for cost in costs]
        return keys

    def _sort_by_lane(self, order: np.ndarray, keys: np.ndarray) -> Deal:
        lanes = keys % self.num_lanes
        dealt = order[np.argsort(lanes, kind="stable")]
        bounds = np.concatenate(([0], np.cumsum(np.bincount(lanes, minlength=self.num_lanes))))
        segments_before = np.concatenate(([0], np.cumsum(self._segments[dealt])))
        return Deal(dealt.astype(np.int32), bounds, segments_before)

    def _keep_apart(self, order: np.ndarray) -> np.ndarray:
        """Move back documents that would start at the step at which they started in the previous epoch.

        Otherwise two lanes could read the same document side by side, with the same tokens in every step. This can
        happen only to the documents that started last, and only if a lane becomes free at that step. Such lanes take
        the first other documents. There are enough, because there are at least as many documents as lanes.
        """
        num_free = sum(key // self.num_lanes == self._last_start for key in self._heap)
        others = np.flatnonzero(self._started[order] != self._last_start)[:num_free]
        return np.concatenate((order[others], np.delete(order, others)))


class StreamPlan:
    """Training order of one token stream: lane l reads positions `span(l)`, and starts over in each epoch."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, *, num_lanes: int, seg_len: int) -> None:
        """Raise ValueError if the corpus has fewer tokens than lanes."""
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.num_lanes, self.seg_len = num_lanes, seg_len
        self.skipped: list[int] = np.flatnonzero(self.lengths == 0).tolist()
        # (documents + 1,) position of each document's first token
        self.starts = np.concatenate(([0], np.cumsum(self.lengths)))
        num_tokens = int(self.starts[-1])
        if num_tokens < num_lanes:
            raise ValueError(
                f"train.global_batch_size = {num_lanes}, but the corpus has only {num_tokens} tokens: set "
                f"it to at most {num_tokens}"
            )
        self._bounds = [(lane * num_tokens + num_lanes // 2) // num_lanes for lane in range(num_lanes + 1)]
        self.num_segments = sum(-(-(stop - start) // seg_len) for start, stop in map(self.span, range(num_lanes)))

    def span(self, lane: int) -> tuple[int, int]:
        """Return the first position of a lane and the one after its last."""
        return self._bounds[lane], self._bounds[lane + 1]

    def document_at(self, position: int | np.ndarray) -> np.ndarray:
        """Return the document at a position of the stream, or at each of several, int64."""
        return self.starts.searchsorted(position, side="right") - 1

    def epochs_done(self, lane: int, epoch: int, place: int, offset: int) -> float:
        """Return the epochs completed by a lane at a cursor, by the share of tokens read."""
        start, stop = self.span(lane)
        return epoch + offset / (stop - start)

    def check_cursor(self, lane: int, cursor: Cursor) -> None:
        """Raise ValueError if the cursor is not a position of this plan."""
        start, stop = self.span(lane)
        if cursor.epoch < 0 or cursor.place != 0 or not 0 <= cursor.offset < stop - start:
            raise _foreign_cursor(lane, cursor)

    def advance(self, lane: int, cursor: Cursor, num_segments: int) -> Cursor:
        """Return the cursor of a lane after it has read `num_segments` more."""
        start, stop = self.span(lane)
        epochs, index = divmod(cursor.offset // self.seg_len + num_segments, -(-(stop - start) // self.seg_len))
        return Cursor(cursor.epoch + epochs, 0, index * self.seg_len)


Plan = DocumentPlan | StreamPlan


def make_plan(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_lanes: int,
    seg_len: int,
    seed: int,
    layout: str = "documents",
    cut: str = "start",
) -> Plan:
    """Return the plan of a layout; `lengths` in tokens, after `cut_lengths`. Raises ValueError as the plans do."""
    if layout == "stream":
        return StreamPlan(lengths, num_lanes=num_lanes, seg_len=seg_len)
    return DocumentPlan(lengths, num_lanes=num_lanes, seg_len=seg_len, seed=seed, cut=cut)


def evaluation_plan(lengths: Sequence[int] | np.ndarray, *, num_lanes: int, seg_len: int) -> list[list[int]]:
    """Return the documents of each lane, every non-empty document once; never more lanes than such documents.

    Documents are assigned longest first, so that lanes end at nearly the same step. The lane with most segments comes
    first: the lanes that still read are always the first ones (`busy_lanes`).
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    segments = num_segments_of(sizes, seg_len)
    lanes: list[list[int]] = [[] for _ in range(min(num_lanes, int(np.count_nonzero(sizes))))]
    heap = [(0, lane) for lane in range(len(lanes))]
    for document in np.argsort(-sizes, kind="stable").tolist():
        if sizes[document] > 0:
            load, lane = heap[0]
            lanes[lane].append(document)
            heapq.heapreplace(heap, (load + int(segments[document]), lane))
    return sorted(lanes, key=lambda documents: int(segments[documents].sum()), reverse=True)


def busy_lanes(lanes: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, *, seg_len: int) -> list[int]:
    """Return how many lanes of an `evaluation_plan`, always the first ones, have a segment in each step, (steps,)."""
    segments = num_segments_of(np.asarray(lengths, dtype=np.int64), seg_len)
    loads = np.array([int(segments[list(documents)].sum()) for documents in lanes], dtype=np.int64)
    return [int(np.count_nonzero(loads > step)) for step in range(int(loads.max(initial=0)))]


def forward_sizes(num_busy: int, *, world_size: int, rank: int, micro_lanes: int) -> list[int]:
    """Return the number of rows of each forward of one rank in a step in which the first `num_busy` lanes read.

    Lane l belongs to rank l % world_size. Every rank runs as many forwards as rank 0, which has most lanes, because
    ZeRO gathers parameters in each; a rank without further lanes runs them with a single idle row.
    """
    num_own = len(range(rank, num_busy, world_size))
    num_forwards = -(-len(range(0, num_busy, world_size)) // micro_lanes)
    return [min(micro_lanes, max(1, num_own - number * micro_lanes)) for number in range(num_forwards)]


def _foreign_cursor(lane: int, cursor: Cursor) -> ValueError:
    return ValueError(
        f"lane {lane} cannot resume at epoch {cursor.epoch}, place {cursor.place}, token {cursor.offset}: the plan has "
        "no such position. The checkpoint was made with other shards, or another data.seed, data.layout, "
        "data.max_document_len, train.global_batch_size or train.seg_len"
    )
