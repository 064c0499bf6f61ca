"""The reading of documents that are being written, a token at a time, and what the next token may be.

A segment's earlier rows, the memory, and the rows of a stem before the segment do not change while it is open. So if
every memory can (`Memory.can_step`), a token costs one row in every block (`SteppingWriter`), else the open segment is
computed again (`RecomputingWriter`). Both commit a complete segment by the same forward of the whole, so the memories
are the same to the last bit. Shape letters: B lanes, R rows, T segment, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.reading import Reading, append, check_begun, commit, look_ahead
from dist_mem.memory.base import put_lanes, select_lanes, take_lanes
from dist_mem.model import LMState, OpenSegment
from dist_mem.nn.stepping import places_of

NUM_ROWS = 64  # that are run through the blocks at once


class RecomputingWriter:
    """A reading whose open segments are computed again for every token."""

    def __init__(self, trained: TrainedModel, reading: Reading) -> None:
        self.trained = trained
        self.reading = reading
        self.committed = reading.state  # with the open segment, for lanes where it is complete

    def next_log_probs(self) -> Tensor:
        """Return log-probabilities of the token after the last one read, (B, V) float32 or wider."""
        log_probs, self.committed = look_ahead(self.trained, self.reading)
        return log_probs

    def append(self, tokens: Tensor, grows: Tensor) -> None:
        """Read a token, (B,) int64, in the lanes marked by `grows`, (B,) bool; both on the CPU."""
        turns, state = grows & is_complete(self.reading), self.reading.state
        if turns.any():
            state = select_lanes(turns.to(self.trained.device), self.committed, state)
        self.reading = append(self.reading, tokens, state, grows=grows)


class SteppingWriter:
    """A reading of whose open segments is kept what later rows read, with the same methods as `RecomputingWriter`.

    What is kept is not in the reading, which any function may continue.
    """

    def __init__(self, trained: TrainedModel, reading: Reading) -> None:
        check_begun(reading)
        self.trained = trained
        self.reading = reading
        self.opened: OpenSegment = self._open_first(reading.state, reading.open_tokens[:, 0])
        self.num_run = torch.zeros_like(reading.open_len)  # rows of the open segments that are kept

    @torch.inference_mode()  # a tenth faster than no_grad
    def next_log_probs(self) -> Tensor:
        """Return log-probabilities of the token after the last one read; undefined in lanes that have not grown."""
        last = self._run(min(NUM_ROWS, int((self.reading.open_len - self.num_run).max())))
        while (self.num_run < self.reading.open_len).any():
            waiting = self.num_run < self.reading.open_len
            last = torch.where(waiting[:, None].to(last.device), self._run(NUM_ROWS), last)
        log_probs: Tensor = self.trained.model.head.log_probs(last)
        return log_probs

    def _run(self, num_rows: int) -> Tensor:
        """Run the next rows of every lane, at most R, through the blocks, and return the last hidden state, (B, D)."""
        seg_len, device = self.reading.open_tokens.shape[1], self.trained.device
        num_real = (self.reading.open_len - self.num_run).clamp(max=num_rows)
        places = places_of(self.num_run, num_real, num_rows=num_rows, seg_len=seg_len, device=device)
        tokens = self.reading.open_tokens.to(device).gather(1, places.row)
        hidden, self.opened = self.trained.model.step_rows(tokens, self.opened, places)
        self.num_run = self.num_run + num_real
        if num_rows == 1:
            return hidden[:, 0]
        return hidden.take_along_dim((places.num_real - 1).clamp(min=0)[:, None, None], dim=1)[:, 0]

    @torch.no_grad()
    def append(self, tokens: Tensor, grows: Tensor) -> None:
        """Read a token, as `RecomputingWriter.append`."""
        lanes = (grows & is_complete(self.reading)).nonzero().squeeze(1).tolist()
        state = self.reading.state
        if lanes:
            state = commit(self.trained, state, lanes, self.reading.open_tokens[lanes])
            self._open(state, lanes, tokens[lanes])
        self.reading = append(self.reading, tokens, state, grows=grows)

    def _open_first(self, state: LMState, first: Tensor) -> OpenSegment:
        opened: OpenSegment = self.trained.model.open(state, first.to(self.trained.device))
        return opened

    def _open(self, state: LMState, lanes: list[int], first: Tensor) -> None:
        """Open the next segment, with this first token, in some lanes."""
        self.num_run = self.num_run.index_fill(0, torch.tensor(lanes), 0)
        if len(lanes) == len(self.num_run):
            self.opened = self._open_first(state, first)
            return
        new = self._open_first(take_lanes(state, lanes), first)
        both = zip(self.opened.blocks, new.blocks, strict=True)
        blocks = tuple(old._replace(lanes=put_lanes(old.lanes, lanes, rows.lanes)) for old, rows in both)
        self.opened = OpenSegment(blocks, put_lanes(self.opened.types, lanes, new.types))


def is_complete(reading: Reading) -> Tensor:
    """Return the lanes whose open segment is complete, (B,) bool."""
    return reading.open_len == reading.open_tokens.shape[1]


def write(trained: TrainedModel, reading: Reading) -> SteppingWriter | RecomputingWriter:
    """Begin to write after a reading."""
    return SteppingWriter(trained, reading) if trained.model.can_step else RecomputingWriter(trained, reading)
