"""Score a split as one stream of tokens, as the papers do with WikiText, enwik8 and text8.

The documents are concatenated and cut into `eval.lanes` contiguous lanes; each lane begins with an empty memory and
carries it across document boundaries. The published code never scores the first token of a lane and drops the remainder
of the cut (17 of the 245,569 words of WikiText-103's test split in 16 lanes); here every token is scored once, the
first of a lane given the last token of the previous lane. So the metrics depend on the number of lanes, but not on the
number of ranks. Shape letters: B lanes of a micro-batch, T segment.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dist_mem.data.lanes import stream_batches
from dist_mem.data.plan import StreamPlan, cut_lengths, lanes_of_rank
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation import scoring
from dist_mem.evaluation.extent import Extent, LeftOut, Share, agreed_share
from dist_mem.evaluation.report import Report
from dist_mem.evaluation.scoring import Forward, InitState, Step, Sums
from dist_mem.runtime.distributed import World


def evaluate_stream(
    forward: Forward,
    init_state: InitState,
    *,
    index: Index,
    tokenizer: Tokenizer,
    num_lanes: int,
    micro_lanes: int,
    seg_len: int,
    mem_len: int,
    world: World,
    max_document_len: int | None = None,
    blocks: bool = False,
    without_memory: bool = False,
) -> Report:
    """Score a split as a stream; arguments, result and errors are those of `scoring.evaluate_documents`.

    Raises:
        ValueError: also if the split has fewer tokens than lanes.
    """
    scoring.check_scorable(index, tokenizer)
    lengths = stream_lengths(index, num_lanes=num_lanes, max_document_len=max_document_len)
    plan = StreamPlan(lengths, num_lanes=num_lanes, seg_len=seg_len)
    lane_ids = lanes_of_rank(num_lanes, world_size=world.size, rank=world.rank, micro_lanes=micro_lanes)
    extent = Extent(lengths, block_starts(plan)) if blocks else Extent(lengths)
    share = share_of_lanes(index, plan, lane_ids, extent, tokenizer, world)
    tables = scoring.empty_tables(len(lengths), share.max_distance, world.device)
    steps: Iterable[Step] = stream_batches(
        index, plan, lane_ids=lane_ids, micro_lanes=micro_lanes, bos_id=tokenizer.bos_id, blocks=blocks
    )
    num_own = sum(stop - start for start, stop in (plan.span(lane) for lane in lane_ids if lane < num_lanes))
    with scoring.scoring_progress(index, lengths, num_own, world) as progress:
        scoring.score_batches(
            forward,
            init_state,
            steps,
            tables,
            device=world.device,
            progress=progress,
            without_memory=without_memory,
        )
    sums = Sums(*scoring.summed([*tables, share.words, share.bytes], world))
    scoring.check_complete(index, extent, sums)
    return scoring.make_report(index, extent, sums, max_document_len=max_document_len, seg_len=seg_len, mem_len=mem_len)


def stream_lengths(index: Index, *, num_lanes: int, max_document_len: int | None) -> np.ndarray:
    """Return the tokens read of each document, (documents,). Raise ValueError if their sum is less than the lanes."""
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    if int(lengths.sum()) < num_lanes:
        raise ValueError(f"eval.lanes = {num_lanes}, but {index.split_dir} has {lengths.sum()} tokens: set fewer lanes")
    return lengths


def block_starts(plan: StreamPlan) -> LeftOut:
    """Return a function from a document to the offsets of its tokens that begin a segment."""
    positions = np.concatenate([np.arange(*plan.span(lane), plan.seg_len) for lane in range(plan.num_lanes)])
    bounds = np.searchsorted(positions, plan.starts)
    return lambda document: positions[bounds[document] : bounds[document + 1]] - plan.starts[document]


def share_of_lanes(
    index: Index, plan: StreamPlan, lane_ids: range, extent: Extent, tokenizer: Tokenizer, world: World
) -> Share:
    """Check all documents that this rank reads, and measure those that begin in its lanes, with `agreed_share`."""
    spans = [plan.span(lane) for lane in lane_ids if lane < plan.num_lanes]
    if not spans:
        return agreed_share(index, [], extent, tokenizer, world)
    begin, end = spans[0][0], spans[-1][1]  # a rank's lanes are contiguous
    starts, stops = plan.starts[:-1], plan.starts[1:]
    read = np.flatnonzero((starts < end) & (stops > begin) & (plan.lengths > 0)).tolist()
    share = agreed_share(index, read, extent, tokenizer, world)
    own = torch.from_numpy((starts >= begin) & (starts < end)).double()
    return share._replace(words=share.words * own, bytes=share.bytes * own)
