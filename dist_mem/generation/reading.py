"""Documents that are being read, so far: the memory after the last complete segment, and the segment that is open.

    reading = read(trained, start(trained), [trained.tokenizer.encode(prompt)])
    log_probs = next_log_probs(trained, reading)  # of the token after the prompt

Only complete segments are remembered (rule 3 of the memory contract), so the open one is fed again with every token
that is added to it. The result is that of reading the document anew from its start in segments of T. In blocks
(`data.blocks`) no BOS stands before the document, so that one token has to be read before any can be written. A
`Reading` is never changed: keep it, and read on from it in several ways. Shape letters: B lanes, T segment, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.evaluation.trained import TrainedModel, init_state
from dist_mem.generation.short_segments import num_rows
from dist_mem.memory.base import map_state, select_lanes


class Reading(NamedTuple):
    """Documents being read, one a lane; a value: nothing changes it in place."""

    state: Any  # LMState after the last complete segment of each lane, on the model's device
    open_tokens: Tensor  # (B, T) int64, on the CPU: inputs of the open segment, BOS first at a document's start, then 0
    open_len: Tensor  # (B,) int64, on the CPU, 1..T: a complete one stays open until the next token; 0: nothing is read


class Ahead(NamedTuple):
    """What one forward tells of a reading."""

    log_probs: Tensor  # (B, V) float32 at least, of the token after the last one read, on the model's device
    committed: Any  # LMState: with the open segment, of lanes where it is complete


def start(trained: TrainedModel, num_lanes: int = 1, document_ids: Sequence[int] | None = None) -> Reading:
    """Documents of which nothing has been read: empty memories, and BOS, which blocks do without.

    Args:
        document_ids: what memories that draw random numbers count as the document, one a lane; None: 0 for all
            `num_lanes` lanes, as `dist_mem.score` has it, so that a lane does not depend on those beside it.
    """
    numbers = [0] * num_lanes if document_ids is None else list(document_ids)
    open_tokens = torch.zeros(len(numbers), trained.config.train.seg_len, dtype=torch.int64)
    open_len = torch.zeros(len(numbers), dtype=torch.int64)
    if not trained.config.data.blocks:
        open_tokens[:, 0], open_len[:] = trained.tokenizer.bos_id, 1
    return Reading(init_state(trained, numbers), open_tokens, open_len)


@torch.no_grad()
def read(trained: TrainedModel, reading: Reading, tokens: Sequence[np.ndarray | Tensor]) -> Reading:
    """Read on: any number of tokens in each lane, none too; all lanes' complete segments go through the model together.

    Args:
        tokens: for each lane ids of the model's vocabulary, (num_tokens,) of any integer type.

    Raises:
        ValueError: another number of lanes, or an id that the vocabulary has not.
    """
    lanes = [torch.as_tensor(np.asarray(part).astype(np.int64)) for part in tokens]
    _check(trained, reading, lanes)
    seg_len = reading.open_tokens.shape[1]
    parts = zip(reading.open_tokens, reading.open_len.tolist(), lanes, strict=True)
    waiting = [torch.cat([opened[:length], new]) for opened, length, new in parts]
    state = reading.state
    for begin in range(0, max(map(len, waiting)), seg_len):
        rows = [row for row, inputs in enumerate(waiting) if len(inputs) - begin > seg_len]
        if not rows:
            break
        state = _commit(trained, state, rows, torch.stack([waiting[row][begin : begin + seg_len] for row in rows]))
    open_len = torch.tensor([(len(inputs) - 1) % seg_len + 1 if len(inputs) else 0 for inputs in waiting])
    open_tokens = torch.zeros_like(reading.open_tokens)
    for row, inputs in enumerate(waiting):
        open_tokens[row, : open_len[row]] = inputs[len(inputs) - int(open_len[row]) :]
    return Reading(state, open_tokens, open_len)


def _check(trained: TrainedModel, reading: Reading, lanes: Sequence[Tensor]) -> None:
    if len(lanes) != len(reading.open_len):
        raise ValueError(f"tokens for {len(lanes)} lanes, but {len(reading.open_len)} are being read")
    vocab_size = trained.tokenizer.vocab_size
    for ids in lanes:
        if ids.dim() != 1 or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
            raise ValueError(f"tokens of a lane must be a row of ids from 0 to {vocab_size - 1}, but are {ids}")


def _commit(trained: TrainedModel, state: Any, rows: list[int], tokens: Tensor) -> Any:
    """The state with one complete segment more in some lanes; tokens (len(rows), T)."""
    chosen = torch.tensor(rows, device=trained.device)
    full = torch.full((len(rows),), tokens.shape[1], device=trained.device)
    part = map_state(lambda tensor: tensor[chosen], state)
    new = trained.model.features(tokens.to(trained.device), full, state=part).state
    return map_state(lambda old, rows_of_old: old.index_copy(0, chosen, rows_of_old), state, new)


@torch.no_grad()
def look_ahead(trained: TrainedModel, reading: Reading) -> Ahead:
    """The one forward that a token costs, for `next_log_probs` and `append`.

    Raises:
        ValueError: nothing has been read in a lane, of a model that reads in blocks.
    """
    if not reading.open_len.all():
        raise ValueError(
            "nothing has been read that a text could go on from, and in blocks (data.blocks) no BOS stands before it: "
            "give a prompt of at least one token, or set eval.blocks=false"
        )
    seg_len = reading.open_tokens.shape[1]
    rows = num_rows(trained.model, int(reading.open_len.max()), seg_len=seg_len)
    tokens, open_len = reading.open_tokens[:, :rows].to(trained.device), reading.open_len.to(trained.device)
    features = trained.model.features(tokens, open_len, state=reading.state)
    last = features.hidden.take_along_dim(
        (open_len - 1)[:, None, None], dim=1
    )  # the softmax costs as much as it has rows
    return Ahead(trained.model.head.log_probs(last)[:, 0], features.state if rows == seg_len else reading.state)


def next_log_probs(trained: TrainedModel, reading: Reading) -> Tensor:
    """Log-probabilities of the token after the last one read: (B, V) float32 at least, on the model's device."""
    return look_ahead(trained, reading).log_probs


def append(reading: Reading, tokens: Tensor, ahead: Ahead, *, grows: Tensor) -> Reading:
    """As `read` of one token in the lanes that grow, without a forward of its own.

    Args:
        tokens: (B,) int64.  ahead: of `look_ahead(trained, reading)`.  grows: (B,) bool. All but `ahead` on the CPU.
    """
    seg_len = reading.open_tokens.shape[1]
    turns = grows & (reading.open_len == seg_len)
    state = reading.state
    if turns.any():
        state = select_lanes(turns.to(ahead.log_probs.device), ahead.committed, state)
    place = torch.where(turns, 0, reading.open_len)
    open_tokens = reading.open_tokens.masked_fill(turns[:, None], 0)
    rows = grows.nonzero().squeeze(1)
    open_tokens[rows, place[rows]] = tokens[rows]
    return Reading(state, open_tokens, torch.where(grows, place + 1, reading.open_len))


def select(reading: Reading, lanes: Sequence[int]) -> Reading:
    """Some lanes of a reading, in this order; a lane may come several times, to read it on in several ways."""
    rows = torch.tensor(lanes, dtype=torch.int64)

    def chosen(part: Tensor) -> Tensor:
        return part[rows.to(part.device)]

    return Reading(map_state(chosen, reading.state), chosen(reading.open_tokens), chosen(reading.open_len))
