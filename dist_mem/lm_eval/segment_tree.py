"""Texts that begin alike are read once: their segments are one tree, read depth first with the memory carried.

    roots: Branches = {}
    path = add_text(roots, tokens, edges, rows)  # the nodes of one text, from its first segment on
    for nodes, output in read_tree(trained, roots, num_lanes=8): ...

Every forward pass has `num_lanes` lanes, some idle, and a number of rows that follows from the segment alone. So on a
CPU the output of a segment is the same bits whatever else is read. Depth first bounds the memories in use. Shape
letters: B lanes, T segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, pairwise

import numpy as np
import torch

from dist_mem.data.plan import START
from dist_mem.data.segments import IDLE, Segment, collate
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.memory.base import map_state
from dist_mem.model import LMOutput, LMState


@dataclass(eq=False, slots=True)
class Node:
    """One segment, read after the segments above it in the tree."""

    tokens: np.ndarray  # (length + 1,) as of `Segment`; a view of the text's, as texts may have a million tokens
    rows: int  # of its forward pass
    below: Branches = field(default_factory=dict)
    state: LMState | None = None  # of one lane, before the segment; None: empty memories

    @property
    def length(self) -> int:
        """Number of tokens of the segment."""
        return len(self.tokens) - 1


Branches = dict[tuple[int, bytes], Node]  # by the rows and a digest of the tokens


def add_text(
    roots: Branches, tokens: np.ndarray, edges: Sequence[int], rows: Sequence[int]
) -> Iterator[tuple[int, Node]]:
    """Add a text to the tree, and yield the first token and the node of each of its segments.

    Args:
        tokens: (num_tokens,) of any integer type, BOS first.
        edges: of the segments: one reads the tokens from an edge up to the next edge, and predicts those one further.
        rows: of the forward pass of each segment.
    """
    below = roots
    for (begin, stop), size in zip(pairwise(edges), rows, strict=True):
        part = tokens[begin : stop + 1]
        node = below.setdefault((size, blake2b(part.tobytes(), digest_size=16).digest()), Node(part, size))
        yield begin, node
        below = node.below


def count_tokens(roots: Branches) -> int:
    """Return how many tokens `read_tree` reads."""
    waiting, total = list(roots.values()), 0
    while waiting:
        node = waiting.pop()
        total += node.length
        waiting += node.below.values()
    return total


@torch.no_grad()
def read_tree(trained: TrainedModel, roots: Branches, *, num_lanes: int) -> Iterator[tuple[list[Node], LMOutput]]:
    """Yield up to `num_lanes` segments at a time with the output of their forward pass, each after those above it.

    The newest segment is read first, with the newest others of its size: memories that wait are then those of few
    branches, however many texts there are.
    """
    empty = init_state(trained)
    arrival = count()
    waiting: dict[int, list[tuple[int, Node]]] = {}  # rows -> segments that can be read, in order of arrival
    for root in reversed(roots.values()):
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
            state = copy_lane(output.state, lane) if node.below else None
            for child in node.below.values():
                child.state = state
                waiting.setdefault(child.rows, []).append((next(arrival), child))
        yield nodes, output


def copy_lane(state: LMState, lane: int) -> LMState:
    """Return a copy of one lane; a view would keep the memories of all lanes."""
    copied: LMState = map_state(lambda part: part[lane : lane + 1].clone(), state)
    return copied


def join_lanes(states: Sequence[LMState]) -> LMState:
    """Return the lanes of all states, one after the other."""
    joined: LMState = map_state(lambda *lanes: torch.cat(lanes), *states)
    return joined


def _forward(trained: TrainedModel, nodes: Sequence[Node], rows: int, empty: LMState, *, num_lanes: int) -> LMOutput:
    num_idle = num_lanes - len(nodes)
    segments = [Segment(node.tokens, None, None, document=0, is_new_document=False, after=START) for node in nodes]
    batch = collate([*segments, *[IDLE] * num_idle], seg_len=rows, with_recall=False).to(trained.device)
    state = join_lanes([*(node.state or empty for node in nodes), *[empty] * num_idle])
    output: LMOutput = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
    return output
