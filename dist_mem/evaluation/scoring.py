"""Score every token of a split once, during training and as a command.

Every rank runs the same number of forwards (ZeRO needs it). The scores of all ranks are summed per document in float64,
so that the result does not depend on the number of ranks. Shape letters: B lanes of a micro-batch, T segment.

The extent of the split is measured before the first forward: every rank checks the documents it will read, so a damaged
one stops all ranks there, and not in a forward in which the others would wait.

Each rank reads its part of the split in one of the two layouts of `eval.layout`:

`documents`: documents are assigned to lanes, longest first; each starts with an empty memory. A forward has rows only
for lanes that still have text.

`stream`, as the papers do with WikiText, enwik8 and text8: the documents are concatenated and cut into
`eval.batch_size` contiguous lanes; each lane begins with an empty memory and carries it across document boundaries. The
published code never scores the first token of a lane and drops the remainder of the cut (17 of the 245,569 words of
WikiText-103's test split in 16 lanes); here every token is scored once, the first of a lane given the last token of the
previous lane. So the metrics depend on the number of lanes, but not on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.config import Config, EvalConfig
from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.lanes import check_tokenizer
from dist_mem.data.plan import cut_lengths
from dist_mem.data.shard import Index, read_mask
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import RunError
from dist_mem.evaluation.document_sizes import DocumentSizes, is_whole, measure_documents
from dist_mem.evaluation.protocol import protocol_of, short_term_len
from dist_mem.evaluation.scores import DocumentScore, PositionScore, RecallScore, Report, total_words
from dist_mem.evaluation.split_layout import NO_INPUTS, Step, part_of_documents, part_of_stream
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState, empty_memories, reset_lanes
from dist_mem.runtime.distributed import World
from dist_mem.runtime.progress import Progress

Forward = Callable[..., LMOutput]  # (tokens, targets, valid_len, state=state), without dropout
NUM_BINS = 40  # octaves of positions, up to 10^12 tokens of a document
_NOTHING_SCORED = (
    "no token is scored, so there is no metric: set eval.max_document_len higher, or to null, or build the split with "
    "tokens that count"
)
InitState = Callable[[Tensor], LMState]  # document numbers (B,) int64 -> empty memories on the device


class EvaluationError(RunError, RuntimeError):
    """The scores are not valid; raised on every rank."""


def check_losses(losses: Tensor, targets: Tensor) -> None:
    """Raise EvaluationError if the loss of a scored target is not finite; elsewhere nan means that none is scored."""
    scored = losses[targets != IGNORE]
    wrong = scored[~scored.isfinite()]
    if len(wrong):
        raise EvaluationError(f"the loss of a token is {float(wrong[0])}: the model has diverged")


class ScoreSums(NamedTuple):
    """Sums of one rank or of all, float64; for one rank, the entries of other ranks' documents are 0."""

    nll: Tensor  # (documents,) nats
    num_scored: Tensor  # (documents,) tokens
    hits: Tensor  # (documents,) scored tokens that were the most probable; nan where unknown
    recall_nll: Tensor  # (max distance + 1,) nats by distance; row 0 is for tokens that recall nothing
    recall_count: Tensor  # (max distance + 1,)
    recall_hits: Tensor  # (max distance + 1,) as `hits`, by distance
    expected: Tensor  # (documents,) tokens to be scored
    words: Tensor  # (documents,) nan where unknown
    bytes: Tensor  # (documents,)
    depths: Tensor  # (documents,) nan where unknown
    position_nll: Tensor  # (documents * NUM_BINS,) nats by the bin of the position; (0,): not asked for
    position_count: Tensor  # likewise, tokens


def score_split(
    forward: Forward,
    init_state: InitState,
    inputs: np.ndarray = NO_INPUTS,
    *,
    config: Config,
    index: Index,
    tokenizer: Tokenizer,
    world: World,
    without_memory: bool = False,
    by_position: bool = False,
) -> Report:
    """Score a split; every rank calls it and gets the same report.

    Args:
        forward: the model or engine in evaluation mode.
        inputs: (num_inputs,) int64: the states of `init_state` are memories of a text, which every document continues,
            and these are the inputs of its open segment; they are read again before every document, and not scored.
            If empty, every document begins with BOS.
        config: the lengths are those that it has for training, except `eval.seg_len`; `for_evaluation` replaces them by
            those of `eval`. `eval.layout`, `eval.blocks`, `eval.batch_size` and `eval.max_document_len` always apply.
        without_memory: read every segment with an empty memory; the same tokens are scored.
        by_position: the report has the scores by position too; in documents that are not read in blocks.

    Raises:
        ValueError: the shards were made with another tokenizer, or a stream has fewer tokens than lanes.
        ShardError: on every rank; a document is damaged or cannot be read.
        EvaluationError: on every rank; a loss is not finite, not every token was scored once, or none was.
    """
    lengths = lengths_to_score(index, tokenizer, config.eval)
    protocol = protocol_of(config)
    num_lanes = config.eval.batch_size
    lanes = {"num_lanes": num_lanes, "micro_lanes": min(config.train.micro_batch_size, -(-num_lanes // world.size))}
    if protocol.layout == "stream":
        assert not len(inputs), "refused by the command"  # a lane begins within a document
        part = part_of_stream(index, lengths, protocol, **lanes, bos_id=tokenizer.bos_id, world=world)
    else:
        cut = "start" if len(inputs) else config.data.cut  # a text that is continued has been cut from its start
        part = part_of_documents(
            index, lengths, protocol, **lanes, cut=cut, bos_id=tokenizer.bos_id, world=world, inputs=inputs
        )
    share = measure_documents(index, part.documents, part.own, part.extent, tokenizer, world)
    sums, of_rank = _empty_sums(share, world.device, by_position), part.num_tokens / part.all_tokens
    with Progress(part.all_tokens, f"scoring {index.split}", shown=world.rank == 0, share=of_rank) as progress:
        score_batches(
            forward,
            init_state,
            part.steps,
            sums,
            progress=progress,
            without_memory=without_memory,
            before=max(len(inputs) - 1, 0),  # the first input takes the place of BOS
        )
    sums = _over_ranks(sums, world)
    check_complete(index, sums)
    documents = _document_scores(index, sums)
    all_whole = all(is_whole(index, document, part.extent) for document in range(len(lengths)))
    return Report(
        split=index.split,
        data_fingerprint=index.fingerprint,
        tokenizer_fingerprint=index.tokenizer_fingerprint,
        max_document_len=protocol.max_document_len,
        seg_len=protocol.seg_len,
        mem_len=short_term_len(config.memory),
        num_words=index.official_words if all_whole and index.official_words else total_words(documents),
        documents=documents,
        recall=_recall_scores(sums),
        positions=_position_scores(sums),
    )


def lengths_to_score(index: Index, tokenizer: Tokenizer, settings: EvalConfig) -> np.ndarray:
    """Return the tokens to read of each document of a split, (documents,).

    Raises:
        ValueError: the split was made with another tokenizer, has no text, or as a stream fewer tokens than lanes.
    """
    check_tokenizer(index, tokenizer)
    if not index.num_tokens:
        raise ValueError(f"{index.split_dir}: no document holds a token to score: set eval.split to a split with text")
    lengths = cut_lengths(index.documents.num_tokens, settings.max_document_len)
    if settings.layout == "stream" and int(lengths.sum()) < settings.batch_size:
        has = f"{index.split_dir} has {lengths.sum()} tokens"
        raise ValueError(f"eval.batch_size = {settings.batch_size}, but {has}: set it lower")
    return lengths


def refuse_without_targets(index: Index, lengths: np.ndarray) -> None:
    """Raise ValueError unless a token is scored of what an evaluation reads of the documents of a split."""
    for document, length in enumerate(lengths.tolist()):
        mask = read_mask(index, document, 0, length)
        if length and (mask is None or mask.any()):
            return
    raise ValueError(f"{index.split_dir}: {_NOTHING_SCORED}")


def _document_scores(index: Index, sums: ScoreSums) -> list[DocumentScore]:
    counts = [_as_integers(part) for part in (sums.num_scored, sums.words, sums.bytes, sums.hits)]
    depths = [None if math.isnan(depth) else depth for depth in sums.depths.tolist()]
    rows = zip(index.documents, sums.nll.tolist(), *counts, depths, strict=True)
    return [DocumentScore(entry.id, entry.title, *row) for entry, *row in rows]


def _as_integers(counts: Tensor) -> list[int | None]:
    """Convert counts to integers; nan becomes None."""
    return [None if math.isnan(count) else int(count) for count in counts.tolist()]


def _recall_scores(sums: ScoreSums) -> list[RecallScore]:
    distances = [distance for distance in sums.recall_count.nonzero().flatten().tolist() if distance > 0]
    counts = [_as_integers(part[distances]) for part in (sums.recall_count, sums.recall_hits)]
    return [RecallScore(*row) for row in zip(distances, sums.recall_nll[distances].tolist(), *counts, strict=True)]


def _position_scores(sums: ScoreSums) -> list[PositionScore]:
    scored = sums.position_count.nonzero().flatten()
    nll, counts = (part[scored].tolist() for part in (sums.position_nll, sums.position_count))
    rows = zip(scored.tolist(), nll, counts, strict=True)
    return [PositionScore(place // NUM_BINS, place % NUM_BINS, of_place, int(count)) for place, of_place, count in rows]


@torch.no_grad()
def score_batches(
    forward: Forward,
    init_state: InitState,
    steps: Iterable[Step],
    sums: ScoreSums,
    *,
    progress: Progress,
    without_memory: bool,
    before: int = 0,
) -> None:
    """Add the scores of all micro-batches to `sums`, in place.

    Args:
        before: targets that stand before those of every document, and are not counted in positions.

    The memory of each micro-batch is carried from step to step, unless `without_memory` empties it before every
    segment. A lane keeps its row; the lanes with the last rows end first.
    """
    device = sums.nll.device
    states: list[LMState] = []  # one per micro-batch of a step
    read: list[Tensor] = []  # (B,) tokens of its document that each lane has read, likewise; on the CPU
    for step in steps:
        for number, (host_batch, documents) in enumerate(step):
            batch = host_batch.to(device)
            if number == len(states):  # the first step
                states.append(init_state(batch.document))
                read.append(torch.zeros_like(host_batch.valid_len))
            state = map_state(itemgetter(slice(len(batch.tokens))), states[number])  # views
            if without_memory or host_batch.is_new_document.any():  # a CPU tensor: no synchronization with the device
                fresh = init_state(batch.document)
                state = reset_lanes(state, fresh, batch.is_new_document)
                state = empty_memories(state, fresh) if without_memory else state
            output = forward(batch.tokens, batch.targets, batch.valid_len, state=state)
            states[number] = output.state
            begun = torch.where(host_batch.is_new_document, -before, read[number][: len(host_batch.valid_len)])
            read[number] = begun + host_batch.valid_len
            add_scores(sums, batch, documents.to(device), output, begun.to(device))
            progress.add(int(host_batch.valid_len.sum()))


def add_scores(sums: ScoreSums, batch: Batch, documents: Tensor, output: LMOutput, begun: Tensor) -> None:
    """Add the scores of one micro-batch.

    Args:
        documents: number of the document of every row (B,) or target (B, T).
        begun: (B,) int64, tokens of the document before the first target of a row; used where documents are (B,).
    """
    scored, nll = (batch.targets != IGNORE).double(), output.nll.double()
    hits = torch.full_like(nll, math.nan) if output.hits is None else output.hits * scored
    rows = documents.flatten().clamp(min=0)  # an idle lane adds zeros to document 0

    def add(table: Tensor, values: Tensor) -> None:
        table.index_add_(0, rows, values.reshape(len(rows), -1).sum(dim=1))

    add(sums.nll, nll)
    add(sums.num_scored, scored)
    add(sums.hits, hits)
    if len(sums.position_nll):
        positions = begun[:, None] + torch.arange(1, nll.shape[1] + 1, device=nll.device)
        places = (documents.clamp(min=0)[:, None] * NUM_BINS + bin_of(positions)).flatten()
        sums.position_nll.index_add_(0, places, nll.flatten())
        sums.position_count.index_add_(0, places, scored.flatten())
    if batch.recall is not None:
        distances = batch.recall.flatten()
        sums.recall_nll.index_add_(0, distances, nll.flatten())
        sums.recall_count.index_add_(0, distances, scored.flatten())
        sums.recall_hits.index_add_(0, distances, hits.flatten())


def bin_of(position: Tensor) -> Tensor:
    """Return the bins of positions from 1 on, int64; smaller ones, which are not scored, are in the first."""
    exact = torch.frexp(position.clamp(min=1).double()).exponent - 1  # floor(log2), which `log2` may miss
    return exact.to(torch.int64).clamp(max=NUM_BINS - 1)


def _empty_sums(share: DocumentSizes, device: torch.device, by_position: bool) -> ScoreSums:
    by_document = torch.zeros(3, len(share.words), dtype=torch.float64, device=device)
    by_distance = torch.zeros(3, share.max_distance + 1, dtype=torch.float64, device=device)
    num_places = len(share.words) * NUM_BINS if by_position else 0
    by_place = torch.zeros(2, num_places, dtype=torch.float64, device=device)
    return ScoreSums(*[*by_document, *by_distance, *share[:4], *by_place])


def _over_ranks(sums: ScoreSums, world: World) -> ScoreSums:
    """Return the sums over all ranks, by one all-reduce, on the CPU."""
    joined = world.sum(torch.cat([part.cpu() for part in sums]))
    return ScoreSums(*joined.split([len(part) for part in sums]))


def check_complete(index: Index, sums: ScoreSums) -> None:
    """Raise EvaluationError unless the scores match the index; the plan itself may be wrong."""
    scored, expected = sums.num_scored.long().tolist(), sums.expected.long().tolist()
    for document, entry in enumerate(index.documents):
        where = f"{index.split_dir}: document {entry.id}"
        if scored[document] != expected[document]:
            raise EvaluationError(f"{where}: {scored[document]} tokens scored, {expected[document]} expected")
        if not torch.isfinite(sums.nll[document]):
            raise EvaluationError(f"{where}: its loss is {float(sums.nll[document])}")
    if not sums.num_scored.any():
        raise EvaluationError(f"{index.split_dir}: {_NOTHING_SCORED}")
