"""`inspect` and `forget` of the infinity-former's signal.

Shape letters: B lanes, T segment, E evicted rows, N basis functions, D model, H heads, P rows of a lane so far, R bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_mem.memory.parts.basis import evaluate_at
from dist_mem.memory.parts.inspection import Inspection, Spans, row_spans, rows_of
from dist_mem.memory.parts.inspector import forget, inspect
from dist_mem.memory.parts.signal import Signal, SignalState
from dist_mem.memory.parts.signal_places import NUM_BINS, Trace, append, bin_spans, without_rows
from dist_mem.nn.named_tuples import replace


def inspect_signal(memory: Signal, x: Tensor, state: SignalState, valid_len: Tensor, trace: Trace | None) -> Inspection:
    """Return what the memory below read, and the mass of the densities in R bins of the signal.

    Values: `mu` and `variance` (H, B, T) of the densities, `histogram` (B, num_bins) of sticky sampling after this
    segment, `regression_error` (B,): squared error of the rows that have just entered, over their squares.
    """
    below = inspect(memory.over, x, state.over, valid_len, trace.over if trace else None)
    output = memory.forward(x, state, valid_len)  # a call would inspect again, see Inspector
    signal, num_tokens = memory.append_pending(state, x.dtype)
    density = memory.density(output.query, memory.project_signal(signal, x.dtype).keys)
    mu, variance = density.moments()
    starts = trace.places if trace else [torch.empty(0, dtype=torch.float64)] * len(x)
    places = [follow_rows(memory, state, lane, start) for lane, start in enumerate(starts)]
    bins = [bin_spans(lane, _spans(memory, len(lane)), NUM_BINS) for lane in places]
    spans = Spans(*(torch.stack(parts).to(x.device) for parts in zip(*bins, strict=True)))
    mass = torch.where((num_tokens > 0)[:, None, None], density.bins(NUM_BINS), 0.0)
    values = {
        **below.values,
        "mu": mu,
        "variance": variance,
        "histogram": output.state.histogram,
        "regression_error": _newest_error(memory, state, signal, places, x.dtype),
    }
    return Inspection({**below.rows, "signal": rows_of(mass, spans)}, values, Trace(below.trace, tuple(places)))


def forget_signal(memory: Signal, state: SignalState, begin: Tensor, end: Tensor, trace: Trace | None) -> SignalState:
    """Return the state without what signal, pending rows and the memory below hold of the tokens in [begin, end).

    Raises:
        NotImplementedError: the memory below evicts rows of any tokens of a segment, see `Memory.evicts_parts`.
        ValueError: the signal holds rows, and there is no trace of where they are.
    """
    if not memory.evicts_parts:
        reason = "its rows may be of any token of their segment, as those that memory.compression = most_used keeps"
        raise NotImplementedError(f"{type(memory).__name__} cannot forget a passage: {reason}")
    if trace is None and (state.num_tokens > 0).any():
        raise ValueError(
            "the long-term memory holds rows whose places are not known: inspect from the document's start"
        )
    over = forget(memory.over, state.over, begin, end, trace.over if trace else None)
    coefficients = state.coefficients.clone()
    kept = state.pending.clone()
    for lane, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        if last <= first:
            continue
        num_pending = int(state.pending_len[lane]) if isinstance(state.pending_len, Tensor) else kept.shape[1]
        pending = _spans(memory, num_pending)
        kept[lane, :num_pending][(pending.begin < last) & (pending.end > first)] = 0.0
        if trace is None or not state.num_tokens[lane]:
            continue
        places = trace.places[lane]
        shift = memory.spec.seg_len if state.has_pending[lane] else 0  # the signal ends before the pending rows
        spans = _spans(memory, len(places))
        taken = (spans.begin - shift < last) & (spans.end - shift > first)
        coefficients[lane] = without_rows(coefficients[lane], places, taken, memory.geometry)
    return replace(state, over=over, pending=kept, coefficients=coefficients)


def spans_of_rows(memory: Signal, num_rows: int) -> Spans:
    """Return the spans of the newest rows of a lane in the signal, (P,), where they are parts of a segment."""
    sizes = {"kept_len": memory.kept_len, "seg_len": memory.spec.seg_len, "per_update": memory.geometry.num_rows}
    return row_spans(num_rows, **sizes, rate=memory.tokens_per_row)


def _spans(memory: Signal, num_rows: int) -> Spans:
    spans, seg_len = spans_of_rows(memory, num_rows), memory.spec.seg_len
    if memory.evicts_parts:
        return spans
    begin = spans.begin.div(seg_len, rounding_mode="floor") * seg_len
    return Spans(begin, begin + seg_len)


def follow_rows(memory: Signal, state: SignalState, lane: int, places: Tensor) -> Tensor:
    """Return the places of a lane's rows in the signal that this segment reads, (P,), of those in the one before."""
    if not state.has_pending[lane]:
        return places
    threshold = memory.options.memory_threshold
    is_first = not state.num_tokens[lane] or (threshold is not None and bool(state.num_tokens[lane] >= threshold))
    if not is_first and not len(places):
        raise ValueError(
            "the long-term memory holds rows whose places are not known: inspect from the document's start"
        )
    num_rows = memory.geometry.num_rows
    if isinstance(state.pending_len, Tensor):
        num_rows = int(state.pending_len[lane])
    moved_by = None if memory.options.sampling == "linear" else memory.positions(state)[lane]
    return append(places, moved_by, num_rows, memory.geometry, is_first=is_first)


def _newest_error(
    memory: Signal, state: SignalState, signal: Tensor, places: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the relative squared error of the newest rows of each lane's signal, (B,); 0 where none entered."""
    entered = memory.pending_input(state, dtype)
    errors = signal.new_zeros(len(signal))
    for lane in range(len(signal)):
        if not state.has_pending[lane]:
            continue
        num_rows = len(entered[lane]) if not isinstance(state.pending_len, Tensor) else int(state.pending_len[lane])
        rows = entered[lane, :num_rows].to(signal.dtype)
        estimate = evaluate_at(memory.geometry, places[lane][-num_rows:], signal) @ signal[lane]
        errors[lane] = (estimate - rows).square().sum() / rows.square().sum().clamp(min=1e-30)
    return errors
