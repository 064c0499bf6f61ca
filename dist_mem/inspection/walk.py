"""Read one document segment by segment, in one lane, from an empty memory, as an evaluation reads it.

Positions are those of the document's tokens: 0 is the first, and -1 the BOS before it. Shape letters: N tokens of the
document, T segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Document
from dist_mem.data.plan import START, segment_starts
from dist_mem.data.segments import Segment, collate, document_segments
from dist_mem.evaluation.scoring import check_losses
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.model import LMOutput, LMState, empty_memories
from dist_mem.runtime.progress import Progress

EmptyBefore = Callable[[int], bool]  # position of a segment's first token -> is the memory emptied before it?


class SegmentReading(NamedTuple):
    """One segment, in a batch of one lane, and what the model made of it."""

    begin: int  # position of its first token
    first_input: int  # position of its first input, begin - 1 but in blocks; target j is token first_input + 1 + j
    batch: Batch
    state: LMState  # the memory that it was read with
    output: LMOutput
    is_kept: bool  # the segment enters the memory

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.begin + int(self.batch.valid_len)

    @property
    def num_inputs(self) -> int:
        return int(self.batch.valid_len)


def never(_: int) -> bool:
    """Keep the memory, as an evaluation does."""
    return False


def always(_: int) -> bool:
    """Empty the memory before every segment, as `dist-mem evaluate --without-memory` does."""
    return True


@torch.no_grad()
def walk(trained: TrainedModel, document: Document, is_emptied: EmptyBefore = never) -> Iterator[SegmentReading]:
    """Yield the segments of a document."""
    config = trained.config
    seg_len, blocks, cut = config.train.seg_len, config.data.blocks, config.data.cut
    state = fresh = init_state(trained, [document.number])
    begin = 0
    for segment in document_segments(document, seg_len=seg_len, bos_id=trained.tokenizer.bos_id, cut=cut):
        batch = collate([segment], seg_len=seg_len, with_recall=False, blocks=blocks).to(trained.device)
        if is_emptied(begin):
            state = empty_memories(state, fresh)
        output = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
        yield SegmentReading(begin, begin - 1 + blocks, batch, state, output, segment.length == seg_len or cut == "end")
        state, begin = output.state, begin + segment.length


def put_losses(losses: Tensor, step: SegmentReading, nll: Tensor) -> None:
    """Write the losses of a step's targets (T,) at their positions into `losses`, (N,); the rest stays.

    Raises:
        EvaluationError: a loss is not finite.
    """
    check_losses(nll, step.batch.targets[0])
    is_scored = step.batch.targets[0] != IGNORE
    losses[step.first_input + 1 + is_scored.nonzero().flatten().cpu()] = nll[is_scored].float().cpu()


def losses_of(trained: TrainedModel, document: Document, progress: Progress, is_emptied: EmptyBefore = never) -> Tensor:
    """Return the negative log-likelihood of every token, (N,) float32, in nats; nan where a token is not scored."""
    losses = torch.full((len(document.tokens),), torch.nan)
    for step in walk(trained, document, is_emptied):
        put_losses(losses, step, step.output.nll[0])
        progress.add(step.num_inputs)
    return losses


@torch.no_grad()
def losses_in_windows(trained: TrainedModel, document: Document, at_borders: Tensor, progress: Progress) -> Tensor:
    """Return the losses without memory, (N,) float32, where every token has half a segment of text before it.

    With the memory emptied before every segment, the first tokens of a segment have no context, whatever a memory is
    worth to them. Here the first half of every segment is also read in a window of T tokens, with an empty memory, of
    which it is the second half. So every token has T / 2 tokens of context or more, or all of the document before it.

    Args:
        at_borders: the losses with the memory emptied before every segment, of which the second halves are taken.
    """
    config, tokens, losses = trained.config, document.tokens, at_borders.clone()
    seg_len, blocks, bos = config.train.seg_len, config.data.blocks, np.array([trained.tokenizer.bos_id])
    new_len = seg_len // 2
    inputs = tokens if blocks else np.concatenate([bos, tokens])
    state, num_typed = init_state(trained, [document.number]), 0
    for border in segment_starts(len(tokens), seg_len=seg_len, cut=config.data.cut)[1:].tolist():
        begin = max(0, border + new_len - seg_len)
        part = document.part(begin, min(begin + seg_len, len(tokens)))
        before = tokens[begin - 1 : begin] if begin else bos
        window = Segment(np.concatenate([before, part.tokens]), part.scored, None, document.number, not begin, START)
        batch = collate([window], seg_len=seg_len, with_recall=False, blocks=blocks).to(trained.device)
        if (
            trained.model.token_types is not None and begin > num_typed
        ):  # types derive from the text, so they are never emptied
            passed = torch.tensor(inputs[None, num_typed:begin].astype(np.int64), device=trained.device)
            length = torch.tensor([begin - num_typed], device=trained.device)
            state, num_typed = state._replace(types=trained.model.token_types(passed, length, state.types).state), begin
        output = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
        found = torch.full_like(losses, torch.nan)
        put_losses(found, SegmentReading(begin, begin - 1 + blocks, batch, state, output, is_kept=False), output.nll[0])
        losses[border : border + new_len] = found[border : border + new_len]
        progress.add(min(new_len, len(tokens) - border))
    return losses
