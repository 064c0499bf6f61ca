"""The counterfactual: what would each token have cost without one passage in the memory?

Before a segment is read, the rows of one passage are taken out (`Inspectable.forget`), and the segment is read again;
the memory that is carried on keeps the passage. This costs a forward of the segment per passage; passages share
forwards as lanes. Rows of later passages stay: what they have already taken from the passage, they keep.
Shape letters: N tokens of the document, P passages, T segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.config.memory_blocks import describe_memory
from dist_mem.data.batch import IGNORE
from dist_mem.data.documents import Document
from dist_mem.errors import UnusableError
from dist_mem.evaluation.scoring import check_losses
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.inspection.attended_passages import mass_by_span, mass_in, memory_rows
from dist_mem.inspection.walk import SegmentReading, walk
from dist_mem.memory.base import Inspectable, map_state, named_tensors
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import LMState
from dist_mem.runtime.progress import Progress

LANES = 16  # passages that share a forward
MOST = 32  # passages tried per segment


class TokenSpan(NamedTuple):
    """The tokens at positions [begin, end) of a document; -1 is its BOS."""

    begin: int
    end: int


class Removals(NamedTuple):
    """One segment, read again without each of several passages."""

    first: int  # position of the first target
    passages: list[TokenSpan]  # P, oldest first
    rise: Tensor  # (P, T) float32, by how many nats each target's loss rises; nan where it is not scored


class MostHarmful(NamedTuple):
    """Per token, the passage whose removal raises its loss most; begin = end = 0 and nan where none was removed."""

    begin: Tensor  # (N,) int64, position
    end: Tensor  # (N,) int64
    rise: Tensor  # (N,) float32, nats; negative if every removal helps


@dataclass(frozen=True)
class Counterfactual:
    """The document without passages of it, each segment of which some passage was in the memory."""

    num_tokens: int
    removals: list[Removals]  # in the order of the document

    def most_harmful(self) -> MostHarmful:
        """Return, per token, the passage that it needs most."""
        begin, end = torch.zeros(2, self.num_tokens, dtype=torch.int64)
        rise = torch.full((self.num_tokens,), torch.nan)
        for first, passages, rises in self.removals:
            worst = rises.nan_to_num(-torch.inf).max(dim=0)
            is_scored = ~rises[0].isnan()
            here = first + is_scored.nonzero().flatten()
            places = torch.tensor(passages)[worst.indices[is_scored]]
            begin[here], end[here] = places[:, 0], places[:, 1]
            rise[here] = worst.values[is_scored]
        return MostHarmful(begin, end, rise)

    def passages(self) -> list[TokenSpan]:
        """Return every passage that was removed, in order."""
        return sorted(self._rises)

    def without(self, passage: TokenSpan) -> Tensor:
        """Return by how much each token's loss rises without a passage, (N,) float32; nan where it was not removed."""
        rise = torch.full((self.num_tokens,), torch.nan)
        for first, of_segment in self._rises.get(passage, ()):
            rise[first : first + len(of_segment)] = of_segment
        return rise

    def rises(self, passage: TokenSpan) -> tuple[Tensor, Tensor]:
        """Return the positions of the scored tokens that were read without a passage, (K,) int64, and `without` there.

        A book has thousands of passages, each of which is tried in a few segments: a value per token takes minutes.
        """
        parts = [torch.stack([first + torch.arange(len(rise)), rise.double()]) for first, rise in self._rises[passage]]
        places, rises = torch.cat(parts, dim=1)
        is_scored = ~rises.isnan()
        return places[is_scored].long(), rises[is_scored]

    @cached_property
    def _rises(self) -> dict[TokenSpan, list[tuple[int, Tensor]]]:
        """The segments that were read without a passage: position of the first target, and rises, (T,) or fewer."""
        found: dict[TokenSpan, list[tuple[int, Tensor]]] = {}
        for first, passages, rises in self.removals:
            for passage, rise in zip(passages, rises, strict=True):
                found.setdefault(passage, []).append((first, rise[: self.num_tokens - first]))
        return found


@torch.no_grad()
def remove_passages(
    trained: TrainedModel,
    document: Document,
    passages: Sequence[TokenSpan] | None = None,
    *,
    most: int = MOST,
    lanes: int = LANES,
) -> Counterfactual:
    """Read every segment of a document again without each passage that is in the memory before it.

    Args:
        passages: None: the segments of the document.
        most: per segment, at most so many passages: half of them the newest, half the most attended of the others.
        lanes: passages that share a forward.

    Raises:
        EvaluationError: a loss is not finite.
        UnusableError: as `check_forgets`.
    """
    check_forgets(trained)
    removals: list[Removals] = []
    read: list[TokenSpan] = []  # the segments in the memory
    inspector = Inspector(trained.model.memories())
    with Progress(len(document.tokens), "removing passages") as progress:
        steps = walk(trained, document)
        while (step := _next_inspected(steps, inspector)) is not None:
            within = _in_memory(inspector, step, read if passages is None else passages, most)
            if within:
                rise = _rises(trained, inspector, step, within, lanes)
                removals.append(Removals(step.first_input + 1, within, rise))
            if step.is_kept:
                read.append(TokenSpan(step.first_input, step.first_input + step.num_inputs))
                inspector.commit()
            progress.add(step.num_inputs)
    return Counterfactual(len(document.tokens), removals)


def check_forgets(trained: TrainedModel) -> None:
    """Raise UnusableError if some memory of a model, also one below another, cannot forget a passage."""
    reason = cannot_forget(trained)
    if reason is not None:
        raise UnusableError(f"{reason}; compare with its memory emptied instead (always shown, and --empty-at)")


def cannot_forget(trained: TrainedModel) -> str | None:
    """Return why passages cannot be taken out of the memory of a model; None: they can."""
    memories, blocks = trained.model.memories(), init_state(trained, [0]).blocks
    begin, end = (torch.tensor([position], device=trained.device) for position in (-1, 0))
    reason = None
    try:
        Inspector(memories).forget(blocks, begin, end)  # empty memories are asked like full ones
    except NotImplementedError as error:
        reason = str(error)
    for memory, block in zip(memories, blocks, strict=True):
        if getattr(type(memory), "inspect", Inspectable.inspect) is Inspectable.inspect and named_tensors(block):
            reason = reason or f"{type(memory).__name__} has no `inspect`, which says where a passage is"
    return None if reason is None else f"memory.kind is {describe_memory(trained.config.memory)}: {reason}"


def _next_inspected(steps: Iterator[SegmentReading], inspector: Inspector) -> SegmentReading | None:
    """Return the next step, inspected; the forwards between steps are not."""
    with inspector:
        return next(steps, None)


def _in_memory(inspector: Inspector, step: SegmentReading, passages: Sequence[TokenSpan], most: int) -> list[TokenSpan]:
    """Return the passages of which some layer holds a row, at most `most` of them, in their order."""
    if not passages:
        return []
    begin, end = torch.tensor(passages).T
    mass, is_held = torch.zeros(len(passages)), torch.zeros(len(passages), dtype=torch.bool)
    for layer in inspector.layers:
        for rows in memory_rows(layer).values():
            by_span, spans = mass_by_span(rows, step.num_inputs, step.first_input)
            mass += mass_in(by_span, spans, begin, end).sum(dim=0)
            overlap = (spans.begin[:, None] < end) & (spans.end[:, None] > begin) & (spans.begin < spans.end)[:, None]
            is_held |= overlap.any(dim=0)
    held = is_held.nonzero().flatten().tolist()
    if len(held) > most:
        border = len(held) - most // 2
        older, newest = held[:border], held[border:]
        attended = sorted(older, key=lambda number: -float(mass[number]))[: most - most // 2]
        held = sorted([*attended, *newest])
    return [passages[number] for number in held]


def _rises(
    trained: TrainedModel, inspector: Inspector, step: SegmentReading, passages: Sequence[TokenSpan], lanes: int
) -> Tensor:
    """Return by how much the loss of each target rises without each passage, (P, T) float32."""
    parts = []
    for start in range(0, len(passages), lanes):
        some = passages[start : start + lanes]
        nothing = TokenSpan(step.first_input, step.first_input)
        states = [_memory_without(trained, inspector, step, passage) for passage in (nothing, *some)]
        state = map_state(lambda *tensors: torch.cat(tensors), *states)
        tokens, targets, valid_len = (
            part.expand(len(states), *part.shape[1:])
            for part in (step.batch.tokens, step.batch.targets, step.batch.valid_len)
        )
        nll = trained.model(tokens, targets, valid_len, state=state).nll.float()
        check_losses(nll, targets)
        rise = (nll[1:] - nll[0]).masked_fill(step.batch.targets == IGNORE, torch.nan)
        parts.append(rise.cpu())
    return torch.cat(parts)


def _memory_without(trained: TrainedModel, inspector: Inspector, step: SegmentReading, passage: TokenSpan) -> LMState:
    """Return the memory before a step without a passage; of one lane, because a lane's trace is its own."""
    begin, end = (torch.tensor([min(position - step.first_input, 0)], device=trained.device) for position in passage)
    return step.state._replace(blocks=inspector.forget(step.state.blocks, begin, end))
