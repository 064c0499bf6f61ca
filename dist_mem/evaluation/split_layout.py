"""Which tokens of a split a rank reads, in which lanes: the two layouts of `eval.layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dist_mem.data.batch import Batch
from dist_mem.data.lanes import evaluation_batches, stream_batches
from dist_mem.data.plan import StreamPlan, evaluation_plan, lanes_of_rank, segment_starts
from dist_mem.data.shard import Index
from dist_mem.evaluation.protocol import Protocol
from dist_mem.runtime.distributed import World

LeftOut = Callable[[int], np.ndarray]  # document -> offsets of its tokens that are read but not scored
NO_INPUTS = np.empty(0, dtype=np.int64)


def nothing_left_out(document: int) -> np.ndarray:
    return np.empty(0, dtype=np.int64)


class Extent(NamedTuple):
    """The part of a split that is scored, further restricted by the masks of its documents."""

    lengths: np.ndarray  # (documents,) tokens read of each document
    left_out: LeftOut = nothing_left_out  # the first tokens of blocks


Step = Sequence[tuple[Batch, Tensor]]  # micro-batches, each with the document of every row (B,) or target (B, T) int64


class RankPart(NamedTuple):
    """The part of a split that one rank reads."""

    extent: Extent  # of the whole split
    documents: list[int]  # that this rank reads, in whole or in part
    own: set[int]  # those of them whose size it measures; every document that is read is some rank's own
    num_tokens: int  # that this rank reads
    all_tokens: int  # that all ranks read together
    steps: Iterator[Step]


def part_of_documents(
    index: Index,
    lengths: np.ndarray,
    protocol: Protocol,
    *,
    num_lanes: int,
    micro_lanes: int,
    cut: str,
    bos_id: int,
    world: World,
    inputs: np.ndarray,
) -> RankPart:
    """Return what a rank reads of a split of which each document is read with an empty memory.

    Args:
        lengths: (documents,) tokens to read of each document.
        num_lanes: of the whole job.
        inputs: (num_inputs,) inputs of an open segment that every document continues (`score_split`); none: BOS.
    """
    first, prefix = (bos_id, inputs) if protocol.blocks or not len(inputs) else (int(inputs[0]), inputs[1:])
    num_read = np.where(lengths > 0, lengths + len(prefix), 0)
    plan = evaluation_plan(num_read, num_lanes=num_lanes, seg_len=protocol.seg_len)
    mine = [document for documents in plan[world.rank :: world.size] for document in documents]

    def starts(document: int) -> np.ndarray:
        places = segment_starts(num_read[document], seg_len=protocol.seg_len, cut=cut) - len(prefix)
        return places[places >= 0]

    extent = Extent(lengths, starts) if protocol.blocks else Extent(lengths)
    batches = evaluation_batches(
        index,
        plan,
        world_size=world.size,
        rank=world.rank,
        micro_lanes=micro_lanes,
        seg_len=protocol.seg_len,
        bos_id=first,
        max_document_len=protocol.max_document_len,
        blocks=protocol.blocks,
        cut=cut,
        prefix=prefix,
    )
    steps = ([(batch, batch.document) for batch in step] for step in batches)
    return RankPart(extent, mine, set(mine), int(num_read[mine].sum()), int(num_read.sum()), steps)


def part_of_stream(
    index: Index,
    lengths: np.ndarray,
    protocol: Protocol,
    *,
    num_lanes: int,
    micro_lanes: int,
    bos_id: int,
    world: World,
) -> RankPart:
    """Return what a rank reads of a split as one text in contiguous lanes; arguments as of `part_of_documents`."""
    plan = StreamPlan(lengths, num_lanes=num_lanes, seg_len=protocol.seg_len)
    lane_ids = lanes_of_rank(num_lanes, world_size=world.size, rank=world.rank, micro_lanes=micro_lanes)
    spans = [plan.span(lane) for lane in lane_ids if lane < num_lanes] or [(0, 0)]
    begin, end = spans[0][0], spans[-1][1]  # a rank's lanes are contiguous
    starts, stops = plan.starts[:-1], plan.starts[1:]
    read = np.flatnonzero((starts < end) & (stops > begin) & (plan.lengths > 0))
    extent = Extent(lengths)
    if protocol.blocks:
        positions = np.concatenate([np.arange(*plan.span(lane), plan.seg_len) for lane in range(num_lanes)])
        bounds = np.searchsorted(positions, plan.starts)
        extent = Extent(lengths, lambda document: positions[slice(*bounds[document : document + 2])] - starts[document])
    steps = stream_batches(
        index, plan, lane_ids=lane_ids, micro_lanes=micro_lanes, bos_id=bos_id, blocks=protocol.blocks
    )
    own = set(read[starts[read] >= begin].tolist())
    return RankPart(extent, read.tolist(), own, end - begin, int(lengths.sum()), steps)
