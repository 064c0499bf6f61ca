"""The infinity-former's long-term memory (Martins et al. 2022) over any short-term memory.

The rows that leave the memory below become a continuous signal on [0, 1]. Only its coefficients over N basis functions
are kept, however long the document is. A new segment contracts the past and appends the evicted rows. Every query reads
under a density, and the reading is added to the attention of the memory below. Rows are pending in the state for
one segment, so that the gate in front of the regression gets a gradient; there is none through time.

Deviations from the published code (GPT-2 copy), besides those of options: the memory lives as long as its document
(`memory_threshold` for the published wipe); regression matrices are in float64; the unused query projection is left
out; the gate is initialised like all other weights, not by torch's default; the KL is a mean over the real queries of
a lane, and 0 for a lane without memory, where the published one is a mean over those of all lanes with memory. With
`store: normed` rows are stored raw and normalised when they enter the signal: so the block's layer norm learns from
them one segment later, as in the authors' dialogue code, but with the weights of that later segment. `density: gibbs`
is infinity-Video's (Santos et al. 2025), with an output projection, which the training-free original lacks; the other
deviations from it are in parts/boxes.py. Shape letters: B lanes, T segment, E evicted rows, S samples, N basis
functions, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.base import (
    Count,
    MemoryOutput,
    Opened,
    Places,
    Stem,
    StepOutput,
    can_step_rows,
    exactly,
    prefix_counts,
)
from dist_mem.memory.parts.infinite_options import InfiniteOptions
from dist_mem.memory.parts.inspection import Inspection
from dist_mem.memory.parts.signal import Signal, SignalRows, SignalState
from dist_mem.memory.parts.signal_inspection import forget_signal, inspect_signal
from dist_mem.memory.parts.signal_places import Trace
from dist_mem.nn.named_tuples import replace


class InfiniteOpenLanes(NamedTuple):
    over: Any  # of the memory below
    readable: SignalRows  # of the signal, lane first: (B, H, R, K)


class Infinite(Signal):
    """Continuous long-term memory over another memory."""

    title = "infinity-former"
    needs_exact_products = True  # of the coefficients, whose errors would add up over a document

    Options = InfiniteOptions

    @property
    def evicted_len(self) -> int:
        return self.over.evicted_len

    @classmethod
    def title_of(cls, options: InfiniteOptions) -> str:
        return "infinity-former by boxes" if options.density == "gibbs" else cls.title

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_basis": 8, "basis_widths": [0.1, 0.2], "num_samples": 2 * seg_len, "kl_weight": 0.1}

    def stem(self) -> Stem:
        return self.over.stem()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.options.output_init != 1.0 and not self.output.weight.is_meta:
            self.output.weight.mul_(self.options.output_init)

    @property
    def num_rows(self) -> int:
        return self.over.num_rows

    @property
    def can_step(self) -> bool:
        return can_step_rows(self.over)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> SignalState:
        num_lanes, d_model, options = document_ids.shape[0], self.spec.d_model, self.options
        exact = torch.promote_types(dtype, torch.float32)
        return SignalState(
            over=self.over.init_state(document_ids, device, dtype),
            coefficients=torch.zeros(num_lanes, options.num_basis, d_model, device=device, dtype=exact),
            num_tokens=torch.zeros(num_lanes, device=device, dtype=torch.int64),
            pending=torch.zeros(num_lanes, self.evicted_len, d_model, device=device, dtype=dtype),
            has_pending=torch.zeros(num_lanes, device=device, dtype=torch.bool),
            histogram=torch.ones(num_lanes, options.num_bins, device=device, dtype=exact),
            document=document_ids.to(device=device, dtype=torch.int64, copy=True),
            segment=torch.zeros(num_lanes, device=device, dtype=torch.int64),
            pending_len=torch.zeros(num_lanes, device=device, dtype=torch.int64) if self.spec.short_first else (),
        )

    def counts(self, state: SignalState, num_segments: int) -> dict[str, Count]:
        seg_len, threshold = self.spec.seg_len, self.options.memory_threshold
        num_appended = max(
            0, num_segments - math.ceil(self.kept_len / seg_len) - 1
        )  # the newest that has left is pending
        if threshold is not None and num_appended:
            num_appended = (num_appended - 1) % math.ceil(threshold / seg_len) + 1
        counts = {
            **prefix_counts("over", self.over.counts(state.over, num_segments)),
            "num_tokens": exactly(state.num_tokens, num_appended * seg_len),
            "document": Count(state.document, 0, torch.iinfo(torch.int64).max),
            "segment": exactly(state.segment, num_segments),
        }
        if isinstance(state.pending_len, Tensor):
            counts["pending_len"] = exactly(state.pending_len, seg_len if num_segments else 0)
        return counts

    def forward(self, x: Tensor, state: SignalState, valid_len: Tensor) -> MemoryOutput:
        below = self.over(x, state.over, valid_len)
        signal, num_tokens = self.append_pending(state, x.dtype)
        readable = self.project_signal(signal, x.dtype)
        density = self.density(below.query, readable.keys)
        reading = self.read(density, readable.values)
        real = torch.arange(reading.shape[1], device=x.device) < valid_len[:, None]
        histogram = state.histogram
        if self.options.sampling != "linear":
            histogram = density.histogram(real, num_bins=self.options.num_bins)
        evicted = below.evicted
        pending = evicted.rows.detach().to(state.pending.dtype, copy=True)
        if self.spec.short_first:
            pending = torch.where(real[..., None], pending, 0.0)
        new_state = SignalState(
            over=below.state,
            coefficients=signal.detach(),
            num_tokens=num_tokens,
            pending=pending,
            has_pending=evicted.valid,
            histogram=histogram,
            document=state.document,
            segment=state.segment + 1,
            pending_len=valid_len.to(torch.int64, copy=True) if self.spec.short_first else (),
        )
        num_after = self.num_after
        num_before = below.y.shape[1] - reading.shape[1] - num_after
        reading = self.dropout(reading)
        if num_before or num_after:  # a pad of nothing copies
            reading = F.pad(reading, (0, 0, num_before, num_after))
        y = below.y + reading
        aux = dict(below.aux)
        for name, loss in self.regulariser(density, real & (num_tokens > 0)[:, None]).items():
            aux[name] = aux.get(name, 0.0) + loss
        # Nothing ever leaves the signal; a second signal over this one would take the same evicted rows.
        return MemoryOutput(y, new_state, aux, below.query, evicted, below.logs)

    def after_block(self, rows: Tensor, state: SignalState) -> SignalState:
        return replace(state, over=self.over.after_block(rows, state.over))

    @property
    def keeps_outputs(self) -> bool:
        return self.over.keeps_outputs

    def open_segment(self, state: SignalState, rows: Tensor) -> Opened:
        over = self.over.open_segment(state.over, rows)
        readable = self.project_signal(self.append_pending(state, rows.dtype)[0], rows.dtype)
        return Opened(InfiniteOpenLanes(over.lanes, heads_and_lanes(readable)), over.shared)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        over, lane_first = opened.lanes
        below = self.over.step_rows(x, Opened(over, opened.shared), places)
        readable = heads_and_lanes(lane_first)
        reading = self.read(self.density(below.query, readable.keys), readable.values)
        lanes = InfiniteOpenLanes(below.opened.lanes, lane_first)
        return StepOutput(below.y + reading, below.query, Opened(lanes, below.opened.shared))

    @torch.no_grad()
    def inspect(self, x: Tensor, state: SignalState, valid_len: Tensor, trace: Trace | None = None) -> Inspection:
        return inspect_signal(self, x, state, valid_len, trace)

    def forget(self, state: SignalState, begin: Tensor, end: Tensor, trace: Trace | None = None) -> SignalState:
        return forget_signal(self, state, begin, end, trace)


def heads_and_lanes(readable: SignalRows) -> SignalRows:
    """Exchange the first two axes, those of heads and lanes."""
    return SignalRows(*(part.transpose(0, 1) for part in readable))
