"""Log-probabilities after every token that is read, in lanes of any lengths; `read` returns none, `score` has one lane.

Segments begin where they begin in a text that is read at once, so that a text may be given in parts. Shape letters: B
lanes, T segment, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.reading import Reading, num_rows, with_open_segment
from dist_mem.memory.base import map_state
from dist_mem.model import LMState


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
        state = _put(state, [lanes[place] for place in full], _take(new, full)) if full else state
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
    features = trained.model.features(tokens.to(device), valid_len.to(device), state=_take(state, lanes))
    rows = [hidden[:length] for hidden, length in zip(features.hidden, valid_len.tolist(), strict=True)]
    return rows, features.state


def _take(state: LMState, lanes: list[int]) -> LMState:
    chosen: LMState = map_state(lambda part: part[torch.tensor(lanes, device=part.device)], state)
    return chosen


def _put(state: LMState, lanes: list[int], new: LMState) -> LMState:
    """Return the state with new rows in these lanes."""

    def put(old: Tensor, rows: Tensor) -> Tensor:
        return old.index_copy(0, torch.tensor(lanes, device=old.device), rows)

    replaced: LMState = map_state(put, state, new)
    return replaced
