"""Readers: the batches of one rank in each update of training, or each step of an evaluation.

    index, plan -> runs of segments (spans.py) -> blocks of all lanes (chunks.py) -> Update -> prefetch thread -> loop

An Update has the cursors after it. Only cursors of consumed updates are saved, so after a resume the reader simply
reads again what the thread had read ahead; nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from dist_mem.config import Config, DataConfig
from dist_mem.data.batch import Batch, Update
from dist_mem.data.chunks import COUNTS, Block, batch_views, copy_batch, fill_block, new_block
from dist_mem.data.directory import open_index, open_tokenizer
from dist_mem.data.documents import Documents
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
from dist_mem.data.segments import IDLE, NOTHING, Segment, as_block, collate, collate_groups, finite_lane, moved_left
from dist_mem.data.shard import Index, ShardError
from dist_mem.data.spans import DocumentLane, StreamLane, open_lane
from dist_mem.data.tokenizers.base import Tokenizer

BLOCK_UPDATES = 32  # largest number of updates in a block
BLOCK_TOKENS = 2**22  # largest number of tokens in a block; 8 bytes each


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
    ) -> None:
        """`cursors` (lanes, 3) int64: of the last consumed update, in the order of `lane_ids`; None: the beginning.

        Raises ValueError for cursors of another plan. `next` raises ShardError for a damaged document.
        """
        if config.prefetch < 1:
            raise ValueError(f"data.prefetch = {config.prefetch}: give at least 1")
        self.plan = plan
        self._lane_ids = list(lane_ids)
        self._micro_lanes = micro_lanes
        self._segments_per_update = segments_per_update
        self._blocks = config.blocks
        self._documents = Documents(index, plan.lengths, bos_id=bos_id, on_corrupt=config.on_corrupt)
        self._cursors = self._checked(cursors)
        self._updates = Prefetcher(self._read(), depth=config.prefetch)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return next(self._updates)

    def close(self) -> None:
        """End the thread and its pending fetches; may be called more than once."""
        self._documents.index.source.close()
        self._updates.close()

    def _checked(self, saved: Tensor | None) -> list[Cursor]:
        if saved is None:
            return [START] * len(self._lane_ids)
        if tuple(saved.shape) != (len(self._lane_ids), 3):
            raise ValueError(
                f"cursors of shape {tuple(saved.shape)} for {len(self._lane_ids)} lanes: the checkpoint was made with "
                "another train.lanes, train.micro_lanes or number of ranks"
            )
        cursors = [Cursor(*row) for row in saved.tolist()]
        for lane, cursor in zip(self._lane_ids, cursors, strict=True):
            if lane < self.plan.num_lanes:
                self.plan.check_cursor(lane, cursor)
        return cursors

    def _open_lanes(self, cursors: Sequence[Cursor]) -> list[DocumentLane | StreamLane]:
        return [
            open_lane(self._documents, self.plan, lane=lane, cursor=cursor)
            for lane, cursor in zip(self._lane_ids, cursors, strict=True)
            if lane < self.plan.num_lanes
        ]

    def _read(self) -> Iterator[Update]:
        num_steps, num_lanes, seg_len = self._segments_per_update, len(self._lane_ids), self.plan.seg_len
        num_updates = min(BLOCK_UPDATES, max(1, BLOCK_TOKENS // (num_steps * num_lanes * seg_len)))
        block = new_block(num_updates * num_steps, num_lanes, seg_len, with_recall=self._documents.has_recall)
        views = batch_views(block, micro_lanes=self._micro_lanes)
        num_views = num_steps * num_lanes // self._micro_lanes  # per update
        for num_filled in self._fill(block):
            counts = block.counts[:num_filled].reshape(-1, num_steps * num_lanes, len(COUNTS)).sum(axis=1)
            for number, row in enumerate(counts.tolist()):
                last = (number + 1) * num_steps - 1
                yield Update(
                    [copy_batch(view) for view in views[number * num_views : (number + 1) * num_views]],
                    torch.from_numpy(block.cursors[last].copy()),
                    epoch=self._mean_epoch(block.epochs[last]),
                    **dict(zip(COUNTS, row, strict=True)),
                )

    def _fill(self, block: Block) -> Iterator[int]:
        """Fill the block again and again; yield the number of its steps that are filled, always whole updates."""
        cursors, num_steps = self._cursors, len(block.tokens)
        lanes = self._open_lanes(cursors)
        while True:
            try:
                fill_block(block, lanes, num_steps=num_steps, own_inputs=self._blocks)
            except (ShardError, OSError):
                if num_steps == self._segments_per_update:
                    raise
                # The error is somewhere in these steps: read them update by update, to return those before it.
                num_steps, lanes = self._segments_per_update, self._open_lanes(cursors)
                continue
            cursors = [Cursor(*row) for row in block.cursors[num_steps - 1].tolist()]
            yield num_steps

    def _mean_epoch(self, epochs: np.ndarray) -> float:
        num_busy = sum(lane < self.plan.num_lanes for lane in self._lane_ids)  # the first ones
        return sum(epochs[:num_busy].tolist()) / num_busy if num_busy else 0.0


def training_reader(config: Config, *, world_size: int, rank: int, cursors: Tensor | None = None) -> LaneReader:
    """Open the training split and read this rank's lanes, from the beginning or from saved cursors.

    Raises ValueError if index or tokenizer are missing or do not match, or if there are too few documents.
    """
    tokenizer, index = open_tokenizer(config.data), open_index(config.data, config.data.train_split)
    check_tokenizer(index, tokenizer)
    train = config.train
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], config.data.max_document_len)
    plan = make_plan(
        lengths,
        num_lanes=train.lanes,
        seg_len=train.seg_len,
        seed=config.data.seed,
        layout=config.data.layout,
        cut=config.data.cut,
    )
    return LaneReader(
        config.data,
        index,
        plan,
        lane_ids=lanes_of_rank(train.lanes, world_size=world_size, rank=rank, micro_lanes=train.micro_lanes),
        micro_lanes=train.micro_lanes,
        segments_per_update=train.segments_per_update,
        bos_id=tokenizer.bos_id,
        cursors=cursors,
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
) -> Iterator[list[Batch]]:
    """Yield the micro-batches of one rank in each step, with a row for each lane that still reads (`forward_sizes`).

    `plan_lanes` is the `evaluation_plan` of all lanes. Row r of micro-batch m is the same lane in every step; the last
    lanes end first. Raises ShardError for a damaged document, because a score needs all documents.
    """
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    documents = Documents(index, lengths, bos_id=bos_id)
    rank_lanes = plan_lanes[rank::world_size]
    lanes = [finite_lane(documents, numbers, seg_len=seg_len, blocks=blocks, cut=cut) for numbers in rank_lanes]
    for num_busy in busy_lanes(plan_lanes, lengths, seg_len=seg_len):
        sizes = forward_sizes(num_busy, world_size=world_size, rank=rank, micro_lanes=micro_lanes)
        rows = [lanes[number * micro_lanes :][:size] for number, size in enumerate(sizes)]
        yield [
            collate([next(lane) for lane in batch_lanes] or [IDLE], seg_len=seg_len, with_recall=documents.has_recall)
            for batch_lanes in rows
        ]


def stream_batches(
    index: Index,
    plan: StreamPlan,
    *,
    lane_ids: Sequence[int],
    micro_lanes: int,
    bos_id: int,
    blocks: bool = False,
) -> Iterator[list[tuple[Batch, Tensor]]]:
    """Yield the micro-batches of one rank in each step of one pass over a stream; lanes that have ended are idle.

    With each Batch comes the document of every target, (B, T) int64: a segment may contain the end of one document and
    the beginning of the next. All ranks yield the same number of steps. Raises ShardError for a damaged document.
    """
    documents = Documents(index, plan.lengths, bos_id=bos_id)
    lanes = [_stream_segments(documents, plan, lane, blocks=blocks) for lane in lane_ids]
    for _ in range(max(_num_segments(plan, lane) for lane in range(plan.num_lanes))):
        step = [next(lane) for lane in lanes]
        segments = [segment for segment, _ in step]
        batches = collate_groups(
            segments, micro_lanes=micro_lanes, seg_len=plan.seg_len, with_recall=documents.has_recall
        )
        table = np.zeros((len(step), plan.seg_len), dtype=np.int64)
        for row, (_, numbers) in enumerate(step):
            table[row, : len(numbers)] = numbers
        yield list(zip(batches, torch.from_numpy(table).split(micro_lanes), strict=True))


def _stream_segments(
    documents: Documents, plan: StreamPlan, lane: int, *, blocks: bool
) -> Iterator[tuple[Segment, np.ndarray]]:
    """Yield the segments of a lane's part of the stream with the document of every target; then idle ones forever."""
    if lane < plan.num_lanes:
        reader = StreamLane(documents, plan, lane=lane, cursor=START)
        position = plan.span(lane)[0]
        for _ in range(_num_segments(plan, lane)):
            run = reader.read(1)
            inputs, targets = run.tokens[:-1], run.tokens[1:]
            numbers = plan.document_at(np.arange(position, position + len(targets)))
            position += len(targets)
            segment = Segment(inputs, targets, run.scored, run.recall, int(numbers[0]), run.is_new_document)
            yield (as_block(segment), moved_left(numbers, 0)) if blocks else (segment, numbers)
    yield from repeat((IDLE, NOTHING))


def _num_segments(plan: StreamPlan, lane: int) -> int:
    start, stop = plan.span(lane)
    return -(-(stop - start) // plan.seg_len)


def check_tokenizer(index: Index, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the shards were not made with this tokenizer."""
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{index.split_dir}: its shards were made with tokenizer {index.tokenizer_fingerprint[:12]}, but the one "
            f"beside them is {tokenizer.fingerprint[:12]}: rebuild the shards, or restore their tokenizer"
        )
