"""Documents onto lanes: what one rank feeds in each update of training, or each step of an evaluation.

    index, plan -> a generator of segments per lane (segments.py) -> Batch -> Update -> prefetch thread -> training loop

An Update carries the cursors after it. Only those of consumed updates are saved, so what the thread has read ahead is
simply read again after a resume; nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dist_mem.config import Config, DataConfig
from dist_mem.data.batch import IGNORE, Batch, Update
from dist_mem.data.documents import Documents
from dist_mem.data.prefetch import Prefetcher
from dist_mem.data.segments import Lane, collate_groups, document_lane, finite_lane, idle_lane, stream_lane
from dist_mem.data.shard import Index, read_index
from dist_mem.data.stream import START, Cursor, Plan, StreamPlan, cut_lengths, lanes_of_rank, make_plan
from dist_mem.data.tokenizer import Tokenizer, load_tokenizer


class LaneReader:
    """The endless updates of one rank, read ahead in a thread; iterate, then `close`."""

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

        Raises ValueError for cursors that are not of this plan. `next` raises ShardError for a damaged document.
        """
        if config.prefetch < 1:
            raise ValueError(f"data.prefetch = {config.prefetch}: give at least 1")
        self.plan = plan
        self._lane_ids = list(lane_ids)
        self._micro_lanes = micro_lanes
        self._segments_per_update = segments_per_update
        self._documents = Documents(index, plan.lengths, bos_id=bos_id, on_corrupt=config.on_corrupt)
        self._cursors = self._checked(cursors)
        self._updates = Prefetcher(self._read(), depth=config.prefetch)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return next(self._updates)

    def close(self) -> None:
        """End the thread; may be called more than once."""
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

    def _open_lane(self, lane: int, cursor: Cursor) -> Lane:
        if lane >= self.plan.num_lanes:
            return idle_lane()
        if isinstance(self.plan, StreamPlan):
            return stream_lane(self._documents, self.plan, lane=lane, cursor=cursor)
        return document_lane(self._documents, self.plan, lane=lane, cursor=cursor)

    def _read(self) -> Iterator[Update]:
        lanes = [self._open_lane(*start) for start in zip(self._lane_ids, self._cursors, strict=True)]
        while True:
            batches: list[Batch] = []
            started = skipped = 0
            for _ in range(self._segments_per_update):
                segments, cursors = zip(*map(next, lanes), strict=True)
                batches += collate_groups(
                    segments,
                    micro_lanes=self._micro_lanes,
                    seg_len=self.plan.seg_len,
                    with_recall=self._documents.has_recall,
                )
                started += sum(segment.documents_started for segment in segments)
                skipped += sum(segment.documents_skipped for segment in segments)
            yield Update(
                batches,
                torch.tensor(cursors),
                num_scored=sum(int((batch.targets != IGNORE).sum()) for batch in batches),
                epoch=self._mean_epoch(cursors),
                documents_started=started,
                documents_skipped=skipped,
            )

    def _mean_epoch(self, cursors: Sequence[Cursor]) -> float:
        done = [
            self.plan.epochs_done(lane, cursor)
            for lane, cursor in zip(self._lane_ids, cursors, strict=True)
            if lane < self.plan.num_lanes
        ]
        return sum(done) / len(done) if done else 0.0


def training_reader(config: Config, *, world_size: int, rank: int, cursors: Tensor | None = None) -> LaneReader:
    """Open the training split and read this rank's lanes, from the beginning or from saved cursors.

    Raises ValueError if index or tokenizer are missing or do not belong together, or if there are too few documents.
    """
    tokenizer = load_tokenizer(config.data.path)
    index = read_index(Path(config.data.path) / config.data.train_split)
    check_tokenizer(index, tokenizer)
    train = config.train
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], config.data.max_document_len)
    plan = make_plan(
        lengths, num_lanes=train.lanes, seg_len=train.seg_len, seed=config.data.seed, layout=config.data.layout
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
    lane_ids: Sequence[int],
    micro_lanes: int,
    seg_len: int,
    num_steps: int,
    bos_id: int,
    max_document_len: int | None = None,
) -> Iterator[list[Batch]]:
    """The micro-batches of one rank in each of `num_steps` steps (`evaluation_steps`); lanes that ran out are idle.

    `plan_lanes` is the `evaluation_plan` of all lanes. Raises ShardError for a damaged document: no score without it.
    """
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    documents = Documents(index, lengths, bos_id=bos_id)
    lanes = [
        finite_lane(documents, plan_lanes[lane] if lane < len(plan_lanes) else [], seg_len=seg_len) for lane in lane_ids
    ]
    for _ in range(num_steps):
        segments = [next(lane) for lane in lanes]
        yield collate_groups(segments, micro_lanes=micro_lanes, seg_len=seg_len, with_recall=documents.has_recall)


def check_tokenizer(index: Index, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the shards were not made with this tokenizer."""
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{index.split_dir}: its shards were made with tokenizer {index.tokenizer_fingerprint[:12]}, but the one "
            f"beside them is {tokenizer.fingerprint[:12]}: rebuild the shards, or restore their tokenizer"
        )
