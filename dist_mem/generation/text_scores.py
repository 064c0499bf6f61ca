"""Negative log-likelihood of every token of a text, read with memory.

    scores = score(trained, first_half)
    rest = score(trained, second_half, after=scores.reading)  # equals `score` of the whole text

A memory holds complete segments only. To continue a text takes a `Reading`: the memory and the tokens of the open
segment. That segment is computed again with the tokens that follow. With one memory, `lamemo` with the published
`window: segment`, a token's score in an open segment differs from its score in the complete one.
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
    """The scores of a text."""

    tokens: np.ndarray  # (num_tokens,) ids; tokenizer.decode([id]) is a token's text
    nll: Tensor  # (num_tokens,) float32, nats; nan for the first token of a block (data.blocks), which has no score
    reading: Reading  # after the text, to continue scoring (`after`) or to generate


@torch.no_grad()
def score(
    trained: TrainedModel, text: str | Sequence[int] | np.ndarray | Tensor, *, after: Reading | None = None
) -> Scores:
    """Return the negative log-likelihood of every token of a text, read segment by segment.

    Args:
        text: a str, or token ids (num_tokens,). If the text continues another one, a str may be tokenized differently
            than both texts together; ids avoid this.
        after: the reading of the preceding text, with one lane, from earlier scores or from `read`. None: the text is
            a separate document.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
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
            f"after has {counted(len(reading.open_len), 'lane')}, but a text continues one lane; select it with "
            "dist_mem.generation.reading.select(after, [LANE])"
        )
    open_len = int(reading.open_len)
    waiting = torch.cat([reading.open_tokens[0, :open_len], ids])  # inputs after the last complete segment
    nll, state = _read_and_score(trained, waiting.numpy(), reading)
    return Scores(
        ids.numpy().astype(trained.tokenizer.dtype),
        nll[len(nll) - len(ids) :],
        with_open_segment(state, [waiting], seg_len=trained.config.train.seg_len),
    )


def _read_and_score(trained: TrainedModel, waiting: np.ndarray, reading: Reading) -> tuple[Tensor, LMState]:
    """Return the score of each input given the inputs before it, and the memory before the last input's segment.

    Without blocks the first input has no score: it is BOS, or was scored before.
    """
    seg_len, blocks = trained.config.train.seg_len, trained.config.data.blocks
    first = trained.tokenizer.bos_id if blocks else int(waiting[0])
    document = Document(0, waiting if blocks else waiting[1:], scored=None, recall=None)
    state, parts = reading.state, [torch.zeros(0)]
    segments = document_segments(document, seg_len=seg_len, bos_id=first)
    for index, segment in enumerate(segments):
        batch = collate([segment], seg_len=seg_len, with_recall=False, blocks=blocks).to(trained.device)
        output = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
        nll = output.nll[0, : segment.length].cpu()
        parts.append(torch.cat([torch.full((1,), torch.nan), nll[:-1]]) if blocks else nll)
        if (index + 1) * seg_len < len(waiting):  # otherwise this segment stays open
            state = output.state
    return torch.cat(parts), state
