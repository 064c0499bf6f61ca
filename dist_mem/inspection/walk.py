"""Read one document segment by segment, in one lane, from an empty memory, as an evaluation reads it.

Positions are those of the document's tokens: 0 is the first, and -1 the BOS before it. Shape letters: N tokens of the
document, T segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.documents import Document
from dist_mem.data.segments import collate, document_segments
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.model import LMOutput, LMState, empty_memories
from dist_mem.tracking.progress import Progress

EmptyBefore = Callable[[int], bool]  # position of a segment's first token -> is the memory emptied before it?


class Step(NamedTuple):
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
def walk(trained: TrainedModel, document: Document, is_emptied: EmptyBefore = never) -> Iterator[Step]:
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
        yield Step(begin, begin - 1 + blocks, batch, state, output, segment.length == seg_len or cut == "end")
        state, begin = output.state, begin + segment.length


def put_losses(losses: Tensor, step: Step, nll: Tensor) -> None:
    """Write the losses of a step's targets (T,) at their positions into `losses`, (N,); the rest stays."""
    is_scored = step.batch.targets[0] != IGNORE
    losses[step.first_input + 1 + is_scored.nonzero().flatten().cpu()] = nll[is_scored].float().cpu()


def losses_of(trained: TrainedModel, document: Document, progress: Progress, is_emptied: EmptyBefore = never) -> Tensor:
    """Return the negative log-likelihood of every token, (N,) float32, in nats; nan where a token is not scored."""
    losses = torch.full((len(document.tokens),), torch.nan)
    for step in walk(trained, document, is_emptied):
        put_losses(losses, step, step.output.nll[0])
        progress.add(step.num_inputs)
    return losses
