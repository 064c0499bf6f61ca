"""The rules of `Inspectable.inspect` and `Inspectable.forget`; a memory that implements neither breaks none.

Each is a function that raises BrokenRuleError, as those in rules.py. Shape letters: B lanes, T segment, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dist_mem.contract.subject import CheckedMemory, require, require_same
from dist_mem.memory.base import map_state
from dist_mem.memory.parts.inspection import Inspection, overlaps
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import LMOutput, LMState, MemoryLM

_FAR = 1 << 30  # tokens: before any document's start


@torch.no_grad()
def _inspect(subject: CheckedMemory, model: MemoryLM) -> Iterator[tuple[LMState, LMOutput, Inspector]]:
    """Read documents of whole segments: yield the state before each, its output, and what was inspected."""
    state = subject.empty_state(model)
    with Inspector(model.memories()) as inspector:
        for number, segment in enumerate(subject.segments()):
            output = model(*segment, subject.lengths(number), state=state)
            yield state, output, inspector
            state = output.state
            inspector.commit()


@torch.no_grad()
def inspection_changes_nothing(subject: CheckedMemory) -> None:
    """Check that outputs and states are the same bits with and without inspection."""
    model = subject.model()
    plain = [(output.nll.clone(), output.state) for output in subject.read(model)]
    for (nll, state), (_, output, _) in zip(plain, _inspect(subject, model), strict=True):
        require(torch.equal(nll, output.nll), "losses differ while the memory is inspected")
        require_same(state, output.state, "the state differs while the memory is inspected")


def weights_are_shares_of_the_past(subject: CheckedMemory) -> None:
    """Check that a query's weights sum to 1 over the rows that share a softmax, and that no row is of a later token.

    They may sum to 0 where no row is of an earlier token: the first token of a document may not see itself.
    """
    for number, (_, _, inspector) in enumerate(_inspect(subject, subject.model())):
        real = torch.arange(subject.size.seg_len) < subject.lengths(number)[:, None]
        for layer in inspector.layers:
            _check_rows(layer, real)


def _check_rows(layer: Inspection, real: Tensor) -> None:
    total: Tensor | float = 0.0
    has_earlier = torch.zeros_like(real)
    for kind, (weights, spans) in layer.rows.items():
        mass = torch.where(real, weights.sum(dim=-1), 0.0)
        require(weights.min() >= 0.0 and mass.max() < 1.0 + 1e-4, f"weights of {kind} are no shares")
        empty = (spans.begin >= spans.end)[:, None]
        require(not (weights * (empty & real[..., None])).any(), f"a row of {kind} that holds nothing is read")
        query = torch.arange(real.shape[1])
        later = (spans.begin[:, None] > query[:, None]) & real[..., None]
        require(not (weights * later).any(), f"a query reads a row of {kind} that is of a later token")
        if kind != "segment":
            require((spans.end <= 0).all(), f"rows of {kind} are of tokens of the segment")
        if kind != "signal":
            has_earlier |= ((spans.begin < spans.end)[:, None] & (spans.begin[:, None] < query[:, None])).any(dim=-1)
            total = total + torch.where(real, weights.sum(dim=-1), 1.0)
    if isinstance(total, Tensor):
        number = len(layer.rows) - ("signal" in layer.rows)
        total = torch.where(real, total, total - number + 1)
        is_whole = (total - 1.0).abs() < 1e-4
        require((is_whole | (~has_earlier & (total == 0.0))).all(), "the weights that share a softmax do not sum to 1")


@torch.no_grad()
def forgetting_takes_out_what_is_named(subject: CheckedMemory) -> None:
    """Check that an empty range changes no bit of a lane's outputs, and that rows of a range get no weight any more."""
    model = subject.model()
    *_, (_, output, inspector) = _inspect(subject, model)
    inspector.commit()
    whole = output.state
    copy = map_state(torch.clone, whole)
    begin = torch.full((subject.size.lanes,), -_FAR)
    begin[0] = 0  # lane 0 forgets nothing
    end = torch.zeros_like(begin)
    try:
        state = whole._replace(blocks=inspector.forget(whole.blocks, begin, end))
    except NotImplementedError:
        return
    require_same(whole, copy, "forget changes the state in place")
    segment = subject.segments(3)[0]
    kept = model(*segment, subject.full_lengths(), state=whole).nll
    with inspector:
        without = model(*segment, subject.full_lengths(), state=state).nll
    require(torch.equal(kept[0], without[0]), "a lane that forgets nothing has other losses")
    for layer in inspector.layers:
        for kind, (weights, spans) in layer.rows.items():
            taken = overlaps(spans, begin, end)[:, None]
            if kind not in ("segment", "signal"):  # a density reads places, whatever they hold
                require(not (weights * taken).any(), f"a row of {kind} is still read after it was taken out")
