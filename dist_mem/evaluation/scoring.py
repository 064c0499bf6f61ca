"""Score every token of whole documents once, during training and as a command.

Documents are assigned to lanes, longest first; each starts with an empty memory. A forward has rows only for lanes that
still have text, and every rank runs the same number of forwards (ZeRO needs it). The scores of all ranks are summed per
document in float64, so that the result depends neither on the number of ranks nor on the number of lanes. Shape
letters: B lanes of a micro-batch, T segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.lanes import check_tokenizer, evaluation_batches
from dist_mem.data.plan import cut_lengths, evaluation_plan, segment_starts
from dist_mem.data.shard import Index, read_mask
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.extent import Extent, agreed_share, is_whole
from dist_mem.evaluation.report import DocumentScore, RecallScore, Report, total_words
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, empty_memories, reset_lanes
from dist_mem.runtime.distributed import World, sum_tensor
from dist_mem.tracking.progress import Progress

Forward = Callable[..., Any]  # (tokens, targets, valid_len, state=state) -> LMOutput, without dropout
InitState = Callable[[Tensor], Any]  # document numbers (B,) int64 -> empty memories on the device
Step = Sequence[tuple[Batch, Tensor]]  # micro-batches, each with the document of every row (B,) or target (B, T) int64


class EvaluationError(RuntimeError):
    """The scores are not valid; raised on every rank."""


class Tables(NamedTuple):
    """The sums of one rank, float64; the entries of other ranks' documents stay 0."""

    nll: Tensor  # (documents,) nats
    num_scored: Tensor  # (documents,) tokens
    hits: Tensor  # (documents,) scored tokens that were the most probable; nan where unknown
    recall_nll: Tensor  # (max distance + 1,) nats by distance; row 0 is for tokens that recall nothing
    recall_count: Tensor  # (max distance + 1,)


class Sums(NamedTuple):
    """The tables and document sizes, summed over all ranks, on the CPU."""

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
    cut: str = "start",
    without_memory: bool = False,
) -> Report:
    """Score a split; every rank calls it and gets the same report.

    Args:
        forward: the model or engine in evaluation mode.
        num_lanes: maximum for the whole job.  micro_lanes: maximum for one forward of one rank.
        mem_len: M of the short-term memory, for the recall bands; 0 for none.
        max_document_len: tokens; score only the beginning of each document.
        blocks, cut: as in `data`; with blocks, the first token of each segment is not a target.
        without_memory: read every segment with an empty memory; the same tokens are scored.

    Raises:
        ValueError: the shards were made with another tokenizer.
        ShardError: on every rank; a document is damaged or cannot be read.
        EvaluationError: on every rank; a loss is not finite, not every token was scored once, or none was.
    """
    check_scorable(index, tokenizer)
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], max_document_len)
    plan = evaluation_plan(lengths, num_lanes=num_lanes, seg_len=seg_len)
    mine = [document for documents in plan[world.rank :: world.size] for document in documents]
    of_blocks = partial(segment_starts, seg_len=seg_len, cut=cut)
    extent = Extent(lengths, lambda document: of_blocks(lengths[document])) if blocks else Extent(lengths)
    share = agreed_share(index, mine, extent, tokenizer, world)
    batches = evaluation_batches(
        index,
        plan,
        world_size=world.size,
        rank=world.rank,
        micro_lanes=micro_lanes,
        seg_len=seg_len,
        bos_id=tokenizer.bos_id,
        max_document_len=max_document_len,
        blocks=blocks,
        cut=cut,
    )
    tables = empty_tables(len(lengths), share.max_distance, world.device)
    steps: Iterable[Step] = ([(batch, batch.document) for batch in step] for step in batches)
    with scoring_progress(index, lengths, int(lengths[mine].sum()), world) as progress:
        score_batches(
            forward,
            init_state,
            steps,
            tables,
            device=world.device,
            progress=progress,
            without_memory=without_memory,
        )
    sums = Sums(*summed([*tables, share.words, share.bytes], world))
    check_complete(index, extent, sums)
    return make_report(index, extent, sums, max_document_len=max_document_len, seg_len=seg_len, mem_len=mem_len)


def make_report(index: Index, extent: Extent, sums: Sums, **settings: Any) -> Report:
    documents = _document_scores(index, sums)
    all_whole = all(is_whole(index, document, extent) for document in range(len(extent.lengths)))
    return Report(
        split=index.split,
        data_fingerprint=index.fingerprint,
        tokenizer_fingerprint=index.tokenizer_fingerprint,
        num_words=index.num_words if all_whole else total_words(documents),
        documents=documents,
        recall=_recall_scores(sums),
        **settings,
    )


def check_scorable(index: Index, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless the split was made with this tokenizer and has at least one token to score."""
    check_tokenizer(index, tokenizer)
    if not index.num_tokens:
        raise ValueError(f"{index.split_dir}: no document holds a token to score: set eval.split to a split with text")


def _document_scores(index: Index, sums: Sums) -> list[DocumentScore]:
    counts = [_known(part) for part in (sums.num_scored, sums.words, sums.bytes, sums.hits)]
    rows = zip(index.documents, sums.nll.tolist(), *counts, strict=True)
    return [DocumentScore(entry.id, entry.title, *row) for entry, *row in rows]


def _known(counts: Tensor) -> list[int | None]:
    """Convert counts to integers; nan becomes None."""
    return [None if math.isnan(count) else int(count) for count in counts.tolist()]


def _recall_scores(sums: Sums) -> list[RecallScore]:
    distances = [distance for distance in sums.recall_count.nonzero().flatten().tolist() if distance > 0]
    return [
        RecallScore(distance, float(sums.recall_nll[distance]), int(sums.recall_count[distance]))
        for distance in distances
    ]


def scoring_progress(index: Index, lengths: np.ndarray, num_own: int, world: World) -> Progress:
    """Return the progress over the tokens of a split, shown by rank 0; `num_own`: tokens that this rank reads."""
    total = int(lengths.sum())
    return Progress(total, f"scoring {index.split}", shown=world.rank == 0, share=num_own / total)


@torch.no_grad()
def score_batches(
    forward: Forward,
    init_state: InitState,
    steps: Iterable[Step],
    tables: Tables,
    *,
    device: torch.device,
    progress: Progress,
    without_memory: bool = False,
) -> None:
    """Add the scores of all micro-batches to `tables`, in place.

    The memory of each micro-batch is carried from step to step, unless `without_memory` empties it before every
    segment. A lane keeps its row; the lanes with the last rows end first.
    """
    states: list[Any] = []  # one per micro-batch of a step
    for step in steps:
        for number, (host_batch, documents) in enumerate(step):
            batch = host_batch.to(device)
            if number == len(states):  # the first step
                states.append(init_state(batch.document))
            state = first_lanes(states[number], len(batch.tokens))
            if without_memory or host_batch.is_new_document.any():  # a CPU tensor: no synchronization with the device
                fresh = init_state(batch.document)
                state = reset_lanes(state, fresh, batch.is_new_document)
                state = empty_memories(state, fresh) if without_memory else state
            output = forward(batch.tokens, batch.targets, batch.valid_len, state=state)
            states[number] = output.state
            add_scores(tables, batch, documents.to(device), output)
            progress.add(int(host_batch.valid_len.sum()))


def first_lanes(state: Any, num_lanes: int) -> Any:
    """Return views of the memories of the first lanes of a state."""
    return map_state(lambda part: part[:num_lanes], state)


def add_scores(tables: Tables, batch: Batch, documents: Tensor, output: LMOutput) -> None:
    """Add the scores of one micro-batch; `documents`: number of the document of every row (B,) or target (B, T)."""
    scored, nll, hits = (batch.targets != IGNORE).double(), output.nll.double(), output.hits
    rows = documents.flatten().clamp(min=0)  # an idle lane adds zeros to document 0

    def add(table: Tensor, values: Tensor) -> None:
        table.index_add_(0, rows, values.reshape(len(rows), -1).sum(dim=1))

    add(tables.nll, nll)
    add(tables.num_scored, scored)
    add(tables.hits, torch.full_like(nll, math.nan) if hits is None else hits * scored)
    if batch.recall is not None:
        distances = batch.recall.flatten()
        tables.recall_nll.index_add_(0, distances, nll.flatten())
        tables.recall_count.index_add_(0, distances, scored.flatten())


def empty_tables(num_documents: int, max_distance: int, device: torch.device) -> Tables:
    sizes = (*[num_documents] * 3, *[max_distance + 1] * 2)
    return Tables(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))


def summed(parts: Sequence[Tensor], world: World) -> list[Tensor]:
    """Sum each part over all ranks in one all-reduce; return the sums on the CPU."""
    joined = torch.cat([part.cpu() for part in parts])
    if world.size > 1:
        joined = sum_tensor(joined, world.device)
    return list(joined.split([len(part) for part in parts]))


def check_complete(index: Index, extent: Extent, sums: Sums) -> None:
    """Raise EvaluationError unless the scores match the index; the plan itself may be wrong."""
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
