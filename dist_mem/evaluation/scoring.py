"""Score every token of whole documents once: the heart of evaluation, inside training and as a command.

Documents are dealt to lanes, longest first; each starts with an empty memory. Every rank makes the same number of
forwards (ZeRO needs it); what each rank found is summed per document in float64, so that the result depends neither on
the number of ranks nor on that of lanes. Shape letters: B lanes of a micro-batch, T segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.lanes import check_tokenizer, evaluation_batches
from dist_mem.data.shard import Index, ShardError, check_document, read_mask, read_recall, read_tokens
from dist_mem.data.stream import cut_lengths, evaluation_plan, evaluation_steps, lanes_of_rank
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.distributed import World, agree_all_well, gather_objects, sum_tensor
from dist_mem.evaluation.report import DocumentScore, RecallScore, Report, total_words
from dist_mem.model import reset_lanes

Forward = Callable[..., Any]  # (tokens, targets, valid_len, state=state) -> LMOutput, without dropout
InitState = Callable[[Tensor], Any]  # document numbers (B,) int64 -> empty memories on the device
LeftOut = Callable[[int], np.ndarray]  # document -> offsets of its tokens that are read and are no target


class EvaluationError(RuntimeError):
    """The scores cannot be right; raised on every rank."""


def nothing_left_out(document: int) -> np.ndarray:
    return np.empty(0, dtype=np.int64)


class Extent(NamedTuple):
    """What of a split is scored, if the mask of the document has it too."""

    lengths: np.ndarray  # (documents,) tokens read of each
    left_out: LeftOut = nothing_left_out  # the first tokens of blocks


class Share(NamedTuple):
    """What one rank knows of its own documents before scoring."""

    words: Tensor  # (documents,) float64, of the scored tokens; nan where not known, 0 for documents of other ranks
    bytes: Tensor  # (documents,) float64, likewise
    max_distance: int  # largest recall distance, 0 where none is recorded


class Tables(NamedTuple):
    """What a rank adds up while it scores, float64; the documents of other ranks stay 0."""

    nll: Tensor  # (documents,) nats
    num_scored: Tensor  # (documents,) tokens
    hits: Tensor  # (documents,) scored tokens that were the most probable; nan where that is not known
    recall_nll: Tensor  # (max distance + 1,) nats by distance; row 0 holds what is no recall token
    recall_count: Tensor  # (max distance + 1,)


class Sums(NamedTuple):
    """The tables and measures of all ranks together, on the CPU."""

    nll: Tensor
    num_scored: Tensor
    hits: Tensor
    recall_nll: Tensor
    recall_count: Tensor
    words: Tensor
    bytes: Tensor


def evaluate_documents(
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
    """Score a split; every rank calls it and gets the same report.

    Args:
        forward: the model or engine in evaluation mode.
        num_lanes: of the whole job.  micro_lanes: lanes of one forward of one rank.
        mem_len: M of the short-term memory, for the recall bands; 0 for none.
        max_document_len: tokens; score only the beginning of each document.
        blocks: as `data.blocks`: the first token of each segment is no target.

    Raises:
        ValueError: the shards were made with another tokenizer.
        ShardError: on every rank: a document is damaged, or cannot be read.
        EvaluationError: on every rank: a loss is not finite, not every token was scored once, or none was.
    """
    check_scorable(index, tokenizer)
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    plan = evaluation_plan(lengths, num_lanes=num_lanes, seg_len=seg_len)
    lane_ids = lanes_of_rank(num_lanes, world_size=world.size, rank=world.rank, micro_lanes=micro_lanes)
    mine = [document for lane in lane_ids if lane < num_lanes for document in plan[lane]]
    extent = Extent(lengths, lambda document: np.arange(0, lengths[document], seg_len)) if blocks else Extent(lengths)
    share = agreed_share(index, mine, extent, tokenizer, world)
    batches = evaluation_batches(
        index,
        plan,
        lane_ids=lane_ids,
        micro_lanes=micro_lanes,
        seg_len=seg_len,
        num_steps=evaluation_steps(plan, lengths, seg_len=seg_len),
        bos_id=tokenizer.bos_id,
        max_document_len=max_document_len,
        blocks=blocks,
    )
    states = [init_state(group) for group in torch.tensor(lane_ids).split(micro_lanes)]
    tables = empty_tables(len(lengths), share.max_distance, world.device)
    with torch.no_grad():
        _score(forward, states, batches, tables, init_state=init_state, device=world.device)
    sums = Sums(*summed([*tables, share.words, share.bytes], world))
    check_complete(index, extent, sums)
    return make_report(index, extent, sums, max_document_len=max_document_len, seg_len=seg_len, mem_len=mem_len)


def make_report(index: Index, extent: Extent, sums: Sums, **settings: Any) -> Report:
    documents = _document_scores(index, sums)
    is_whole = all(_is_whole(index, document, extent) for document in range(len(extent.lengths)))
    return Report(
        split=index.split,
        data_fingerprint=index.fingerprint,
        tokenizer_fingerprint=index.tokenizer_fingerprint,
        num_words=index.num_words if is_whole else total_words(documents),
        documents=documents,
        recall=_recall_scores(sums),
        **settings,
    )


def check_scorable(index: Index, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless the split was made with this tokenizer and holds a token: no score is no perplexity."""
    check_tokenizer(index, tokenizer)
    if not index.num_tokens:
        raise ValueError(f"{index.split_dir}: no document holds a token to score: set eval.split to a split with text")


def _document_scores(index: Index, sums: Sums) -> list[DocumentScore]:
    counts = [_known(part) for part in (sums.num_scored, sums.words, sums.bytes, sums.hits)]
    rows = zip(index.documents, sums.nll.tolist(), *counts, strict=True)
    return [DocumentScore(entry.id, entry.title, *row) for entry, *row in rows]


def _known(counts: Tensor) -> list[int | None]:
    """Whole numbers; None for nan."""
    return [None if math.isnan(count) else int(count) for count in counts.tolist()]


def _recall_scores(sums: Sums) -> list[RecallScore]:
    distances = [distance for distance in sums.recall_count.nonzero().flatten().tolist() if distance > 0]
    return [
        RecallScore(distance, float(sums.recall_nll[distance]), int(sums.recall_count[distance]))
        for distance in distances
    ]


def _score(
    forward: Forward, states: list[Any], batches: Any, tables: Tables, *, init_state: InitState, device: torch.device
) -> None:
    """Add the scores of all micro-batches to `tables`, in place; the memory of each lane group is carried along."""
    for groups in batches:
        for number, host_batch in enumerate(groups):
            batch = host_batch.to(device)
            state = states[number]
            if host_batch.is_new_document.any():  # asked on the CPU, so that nothing waits for the device
                state = reset_lanes(state, init_state(batch.document), batch.is_new_document)
            output = forward(batch.tokens, batch.targets, batch.valid_len, state=state)
            states[number] = output.state
            add_scores(tables, batch, output.nll.double(), output.hits)


def add_scores(tables: Tables, batch: Batch, nll: Tensor, hits: Tensor | None = None) -> None:
    scored = (batch.targets != IGNORE).double()
    rows = batch.document.clamp(min=0)  # an idle lane adds zeros to document 0
    tables.nll.index_add_(0, rows, nll.sum(dim=1))
    tables.num_scored.index_add_(0, rows, scored.sum(dim=1))
    counted = torch.full_like(nll, math.nan) if hits is None else hits * scored
    tables.hits.index_add_(0, rows, counted.sum(dim=1))
    if batch.recall is not None:
        distances = batch.recall.flatten()
        tables.recall_nll.index_add_(0, distances, nll.flatten())
        tables.recall_count.index_add_(0, distances, scored.flatten())


def empty_tables(num_documents: int, max_distance: int, device: torch.device) -> Tables:
    sizes = (*[num_documents] * 3, *[max_distance + 1] * 2)
    return Tables(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def summed(parts: Sequence[Tensor], world: World) -> list[Tensor]:
    """Each part summed over all ranks, on the CPU, in one all-reduce."""
    joined = torch.cat([part.cpu() for part in parts])
    if world.size > 1:
        joined = sum_tensor(joined, world.device)
    return list(joined.split([len(part) for part in parts]))


def agreed_share(index: Index, mine: Sequence[int], extent: Extent, tokenizer: Tokenizer, world: World) -> Share:
    """Check and measure this rank's documents; all ranks stop here if any finds a damaged one, not amid forwards."""
    share = _no_share(len(extent.lengths))
    error: ShardError | OSError | None = None
    try:
        share = _measure(index, mine, extent, tokenizer)
    except (ShardError, OSError) as caught:
        error = caught
    if world.size == 1:
        if error is not None:
            raise error
        return share
    try:
        agree_all_well(error, f"opening {index.split_dir}")
    except RuntimeError as told:
        raise ShardError(str(told)) from told
    return share._replace(max_distance=max(gather_objects(share.max_distance)))


def _no_share(num_documents: int) -> Share:
    words, num_bytes = torch.zeros(2, num_documents, dtype=torch.float64)
    return Share(words, num_bytes, max_distance=0)


def _measure(index: Index, mine: Sequence[int], extent: Extent, tokenizer: Tokenizer) -> Share:
    words, num_bytes, max_distance = _no_share(len(extent.lengths))
    for document in mine:
        check_document(index, document)
        words[document], num_bytes[document] = _text_size(index, document, extent, tokenizer)
        recall = read_recall(index, document, 0, int(extent.lengths[document]))
        if recall is not None:
            max_distance = max(max_distance, int(recall.max(initial=0)))
    return Share(words, num_bytes, max_distance)


def _is_whole(index: Index, document: int, extent: Extent) -> bool:
    """Whether every token of the document is scored."""
    entry = index.documents[document]
    is_cut = int(extent.lengths[document]) != entry.num_tokens
    return entry.mask_offset is None and not is_cut and not len(extent.left_out(document))


def _text_size(index: Index, document: int, extent: Extent, tokenizer: Tokenizer) -> tuple[float, int]:
    """Words and bytes of the scored tokens. The index knows them for whole documents, else the text is decoded.

    Words are nan where blocks leave out tokens: these are parts of words as often as not.
    """
    entry, length = index.documents[document], int(extent.lengths[document])
    if _is_whole(index, document, extent):
        return entry.words, entry.bytes
    tokens = read_tokens(index, document, 0, length)
    mask = read_mask(index, document, 0, length)
    scored = np.ones(length, dtype=bool) if mask is None else np.array(mask, dtype=bool)
    left_out = extent.left_out(document)
    loses = bool(scored[left_out].any())
    scored[left_out] = False
    num_bytes = int(tokenizer.piece_bytes[tokens[scored].astype(np.int64)].sum())
    if loses:
        return math.nan, num_bytes
    edges = np.flatnonzero(np.diff(scored)) + 1  # where runs of scored tokens begin and end
    runs = [
        run for run, is_scored in zip(np.split(tokens, edges), np.split(scored, edges), strict=True) if is_scored[0]
    ]
    return sum(len(tokenizer.decode(run).split()) for run in runs), num_bytes


def check_complete(index: Index, extent: Extent, sums: Sums) -> None:
    """Compare with what the index promises, not with what the plan dealt."""
    for document, entry in enumerate(index.documents):
        where = f"{index.split_dir}: document {entry.id}"
        length, left_out = int(extent.lengths[document]), extent.left_out(document)
        mask = read_mask(index, document, 0, length)
        expected = length - len(left_out)
        if mask is not None:
            expected = int(np.count_nonzero(mask) - np.count_nonzero(mask[left_out]))
        if int(sums.num_scored[document]) != expected:
            raise EvaluationError(f"{where}: {int(sums.num_scored[document])} tokens scored, {expected} expected")
        if not torch.isfinite(sums.nll[document]):
            raise EvaluationError(f"{where}: its loss is {float(sums.nll[document])}")
    if not sums.num_scored.any():
        raise EvaluationError(
            f"{index.split_dir}: no token is scored, so there is no figure: set eval.max_document_len higher, or to "
            "null, or build the split with tokens that count"
        )
