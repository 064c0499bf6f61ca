"""The negative log-likelihood of every token of a text, read with memory.

    scores = score(trained, first_half)
    rest = score(trained, second_half, after=scores.reading)  # equals `score` of the whole text

A memory holds complete segments only. What it takes to continue a text is a `Reading`: the memory, and the tokens of
the segment that is still open. That segment is computed again with the tokens that follow. One memory gives the tokens
of an open segment other scores than those of a complete one: `lamemo` with the published `window: segment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.documents import Document
from dist_mem.data.segments import collate, document_segments
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.arguments import check_trained, counted, id_row, wrong_type
from dist_mem.generation.reading import Reading, check_reading, start, with_open_segment
from dist_mem.model import LMState


class Scores(NamedTuple):
    """A text, scored."""

    tokens: np.ndarray  # (num_tokens,) ids; tokenizer.decode([id]) is a token's text
    nll: Tensor  # (num_tokens,) float32, nats; nan for the first token of a block (data.blocks), which has none
    reading: Reading  # the text, read: to be scored on (`after`), or written on (`generate`)


@torch.no_grad()
def score(
    trained: TrainedModel, text: str | Sequence[int] | np.ndarray | Tensor, *, after: Reading | None = None
) -> Scores:
    """Negative log-likelihood of every token of a text, read segment after segment.

    Args:
        text: a str, or token ids (num_tokens,). A str that continues another one may be cut into other tokens than the
            two together; ids are not.
        after: what stands before the text, of one lane: `reading` of other scores, or of `read`. None: nothing, the
            text is a document of its own.

    Raises:
        TypeError, ValueError: an argument; the message names it.
    """
    check_trained(trained)
    if isinstance(text, bytes):
        raise wrong_type("text", text, "a str or a row of ids")
    ids = id_row(
        "text", trained.tokenizer.encode(text) if isinstance(text, str) else text, trained.tokenizer.vocab_size
    )
    reading = start(trained) if after is None else check_reading(trained, after, "after")
    if len(reading.open_len) != 1:
        raise ValueError(
            f"after has {counted(len(reading.open_len), 'lane')}, but a text continues one; take it with "
            "dist_mem.generation.reading.select(after, [LANE])"
        )
    open_len = int(reading.open_len)
    waiting = torch.cat([reading.open_tokens[0, :open_len], ids])  # inputs since the last complete segment, and to come
    nll, state = _read_and_score(trained, waiting.numpy(), reading)
    return Scores(
        ids.numpy().astype(trained.tokenizer.dtype),
        nll[len(nll) - len(ids) :],
        with_open_segment(state, [waiting], seg_len=trained.config.train.seg_len),
    )


def _read_and_score(trained: TrainedModel, waiting: np.ndarray, reading: Reading) -> tuple[Tensor, LMState]:
    """The scores of inputs as the targets of those before them, and the memory before the segment of the last input.

    Without blocks the first input has no score: it is BOS, or was scored before.
    """
    seg_len, blocks = trained.config.train.seg_len, trained.config.data.blocks
    first = trained.tokenizer.bos_id if blocks else int(waiting[0])
    document = Document(0, waiting if blocks else waiting[1:], scored=None, recall=None)
    state, parts = reading.state, [torch.zeros(0)]
    segments = document_segments(document, start=0, seg_len=seg_len, bos_id=first, blocks=blocks)
    for index, (segment, _) in enumerate(segments):
        batch = collate([segment], seg_len=seg_len, with_recall=False).to(trained.device)
        output = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
        nll = output.nll[0, : len(segment.targets)].cpu()
        parts.append(torch.cat([torch.full((1,), torch.nan), nll[:-1]]) if blocks else nll)
        if (index + 1) * seg_len < len(waiting):  # else this segment stays open
            state = output.state
    return torch.cat(parts), state
