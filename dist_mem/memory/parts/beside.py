"""A memory that may stand beside the attention of another one, `over`, with a gate that is 0 at first.

y = attention(x) + gate * memory(x), with a number per channel in the gate. While it is 0, a model to which the memory
was added computes what it computed without it, to the last bit. The gate learns at once, as its gradient is what the
memory reads times that of y; the memory learns once the gate has moved. That is ReZero (Bachlechner et al. 2020, sec.
3.1) with a number for each channel. Shape letters: B lanes, T segment, D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.memory.base import (
    Count,
    LayerSpec,
    Memory,
    MemoryOutput,
    MemoryState,
    Opened,
    OverMemory,
    Places,
    Stem,
    StepOutput,
    keys_begin_with,
    prefix_counts,
)
from dist_mem.memory.parts.inspection import Inspection
from dist_mem.memory.parts.inspector import inspect
from dist_mem.nn.named_tuples import replace


class OpenLanes(NamedTuple):
    own: Any
    over: Any  # of the memory below


class Beside(OverMemory):
    """Base class: a memory whose options have `over`, None or another memory, and `over_gate_init`.

    Its state is a NamedTuple with the field `over`, () without a memory there. `read_own`, `open_own` and `step_own`
    are what `forward`, `open_segment` and `step_rows` are without one.
    """

    over: Memory | None
    reads_evicted = False
    min_seg_len: int = 1

    def __init__(self, spec: LayerSpec, options: Any, over: Memory | None = None) -> None:
        super().__init__(spec, options, over)
        if over is None:
            return
        if type(over.stem()) is not Stem:
            kind = options.over["kind"]
            raise ValueError(
                f"memory.over.kind is {kind}, whose rows pass through all blocks with the segment, where a memory "
                "beside it has none: set memory.over.kind to none, causal, transformer_xl or compressive"
            )
        self.over_gate = nn.Parameter(torch.zeros(spec.d_model))
        self.min_seg_len, self.evicts_parts = over.min_seg_len, over.evicts_parts
        self.takes_short_first = over.takes_short_first

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.over is not None and not self.over_gate.is_meta:
            self.over_gate.fill_(self.options.over_gate_init)

    @property
    def evicted_len(self) -> int:
        with keys_begin_with("memory.over"):
            return self.spec.seg_len if self.over is None else self.over.evicted_len

    @property
    def kept_len(self) -> int:
        return 0 if self.over is None else self.over.kept_len

    @property
    def tokens_per_row(self) -> int:
        return 1 if self.over is None else self.over.tokens_per_row

    def empty_over(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> MemoryState:
        """Return the field `over` of an empty state."""
        return () if self.over is None else self.over.init_state(document_ids, device, dtype)

    def counts(self, state: MemoryState, num_segments: int) -> dict[str, Count]:
        return {} if self.over is None else prefix_counts("over", self.over.counts(state.over, num_segments))

    def read_own(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> MemoryOutput:
        raise NotImplementedError

    def open_own(self, state: MemoryState, rows: Tensor) -> Opened:
        raise NotImplementedError

    def step_own(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        raise NotImplementedError

    def forward(self, x: Tensor, state: MemoryState, valid_len: Tensor) -> MemoryOutput:
        own = self.read_own(x, state, valid_len)
        if self.over is None:
            return own
        below = self.over(x, state.over, valid_len)
        logs: Mapping[str, Tensor] = {**below.logs, **own.logs, "gate": self.over_gate.detach().float().abs().mean()}
        new = replace(own.state, over=below.state)
        return MemoryOutput(below.y + self.over_gate * own.y, new, below.aux, below.query, below.evicted, logs)

    def open_segment(self, state: MemoryState, rows: Tensor) -> Opened:
        if self.over is None:
            return self.open_own(state, rows)
        own, below = self.open_own(replace(state, over=()), rows), self.over.open_segment(state.over, rows)
        return Opened(OpenLanes(own.lanes, below.lanes), (own.shared, below.shared))

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        if self.over is None:
            return self.step_own(x, opened, places)
        lanes, shared = opened
        own = self.step_own(x, Opened(lanes.own, shared[0]), places)
        below = self.over.step_rows(x, Opened(lanes.over, shared[1]), places)
        kept = Opened(OpenLanes(own.opened.lanes, below.opened.lanes), (own.opened.shared, below.opened.shared))
        return StepOutput(below.y + self.over_gate * own.y, below.query, kept)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: MemoryState, valid_len: Tensor, trace: Any = None) -> Inspection:
        """Return what the memory below reads; what is added to it has no weights."""
        return Inspection() if self.over is None else inspect(self.over, x, state.over, valid_len, trace)
