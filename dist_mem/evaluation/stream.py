"""Score a split as one stream of tokens, as the papers do with WikiText, enwik8 and text8.

The documents stand end to end, cut into `eval.lanes` contiguous lanes; each lane begins with an empty memory and
carries it over all borders. The published code never scores the first token of a lane and drops what is left after
cutting (17 of the 245,569 words of WikiText-103's test split in 16 lanes); here every token is scored once, the first
of a lane after the last token of the lane before. So the figures depend on the number of lanes, but not on that of
ranks. Shape letters: B lanes of a micro-batch, T segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.batch import Batch
from dist_mem.data.lanes import stream_batches
from dist_mem.data.shard import Index
from dist_mem.data.stream import StreamPlan, cut_lengths, lanes_of_rank
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.distributed import World
from dist_mem.evaluation import scoring
from dist_mem.evaluation.report import Report
from dist_mem.evaluation.scoring import Extent, Forward, InitState, LeftOut, Share, Sums, Tables
from dist_mem.model import reset_lanes


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
) -> Report:
    """Score a split as a stream; arguments, errors and what every rank gets: `scoring.evaluate_documents`.

    Raises:
        ValueError: besides, the split has fewer tokens than lanes.
    """
    scoring.check_scorable(index, tokenizer)
    lengths = stream_lengths(index, num_lanes=num_lanes, max_document_len=max_document_len)
    plan = StreamPlan(lengths, num_lanes=num_lanes, seg_len=seg_len)
    lane_ids = lanes_of_rank(num_lanes, world_size=world.size, rank=world.rank, micro_lanes=micro_lanes)
    extent = Extent(lengths, block_starts(plan)) if blocks else Extent(lengths)
    share = agreed_share(index, plan, lane_ids, extent, tokenizer, world)
    tables = scoring.empty_tables(len(lengths), share.max_distance, world.device)
    states = [init_state(group) for group in torch.tensor(lane_ids).split(micro_lanes)]
    batches = stream_batches(
        index, plan, lane_ids=lane_ids, micro_lanes=micro_lanes, bos_id=tokenizer.bos_id, blocks=blocks
    )
    with torch.no_grad():
        _score(forward, states, batches, tables, init_state=init_state, device=world.device)
    sums = Sums(*scoring.summed([*tables, share.words, share.bytes], world))
    scoring.check_complete(index, extent, sums)
    return scoring.make_report(index, extent, sums, max_document_len=max_document_len, seg_len=seg_len, mem_len=mem_len)


def stream_lengths(index: Index, *, num_lanes: int, max_document_len: int | None) -> np.ndarray:
    """Tokens read of each document, (documents,). Raises ValueError if they are fewer than lanes."""
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    if int(lengths.sum()) < num_lanes:
        raise ValueError(f"eval.lanes = {num_lanes}, but {index.split_dir} has {lengths.sum()} tokens: set fewer lanes")
    return lengths


def block_starts(plan: StreamPlan) -> LeftOut:
    """Of any document, the offsets of the tokens with which a segment begins."""
    positions = np.concatenate([np.arange(*plan.span(lane), plan.seg_len) for lane in range(plan.num_lanes)])
    bounds = np.searchsorted(positions, plan.starts)
    return lambda document: positions[bounds[document] : bounds[document + 1]] - plan.starts[document]


def agreed_share(
    index: Index, plan: StreamPlan, lane_ids: range, extent: Extent, tokenizer: Tokenizer, world: World
) -> Share:
    """As `scoring`'s: all documents that this rank reads are checked, and those measured that begin in its lanes."""
    spans = [plan.span(lane) for lane in lane_ids if lane < plan.num_lanes]
    if not spans:
        return scoring.agreed_share(index, [], extent, tokenizer, world)
    begin, end = spans[0][0], spans[-1][1]  # a rank's lanes are successive
    starts, stops = plan.starts[:-1], plan.starts[1:]
    read = np.flatnonzero((starts < end) & (stops > begin) & (plan.lengths > 0)).tolist()
    share = scoring.agreed_share(index, read, extent, tokenizer, world)
    own = torch.from_numpy((starts >= begin) & (starts < end)).double()
    return share._replace(words=share.words * own, bytes=share.bytes * own)


def _score(
    forward: Forward, states: list[Any], batches: Any, tables: Tables, *, init_state: InitState, device: torch.device
) -> None:
    """Add the scores of all micro-batches to `tables`, in place; the memory of each lane group is carried along."""
    for groups in batches:
        for number, (host_batch, documents) in enumerate(groups):
            batch, state = host_batch.to(device), states[number]
            if host_batch.is_new_document.any():  # the first of a lane
                state = reset_lanes(state, init_state(batch.document), batch.is_new_document)
            output = forward(batch.tokens, batch.targets, batch.valid_len, state=state)
            states[number] = output.state
            hits = None if output.hits is None else output.hits.view(-1, 1)
            by_document = by_token(batch, documents.to(device))
            scoring.add_scores(tables, by_document, output.nll.double().view(-1, 1), hits)


def by_token(batch: Batch, documents: Tensor) -> Batch:
    """The batch with a row for each token, (B * T, 1), because each may be of another document."""
    return Batch(
        batch.tokens.view(-1, 1),
        batch.targets.view(-1, 1),
        valid_len=batch.valid_len,
        is_new_document=batch.is_new_document,
        document=documents.reshape(-1),
        recall=None if batch.recall is None else batch.recall.view(-1, 1),
    )
