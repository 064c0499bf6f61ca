"""Log-probabilities of passages, each the end of a text that is read from its start with the memory carried.

    passages = [Passage(tokens, first_scored=len(context)), ...]
    scores = score_passages(trained, passages, num_lanes=8)

Texts are cut into segments of T, and the segments of all texts are one tree: texts that begin with the same segments
share them, so the choices of a question read its context once. Every forward pass has `num_lanes` lanes, some idle, and
a number of rows that follows from the segment alone. So on a CPU a score is the same bits whatever else is scored. The
tree is walked depth first, which bounds the memories in use. Shape letters: B lanes, T segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.plan import START, segment_starts
from dist_mem.data.segments import IDLE, Segment, collate
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.generation.reading import num_rows
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState
from dist_mem.runtime.progress import Progress


class ScoredText(NamedTuple):
    """A text, of which the tokens from `first_scored` on are scored."""

    tokens: np.ndarray  # (num_tokens,) ids of any integer type, without BOS
    first_scored: int


class ScoredTextScore(NamedTuple):
    """The score of a passage."""

    log_prob: float  # nats, sum over the scored tokens
    is_greedy: bool  # every scored token is the most probable one


@dataclass(eq=False)
class _Node:
    """One segment, read after the segments above it in the tree."""

    tokens: np.ndarray  # (length + 1,) int64, as of `Segment`
    rows: int  # of its forward pass
    passages: list[tuple[int, int]] = field(default_factory=list)  # passages that it scores: number, first scored row
    below: dict[tuple[int, bytes], _Node] = field(default_factory=dict)
    state: LMState | None = None  # of one lane, before the segment; None: empty memories

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


@torch.no_grad()
def score_passages(
    trained: TrainedModel, passages: Sequence[ScoredText], *, num_lanes: int, cut: str = "start", shown: bool = False
) -> list[ScoredTextScore]:
    """Score passages, each as `dist_mem.Model.score` scores its text.

    Args:
        cut: as `data.cut`: whether texts are cut into segments from their start or from their end.
        shown: print the progress to stderr.

    Raises:
        EvaluationError: a log-probability is not finite.
    """
    roots = _tree(trained, passages, cut=cut)
    log_probs, is_greedy = [0.0] * len(passages), [True] * len(passages)
    with Progress(_num_tokens(roots), "scoring requests", shown=shown) as progress:
        for nodes, output in _read(trained, roots, num_lanes=num_lanes):
            assert output.hits is not None, "the model is in evaluation mode"
            nll, hits = output.nll.double().cpu(), output.hits.cpu()
            for lane, node in enumerate(nodes):
                for number, first in node.passages:
                    log_probs[number] -= float(nll[lane, first : node.length].sum())
                    is_greedy[number] &= bool(hits[lane, first : node.length].all())
                progress.add(node.length)
    for number, log_prob in enumerate(log_probs):
        if not math.isfinite(log_prob):
            raise EvaluationError(f"the log-likelihood of request {number} is {log_prob}: the model has diverged")
    return [ScoredTextScore(*score) for score in zip(log_probs, is_greedy, strict=True)]


def _tree(trained: TrainedModel, passages: Sequence[ScoredText], *, cut: str) -> list[_Node]:
    """Return the first segments of all texts; equal segments after equal segments are one node."""
    seg_len = trained.config.train.seg_len
    first: dict[tuple[int, bytes], _Node] = {}
    for number, passage in enumerate(passages):
        length = len(passage.tokens)
        whole = np.concatenate(([trained.tokenizer.bos_id], passage.tokens)).astype(np.int64)
        edges = [*segment_starts(length, seg_len=seg_len, cut=cut).tolist(), length]
        below = first
        for begin, stop in pairwise(edges):
            tokens = whole[begin : stop + 1]
            rows = seg_len if stop < length else _forward_rows(trained, stop - begin)
            node = below.setdefault((rows, tokens.tobytes()), _Node(tokens, rows))
            if passage.first_scored < stop:
                node.passages.append((number, max(0, passage.first_scored - begin)))
            below = node.below
    return list(first.values())


def _forward_rows(trained: TrainedModel, length: int) -> int:
    """Return the rows of the forward pass of a last segment: few sizes, so that lanes of one size are many."""
    return num_rows(trained.model, min(1 << (length - 1).bit_length(), trained.config.train.seg_len))


def _num_tokens(nodes: Sequence[_Node]) -> int:
    waiting, total = list(nodes), 0
    while waiting:
        node = waiting.pop()
        total += node.length
        waiting += node.below.values()
    return total


def _read(trained: TrainedModel, roots: Sequence[_Node], *, num_lanes: int) -> Iterator[tuple[list[_Node], LMOutput]]:
    """Yield up to `num_lanes` segments at a time with the output of their forward pass, each after those above it.

    The newest segment is read first, with the newest others of its size: memories that wait are then those of few
    branches, however many texts there are.
    """
    empty = init_state(trained)
    arrival = count()
    waiting: dict[int, list[tuple[int, _Node]]] = {}  # rows -> segments that can be read, in order of arrival
    for root in reversed(roots):
        waiting.setdefault(root.rows, []).append((next(arrival), root))
    while waiting:
        rows = max(waiting, key=lambda size: waiting[size][-1][0])
        nodes = [node for _, node in waiting[rows][-num_lanes:]]
        del waiting[rows][-num_lanes:]
        if not waiting[rows]:
            del waiting[rows]
        output = _forward(trained, nodes, rows, empty, num_lanes=num_lanes)
        for lane, node in enumerate(nodes):
            node.state = None
            for child in node.below.values():
                child.state = _lane(output.state, lane)
                waiting.setdefault(child.rows, []).append((next(arrival), child))
        yield nodes, output


def _lane(state: LMState, lane: int) -> LMState:
    """Return a copy of one lane; a view would keep the memories of all lanes."""
    copied: LMState = map_state(lambda part: part[lane : lane + 1].clone(), state)
    return copied


def _forward(trained: TrainedModel, nodes: Sequence[_Node], rows: int, empty: LMState, *, num_lanes: int) -> LMOutput:
    num_idle = num_lanes - len(nodes)
    segments = [Segment(node.tokens, None, None, document=0, is_new_document=False, after=START) for node in nodes]
    batch = collate([*segments, *[IDLE] * num_idle], seg_len=rows, with_recall=False).to(trained.device)
    states = [*(node.state or empty for node in nodes), *[empty] * num_idle]
    state = map_state(lambda *lanes: torch.cat(lanes), *states)
    output: LMOutput = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
    return output
