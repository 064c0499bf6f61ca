"""Negative log-likelihood of every token of a text, read with memory, and log-probabilities of what may follow it.

    scores = score(trained, first_half)
    rest = score(trained, second_half, after=scores.reading)  # equals `score` of the whole text

A memory holds complete segments only. To continue a text takes a `Reading`: the memory and the tokens of the open
segment. That segment is computed again with the tokens that follow. With one memory, `lamemo` with the published
`window: segment`, a token's score in an open segment differs from its score in the complete one.

Several texts are read in lanes of any lengths: `read` returns no log-probabilities, `score` has one lane. Segments
begin where they begin in a text that is read at once, so that a text may be given in parts. Shape letters: B lanes, T
segment, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.data.documents import Document
from dist_mem.data.segments import collate, document_segments
from dist_mem.evaluation.scoring import check_losses
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.arguments import check_trained, id_row, wrong_type
from dist_mem.generation.reading import Reading, check_reading, num_rows, start, with_open_segment
from dist_mem.memory.base import put_lanes, take_lanes
from dist_mem.model import LMState
from dist_mem.runtime.terminal import count_noun


class TextScores(NamedTuple):
    """The scores of a text."""

    tokens: np.ndarray  # (num_tokens,) ids; tokenizer.decode([id]) is a token's text
    nll: Tensor  # (num_tokens,) float32, nats; nan for the first token of a block (data.blocks), which has no score
    reading: Reading  # after the text, to continue scoring (`after`) or to generate


@torch.no_grad()
def score(
    trained: TrainedModel, text: str | Sequence[int] | np.ndarray | Tensor, *, after: Reading | None = None
) -> TextScores:
    """Return the negative log-likelihood of every token of a text, read segment by segment.

    Args:
        text: a str, or token ids (num_tokens,). If the text continues another one, a str may be tokenized differently
            than both texts together; ids avoid this.
        after: the reading of the preceding text, with one lane, from earlier scores or from `read`. None: the text is
            a separate document.

    Raises:
        EvaluationError: a loss is not finite.
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
            f"after has {count_noun(len(reading.open_len), 'lane')}, but a text continues one lane; select it with "
            "dist_mem.generation.reading.select(after, [LANE])"
        )
    open_len = int(reading.open_len)
    waiting = torch.cat([reading.open_tokens[0, :open_len], ids])  # inputs after the last complete segment
    nll, state = _read_and_score(trained, waiting.numpy(), reading)
    return TextScores(
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
        check_losses(output.nll, batch.targets)
        nll = output.nll[0, : segment.length].cpu()
        parts.append(torch.cat([torch.full((1,), torch.nan), nll[:-1]]) if blocks else nll)
        if (index + 1) * seg_len < len(waiting):  # otherwise this segment stays open
            state = output.state
    return torch.cat(parts), state


def read_with_log_probs(
    trained: TrainedModel, reading: Reading, tokens: Sequence[Tensor], num_kept: Sequence[int]
) -> tuple[list[Tensor], Reading]:
    """Read as `read`, and return the log-probabilities of the token after each of the newest ones.

    Args:
        tokens: one row of token ids per lane, (num_tokens,) int64 on the CPU; rows may be empty.
        num_kept: of each lane, its newest tokens to return log-probabilities after; at most num_tokens.

    Returns:
        (num_kept, V) float32 or wider of each lane, on the model's device, and the reading after the tokens.
    """
    seg_len = reading.open_tokens.shape[1]
    opened = zip(reading.open_tokens, reading.open_len.tolist(), tokens, strict=True)
    waiting = [torch.cat([row[:length], new]) for row, length, new in opened]
    first = [len(inputs) - kept for inputs, kept in zip(waiting, num_kept, strict=True)]
    found: list[list[Tensor]] = [[] for _ in waiting]
    state = reading.state
    for begin in range(0, max(map(len, waiting)), seg_len):
        lanes = [lane for lane, inputs in enumerate(waiting) if len(inputs) > begin]
        hidden, new = _read_segment(trained, state, lanes, [waiting[lane][begin : begin + seg_len] for lane in lanes])
        for lane, rows in zip(lanes, hidden, strict=True):
            wanted = rows[max(first[lane] - begin, 0) :]
            if len(wanted):
                found[lane].append(trained.model.head.log_probs(wanted))
        # a complete segment stays open until the next token
        full = [place for place, lane in enumerate(lanes) if len(waiting[lane]) > begin + seg_len]
        state = put_lanes(state, [lanes[place] for place in full], take_lanes(new, full)) if full else state
    none = torch.zeros(0, trained.tokenizer.vocab_size, device=trained.device)
    log_probs = [torch.cat(parts) if parts else none for parts in found]
    return log_probs, with_open_segment(state, waiting, seg_len=seg_len)


def _read_segment(
    trained: TrainedModel, state: LMState, lanes: list[int], inputs: list[Tensor]
) -> tuple[list[Tensor], LMState]:
    """Return the hidden states of some lanes' segment, (num_inputs, D) each, and the state after it.

    The state is right for lanes whose segment is complete.
    """
    valid_len = torch.tensor([len(row) for row in inputs])
    tokens = torch.zeros(len(lanes), num_rows(trained.model, int(valid_len.max())), dtype=torch.int64)
    for row, ids in enumerate(inputs):
        tokens[row, : len(ids)] = ids
    device = trained.device
    features = trained.model.features(tokens.to(device), valid_len.to(device), state=take_lanes(state, lanes))
    rows = [hidden[:length] for hidden, length in zip(features.hidden, valid_len.tolist(), strict=True)]
    return rows, features.state
