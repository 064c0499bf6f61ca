"""Readers: the batches of one rank in each update of training, or each step of an evaluation.

    index, plan -> segments of each lane (segments.py) -> micro-batches -> Update -> prefetch thread -> loop

An Update has the cursors after it. Only cursors of consumed updates are saved, so after a resume the reader simply
reads again what the thread had read ahead; nothing is replayed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat

import numpy as np
import torch
from torch import Tensor

from dist_mem.config import DataConfig, TrainConfig
from dist_mem.data.batch import IGNORE, Batch, Update
from dist_mem.data.directory import open_index, open_tokenizer
from dist_mem.data.documents import NOTHING, Documents
from dist_mem.data.mixture import MixturePart, MixturePlan, mixture_parts, source_settings
from dist_mem.data.plan import (
    START,
    Cursor,
    Plan,
    StreamPlan,
    busy_lanes,
    cut_lengths,
    forward_sizes,
    lanes_of_rank,
    make_plan,
)
from dist_mem.data.prefetch import Prefetcher
from dist_mem.data.segments import IDLE, collate, read_documents, read_lane
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer


class LaneReader:
    """Endless iterator over the updates of one rank, read ahead in a thread; iterate, then `close`."""

    def __init__(
        self,
        config: DataConfig,
        index: Index,
        plan: Plan,
        *,
        lane_ids: Sequence[int],
        micro_lanes: int,
        segments_per_update: int,
        bos_id: int,
        cursors: Tensor | None = None,
        pin: bool = False,
        others: Sequence[Index] = (),
    ) -> None:
        """`cursors` (lanes, 3) int64: of the last consumed update, in the order of `lane_ids`; None: the beginning.

        `pin`: batches are in pinned memory, into which the thread copies them. `others`: as for `Documents`.

        Raises ValueError for cursors of another plan. `next` raises ShardError for a damaged document.
        """
        self.plan = plan
        self._lane_ids = list(lane_ids)
        self._micro_lanes = micro_lanes
        self._segments_per_update = segments_per_update
        self._blocks = config.blocks
        self._pin = pin
        self._documents = Documents(index, plan.lengths, bos_id=bos_id, on_corrupt=config.on_corrupt, others=others)
        self._cursors = self._check_cursors(cursors)
        self._updates = Prefetcher(self._read(), depth=config.prefetch)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return next(self._updates)

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of an update."""
        return self._segments_per_update * -(-len(self._lane_ids) // self._micro_lanes)

    def close(self) -> None:
        """End the thread and its pending fetches; may be called more than once."""
        self._documents.close()
        self._updates.close()

    def _check_cursors(self, saved: Tensor | None) -> list[Cursor]:
        if saved is None:
            return [START] * len(self._lane_ids)
        if tuple(saved.shape) != (len(self._lane_ids), 3):
            raise ValueError(
                f"cursors of shape {tuple(saved.shape)} for {len(self._lane_ids)} lanes: the checkpoint was made with "
                "another train.global_batch_size, train.micro_batch_size or number of ranks"
            )
        cursors = [Cursor(*row) for row in saved.tolist()]
        for lane, cursor in zip(self._lane_ids, cursors, strict=True):
            if lane < self.plan.num_lanes:
                self.plan.check_cursor(lane, cursor)
        return cursors

    def _read(self) -> Iterator[Update]:
        lanes = [
            read_lane(self._documents, self.plan, lane=lane, cursor=cursor)
            for lane, cursor in zip(self._lane_ids, self._cursors, strict=True)
        ]
        while True:
            batches: list[Batch] = []
            num_started = num_skipped = 0
            for _ in range(self._segments_per_update):
                segments = [next(lane) for lane in lanes]
                batches += [
                    collate(
                        segments[first : first + self._micro_lanes],
                        seg_len=self.plan.seg_len,
                        with_recall=self._documents.has_recall,
                        blocks=self._blocks,
                    )
                    for first in range(0, len(segments), self._micro_lanes)
                ]
                num_started += sum(segment.num_started for segment in segments)
                num_skipped += sum(segment.num_skipped for segment in segments)
            cursors = [segment.after for segment in segments]
            are_scored = [batch.targets != IGNORE for batch in batches]
            yield Update(
                [batch.pin() for batch in batches] if self._pin else batches,
                torch.from_numpy(np.array(cursors)),
                scored=[int(is_scored.sum()) for is_scored in are_scored],
                epoch=self._mean_epoch(cursors),
                documents_started=num_started,
                documents_skipped=num_skipped,
                num_recall=sum(
                    int(((batch.recall > 0) & is_scored).sum())
                    for batch, is_scored in zip(batches, are_scored, strict=True)
                    if batch.recall is not None
                ),
            )

    def _mean_epoch(self, cursors: Sequence[Cursor]) -> float:
        lanes = zip(self._lane_ids, cursors, strict=True)
        epochs = [self.plan.epochs_done(lane, *cursor) for lane, cursor in lanes if lane < self.plan.num_lanes]
        return statistics.fmean(epochs) if epochs else 0.0


def training_plan(
    data: DataConfig, train: TrainConfig, splits: Sequence[Index], parts: Sequence[MixturePart] = ()
) -> Plan:
    """Return the plan of a training on one split, or on those of the sources of a mixture.

    Args:
        parts: of the run, as `mixture_parts`; none: it begins with these settings.

    Raises:
        ValueError: there are too few documents.
    """
    lengths = [cut_lengths(index.documents.num_tokens, data.max_document_len) for index in splits]
    if data.mixture:
        parts = parts or mixture_parts([], data, train, 0)
        size = {"num_lanes": train.global_batch_size, "seg_len": train.seg_len}
        return MixturePlan(lengths, parts, **size, seed=data.seed, cut=data.cut)
    return make_plan(
        lengths[0],
        num_lanes=train.global_batch_size,
        seg_len=train.seg_len,
        seed=data.seed,
        layout=data.layout,
        cut=data.cut,
    )


def training_reader(
    data: DataConfig,
    train: TrainConfig,
    *,
    world_size: int,
    rank: int,
    cursors: Tensor | None = None,
    pin: bool = False,
    parts: Sequence[MixturePart] = (),
) -> LaneReader:
    """Open the training split of `data` and read this rank's lanes, from the beginning or from saved cursors.

    `parts`: as for `training_plan`. Raises ValueError if index or tokenizer are missing or do not match, or if there
    are too few documents.
    """
    tokenizer = open_tokenizer(data)
    splits = [open_index(source, data.train_split) for source in source_settings(data)]
    for index in splits:
        check_tokenizer(index, tokenizer)
    return LaneReader(
        data,
        splits[0],
        training_plan(data, train, splits, parts),
        lane_ids=lanes_of_rank(
            train.global_batch_size, world_size=world_size, rank=rank, micro_lanes=train.micro_batch_size
        ),
        micro_lanes=train.micro_batch_size,
        segments_per_update=train.segments_per_update,
        bos_id=tokenizer.bos_id,
        cursors=cursors,
        pin=pin,
        others=splits[1:],
    )


def evaluation_batches(
    index: Index,
    plan_lanes: Sequence[Sequence[int]],
    *,
    world_size: int,
    rank: int,
    micro_lanes: int,
    seg_len: int,
    bos_id: int,
    max_document_len: int | None = None,
    blocks: bool = False,
    cut: str = "start",
    prefix: np.ndarray = NOTHING,
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of one rank in each step, with a row for each lane that still reads (`forward_sizes`).

    `plan_lanes` is the `evaluation_plan` of all lanes. Row r of micro-batch m is the same lane in every step; the last
    lanes end first. `prefix`, (num_tokens,), is read before every document, as in `Documents`. Raises ShardError for a
    damaged document, because a score needs all documents.
    """
    lengths = cut_lengths(index.documents.num_tokens, max_document_len)
    documents = Documents(index, lengths, bos_id=bos_id, prefix=prefix)
    lanes = [
        chain(read_documents(documents, [numbers], seg_len=seg_len, cut=cut), repeat(IDLE))
        for numbers in plan_lanes[rank::world_size]
    ]
    for num_busy in busy_lanes(plan_lanes, lengths + len(prefix), seg_len=seg_len):
        sizes = forward_sizes(num_busy, world_size=world_size, rank=rank, micro_lanes=micro_lanes)
        groups = [lanes[number * micro_lanes :][:size] for number, size in enumerate(sizes)]
        yield [
            collate(
                [next(lane) for lane in group] or [IDLE],
                seg_len=seg_len,
                with_recall=documents.has_recall,
                blocks=blocks,
            )
            for group in groups
        ]


def stream_batches(
    index: Index, plan: StreamPlan, *, lane_ids: Sequence[int], micro_lanes: int, bos_id: int, blocks: bool = False
) -> Iterator[list[tuple[Batch, Tensor]]]:
    """Yield the micro-batches of one rank in each step of one pass over a stream; lanes that have ended are idle.

    With each Batch comes the document of every target, (B, T) int64: a segment may contain the end of one document and
    the beginning of the next. All ranks yield the same number of steps. Raises ShardError for a damaged document.
    """
    documents = Documents(index, plan.lengths, bos_id=bos_id)
    spans = {lane: plan.span(lane) for lane in range(plan.num_lanes)}
    num_segments = {lane: -(-(stop - start) // plan.seg_len) for lane, (start, stop) in spans.items()}
    lanes = [
        chain(islice(read_lane(documents, plan, lane=lane), num_segments.get(lane, 0)), repeat(IDLE))
        for lane in lane_ids
    ]
    positions = [spans.get(lane, (0, 0))[0] for lane in lane_ids]
    for _ in range(max(num_segments.values())):
        segments = [next(lane) for lane in lanes]
        numbers = np.zeros((len(segments), plan.seg_len), dtype=np.int64)  # the document of every target
        for row, segment in enumerate(segments):
            stop = positions[row] + segment.length
            targets = plan.document_at(np.arange(positions[row] + int(blocks), stop))
            numbers[row, : len(targets)] = targets
            positions[row] = stop
        yield [
            (
                collate(group, seg_len=plan.seg_len, with_recall=documents.has_recall, blocks=blocks),
                torch.from_numpy(numbers[first : first + micro_lanes]),
            )
            for first in range(0, len(segments), micro_lanes)
            for group in [segments[first : first + micro_lanes]]
        ]


def check_tokenizer(index: Index, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the shards were not made with this tokenizer."""
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{index.split_dir}: its shards were made with tokenizer {index.tokenizer_fingerprint[:12]}, but the one "
            f"beside them is {tokenizer.fingerprint[:12]}: rebuild the shards, or restore their tokenizer"
        )
