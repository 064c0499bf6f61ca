"""Memories with one bug each, for tests/contract/test_check_memory.py; apart from its bug, each is Transformer-XL."""

from typing import Any

import torch
from torch import Tensor, nn

from dist_mem.memory.base import Memory, MemoryOutput, Opened, Places, StepOutput
from dist_mem.memory.parts.inspection import Inspection, Rows, Spans, overlaps, token_spans
from dist_mem.memory.transformer_xl import TransformerXL, TransformerXLState
from dist_mem.nn.layers import newest_rows


class FutureLeak(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(y=output.y + 0.1 * x.mean(dim=1, keepdim=True))


class PaddingLeak(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        return super().forward(x, state, valid_len)._replace(aux={"size": x.square().mean((1, 2))})


class LoggedPadding(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        return super().forward(x, state, valid_len)._replace(logs={"size": x.detach().square().mean((1, 2))})


class MutatedState(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        state.hidden.mul_(0.5)
        return super().forward(x, state, valid_len)


class MutatedInput(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        x.data.add_(1.0)
        return output


class LaneMixing(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(y=output.y + 0.1 * state.hidden.mean((0, 1)).to(x.dtype))


class ForgottenReset(TransformerXL):
    """Keeps part of the memory in the module, which is never reset."""

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        before = getattr(self, "kept", torch.zeros_like(x))
        output = super().forward(x, state, valid_len)
        self.kept = x.detach().clone() if before.shape != x.shape else before + x.detach()
        return output._replace(y=output.y + 0.1 * before.to(x.dtype) if before.shape == x.shape else output.y)


class NotEmptyAtFirst(TransformerXL):
    """Returns another empty memory on every call: a reset lane differs from a new one."""

    calls = 0

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> TransformerXLState:
        NotEmptyAtFirst.calls += 1
        state = super().init_state(document_ids, device, dtype)
        return TransformerXLState(
            state.hidden + NotEmptyAtFirst.calls, torch.full_like(state.length, self.options.mem_len)
        )


class BranchOnData(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output if state.length.sum() > 0 else output._replace(y=output.y * 1.0)


class GradientThroughState(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        hidden = torch.cat([state.hidden, x.to(state.hidden.dtype)], dim=1)[:, -self.options.mem_len :]
        return output._replace(state=output.state._replace(hidden=hidden))


class UnstableDtype(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(state=output.state._replace(hidden=output.state.hidden.to(x.dtype)))


class GrowingState(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        hidden = torch.cat([output.state.hidden, output.state.hidden[:, :1]], dim=1)
        return output._replace(state=output.state._replace(hidden=hidden))


class KeepsMoreThanItSays(TransformerXL):
    @property
    def kept_len(self) -> int:
        return 0


class AliasOfInput(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        tail = x.detach()[:, : self.options.mem_len].to(state.hidden.dtype)
        hidden = tail if tail.shape == state.hidden.shape else output.state.hidden
        return output._replace(state=output.state._replace(hidden=hidden))

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"mem_len": seg_len}


class OwnRandomness(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(y=output.y + 0.01 * torch.rand(1).to(x.dtype))


class WeightElsewhere(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(y=output.y + x @ self.attention.query.weight.mT @ self.attention.query.weight)


class UnusedParameter(TransformerXL):
    """Has a parameter that gets no gradient."""

    def __init__(self, spec: Any, options: Any) -> None:
        super().__init__(spec, options)
        self.gate = nn.Linear(spec.d_model, spec.d_model)

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        with torch.no_grad():
            gate = self.gate(x)
        return output._replace(y=output.y + gate)


class WritesGetNoGradient(TransformerXL):
    """Writes with separate weights, which get no gradient, as the state is a constant to its readers."""

    def __init__(self, spec: Any, options: Any) -> None:
        super().__init__(spec, options)
        self.write = nn.Linear(spec.d_model, spec.d_model)

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        written = self.write(x).detach().to(state.hidden.dtype)
        hidden = torch.cat([state.hidden, written], dim=1)[:, -self.options.mem_len :]
        return output._replace(state=output.state._replace(hidden=hidden))


class RaisesInResetParameters(TransformerXL):
    gate: nn.Parameter  # it has none

    def reset_parameters(self) -> None:
        self.gate.fill_(0.5)


class CountsRows(TransformerXL):
    """Computes other outputs for a segment of fewer rows, which Transformer-XL's `min_seg_len` allows."""

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        output = super().forward(x, state, valid_len)
        return output._replace(y=output.y * x.shape[1])


class StepsWithoutMemory(TransformerXL):
    """Opens a segment as if the memory were empty."""

    can_step = True

    def open_segment(self, state: TransformerXLState, rows: Tensor) -> Opened:
        return super().open_segment(state._replace(length=torch.zeros_like(state.length)), rows)


class StepsInOneLane(TransformerXL):
    """Takes the places of the first lane for those of all."""

    can_step = True

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return super().step_rows(x, opened, places._replace(row=places.row[:1].expand_as(places.row)))


class ForgetsWithoutBeingAsked(Memory):
    """It is no `Inspectable`, so nobody would call its method."""

    def forget(self, state: Any, begin: Tensor, end: Tensor, trace: Any = None) -> Any:
        return state


class ForgetsEverything(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        return super().forward(x, state, valid_len)._replace(state=state)


class ReadsInvalidRows(TransformerXL):
    """Attends to invalid rows, up to the longest lane's length: lanes are mixed."""

    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        longest = state.length.amax().expand_as(state.length)
        output = super().forward(x, TransformerXLState(state.hidden, longest), valid_len)
        assert newest_rows(longest, state.hidden.shape[1]).dtype == torch.bool
        return output


class InspectionChangesState(TransformerXL):
    """Marks the rows that it has been asked about."""

    def inspect(self, x: Tensor, state: TransformerXLState, valid_len: Tensor, trace: None = None) -> Inspection:
        state.hidden.add_(1.0)
        return super().inspect(x, state, valid_len, trace)


class SpansOfTheFuture(TransformerXL):
    """Counts tokens from the memory's first row on, so that rows of the segment are later than their queries."""

    def inspect(self, x: Tensor, state: TransformerXLState, valid_len: Tensor, trace: None = None) -> Inspection:
        found = super().inspect(x, state, valid_len, trace)
        moved = {
            kind: Rows(weights, Spans(spans.begin + self.options.mem_len, spans.end + self.options.mem_len))
            for kind, (weights, spans) in found.rows.items()
        }
        return found._replace(rows=moved)


class WeightsAreNoShares(TransformerXL):
    def inspect(self, x: Tensor, state: TransformerXLState, valid_len: Tensor, trace: None = None) -> Inspection:
        found = super().inspect(x, state, valid_len, trace)
        return found._replace(rows={kind: Rows(2.0 * weights, spans) for kind, (weights, spans) in found.rows.items()})


class ForgetsNothing(TransformerXL):
    def forget(self, state: TransformerXLState, begin: Tensor, end: Tensor, trace: None = None) -> TransformerXLState:
        return state


class ForgetsInAllLanes(TransformerXL):
    def forget(self, state: TransformerXLState, begin: Tensor, end: Tensor, trace: None = None) -> TransformerXLState:
        return super().forget(state, begin.amin().expand_as(begin), end.amax().expand_as(end), trace)


class ForgetsInPlace(TransformerXL):
    def forget(self, state: TransformerXLState, begin: Tensor, end: Tensor, trace: None = None) -> TransformerXLState:
        spans = token_spans(state.length, self.options.mem_len)
        state.hidden[overlaps(spans, begin, end)] = 0.0
        return super().forget(state, begin, end, trace)
