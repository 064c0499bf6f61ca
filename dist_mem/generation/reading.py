"""The state of reading documents: the memory after the last complete segment, and the tokens of the open segment.

    reading = read(trained, start(trained), [trained.tokenizer.encode(prompt)])
    log_probs = next_log_probs(trained, reading)  # of the token after the prompt

A memory holds only complete segments (rule 3 of the memory contract), so what follows an open segment is computed from
its tokens. The result equals reading the whole document from its start in segments of T. In blocks
(`data.blocks`) no BOS precedes the document, so at least one token must be read before any can be generated. A
`Reading` is immutable: several continuations can start from the same one. Shape letters: B lanes, T segment, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.generation.arguments import check_int, check_trained, id_row, id_rows, wrong_type
from dist_mem.memory.base import named_tensors, put_lanes, take_lanes
from dist_mem.model import LMState, MemoryLM
from dist_mem.runtime.terminal import count_noun

ROW_STEP = 16  # so that few shapes occur


class Reading(NamedTuple):
    """The state of reading one document per lane; no function changes it in place."""

    state: Any  # LMState after the last complete segment of each lane, on the model's device
    # (B, T) int64, on the CPU: inputs of the open segment, padded with 0; BOS comes first at a document's start
    open_tokens: Tensor
    open_len: Tensor  # (B,) int64, on the CPU, 1..T; a complete segment stays open until the next token; 0: empty


class Ahead(NamedTuple):
    """The result of one forward pass over the open segments of a reading."""

    log_probs: Tensor  # (B, V) float32 or wider, of the token after the last one read, on the model's device
    committed: Any  # LMState with the open segment; valid for lanes where it is complete


def check_reading(trained: TrainedModel, reading: Any, name: str = "reading") -> Reading:
    """Return the argument `name` if it is a reading of this model.

    Raises:
        TypeError: it is not a Reading.
        ValueError: its segments have another length than the model's.
    """
    check_trained(trained)
    if isinstance(reading, LMState):
        raise TypeError(
            f"{name} is an LMState, but must be a Reading: a memory lacks the tokens of the open segment; give "
            "scores.reading, or start_from(trained, state, last_tokens)"
        )
    if not isinstance(reading, Reading):
        raise wrong_type(name, reading, "a Reading, as start, read or scores.reading")
    seg_len, found = trained.config.train.seg_len, reading.open_tokens.shape[1]
    if found != seg_len:
        raise ValueError(
            f"{name} is a reading in segments of {found} tokens, but this model reads segments of {seg_len}"
        )
    return reading


def start(trained: TrainedModel, num_lanes: int = 1, document_ids: Sequence[int] | None = None) -> Reading:
    """Return the reading at the start of documents: empty memories and BOS, or no token with `data.blocks`.

    Args:
        document_ids: document number of each lane, used by memories that draw random numbers; None: 0 for all
            `num_lanes` lanes, as in `score`, so that a lane does not depend on the other lanes.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_trained(trained)
    check_int("num_lanes", num_lanes, least=1)
    numbers = [0] * num_lanes if document_ids is None else list(document_ids)
    bos = None if trained.config.data.blocks else torch.full((len(numbers),), trained.tokenizer.bos_id)
    return _at_border(trained, init_state(trained, numbers), bos, num_lanes=len(numbers))


def start_from(trained: TrainedModel, state: LMState, last_tokens: Sequence[int] | Tensor | None = None) -> Reading:
    """Return the reading of documents from their memory alone, at the border of two segments.

    Args:
        state: memories, as `read_lanes` returns them.
        last_tokens: the last token each lane has read; the next segment begins with it. BOS
            (`trained.tokenizer.bos_id`) begins another document with the memory of this one. Must be None with
            `data.blocks`, where a segment begins with its own first token.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_trained(trained)
    if not isinstance(state, LMState):
        raise wrong_type("state", state, "an LMState, as read_lanes or init_state returns it")
    parts = named_tensors(state)
    if not parts:
        raise ValueError("state has no lanes, because the memory of this model carries nothing: use start")
    num_lanes = len(next(iter(parts.values())))
    if trained.config.data.blocks:
        if last_tokens is not None:
            raise ValueError("last_tokens must be left out: this model reads in blocks (data.blocks)")
        return _at_border(trained, state, None, num_lanes=num_lanes)
    if last_tokens is None:
        raise ValueError(
            "last_tokens is missing: a segment of this model begins with the last token of the previous one; give one "
            f"token per lane, or {trained.tokenizer.bos_id} (BOS) per lane for another document"
        )
    ids = id_row("last_tokens", last_tokens, trained.tokenizer.vocab_size)
    if len(ids) != num_lanes:
        raise ValueError(
            f"last_tokens has {count_noun(len(ids), 'token')}, but state has {count_noun(num_lanes, 'lane')}"
        )
    return _at_border(trained, state, ids, num_lanes=num_lanes)


def _at_border(trained: TrainedModel, state: LMState, first: Tensor | None, *, num_lanes: int) -> Reading:
    """Return the reading whose open segment has one input per lane, `first` (B,) int64, or none."""
    rows = [torch.zeros(0, dtype=torch.int64)] * num_lanes if first is None else first[:, None]
    return with_open_segment(state, list(rows), seg_len=trained.config.train.seg_len)


@torch.no_grad()
def read(trained: TrainedModel, reading: Reading, tokens: Sequence[Sequence[int] | np.ndarray | Tensor]) -> Reading:
    """Read any number of further tokens in each lane, with one forward pass for a complete segment of all lanes.

    Args:
        tokens: one row of token ids per lane, (num_tokens,) of any integer type; rows may be empty.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_reading(trained, reading)
    num_lanes, seg_len = reading.open_tokens.shape
    lanes = id_rows("tokens", tokens, num_lanes=num_lanes, vocab_size=trained.tokenizer.vocab_size)
    parts = zip(reading.open_tokens, reading.open_len.tolist(), lanes, strict=True)
    waiting = [torch.cat([opened[:length], new]) for opened, length, new in parts]
    state = reading.state
    for begin in range(0, max(map(len, waiting)), seg_len):
        rows = [row for row, inputs in enumerate(waiting) if len(inputs) - begin > seg_len]
        if not rows:
            break
        state = commit(trained, state, rows, torch.stack([waiting[row][begin : begin + seg_len] for row in rows]))
    return with_open_segment(state, waiting, seg_len=seg_len)


def with_open_segment(state: LMState, waiting: Sequence[Tensor], *, seg_len: int) -> Reading:
    """Return the reading of lanes whose memory `state` contains all but the last segment of their inputs.

    Args:
        waiting: inputs of each lane, (num_tokens,) int64; they begin at the border of a segment.
    """
    open_len = torch.tensor([(len(inputs) - 1) % seg_len + 1 if len(inputs) else 0 for inputs in waiting])
    open_tokens = torch.zeros(len(waiting), seg_len, dtype=torch.int64)
    for row, inputs in enumerate(waiting):
        open_tokens[row, : open_len[row]] = inputs[len(inputs) - int(open_len[row]) :]
    return Reading(state, open_tokens, open_len)


def commit(trained: TrainedModel, state: Any, rows: list[int], tokens: Tensor) -> Any:
    """Return the state after one more complete segment in some lanes; tokens (len(rows), T)."""
    full = torch.full((len(rows),), tokens.shape[1], device=trained.device)
    new = trained.model.features(tokens.to(trained.device), full, state=take_lanes(state, rows)).state
    return put_lanes(state, rows, new)


def num_rows(model: MemoryLM, open_len: int) -> int:
    """Return the rows to compute for open segments of at most `open_len` tokens, a multiple of ROW_STEP or T.

    Padding to T would cost about as much as T tokens. An incomplete segment does not change a memory, so its outputs
    suffice, and `Memory.min_seg_len` rows give them.
    """
    memories = model.memories()
    least = max(open_len, *(memory.min_seg_len for memory in memories))
    return min(-(-least // ROW_STEP) * ROW_STEP, memories[0].spec.seg_len)


def check_begun(reading: Reading) -> None:
    """Raise ValueError if a lane has read nothing: the model reads in blocks."""
    if not reading.open_len.all():
        raise ValueError(
            "nothing has been read, and in blocks (data.blocks) no BOS precedes a text: give a prompt of at least one "
            "token, or set eval.blocks=false"
        )


@torch.no_grad()
def look_ahead(trained: TrainedModel, reading: Reading) -> Ahead:
    """Run the open segments through the model.

    Raises:
        ValueError: as `check_begun`.
    """
    check_begun(reading)
    seg_len = reading.open_tokens.shape[1]
    rows = num_rows(trained.model, int(reading.open_len.max()))
    tokens, open_len = reading.open_tokens[:, :rows].to(trained.device), reading.open_len.to(trained.device)
    features = trained.model.features(tokens, open_len, state=reading.state)
    last = features.hidden.take_along_dim(
        (open_len - 1)[:, None, None], dim=1
    )  # the cost of the softmax is proportional to its rows
    return Ahead(trained.model.head.log_probs(last)[:, 0], features.state if rows == seg_len else reading.state)


def next_log_probs(trained: TrainedModel, reading: Reading) -> Tensor:
    """Return log-probabilities of the token after the last one read: (B, V) float32 or wider, on the model's device.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    check_reading(trained, reading)
    return look_ahead(trained, reading).log_probs


def append(reading: Reading, tokens: Tensor, state: LMState, *, grows: Tensor) -> Reading:
    """Read one token in the lanes marked by `grows`, as `read` does.

    Args:
        tokens: (B,) int64, on the CPU.
        state: that of the reading, with the open segment in lanes that grow and where it is complete.
        grows: (B,) bool, on the CPU.
    """
    # numpy, whose operations on a few numbers cost less than torch's
    open_tokens, length, grow = reading.open_tokens.numpy().copy(), reading.open_len.numpy(), grows.numpy()
    turns = grow & (length == open_tokens.shape[1])
    place = np.where(turns, 0, length)
    open_tokens[turns] = 0
    lanes = grow.nonzero()[0]
    open_tokens[lanes, place[lanes]] = tokens.numpy()[lanes]
    return Reading(state, torch.from_numpy(open_tokens), torch.from_numpy(np.where(grow, place + 1, length)))


def select(reading: Reading, lanes: Sequence[int]) -> Reading:
    """Return the given lanes of a reading, in this order; a lane may be repeated, to continue it in several ways."""
    return take_lanes(reading, lanes)
