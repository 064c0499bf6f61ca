"""Log-probabilities of passages, each the end of a text that is read from its start with the memory carried.

    passages = [ScoredText(tokens, first_scored=len(context)), ...]
    scores = score_passages(trained, passages, num_lanes=8)

Texts that begin with the same segments share them, so the choices of a question read its context once, and on a CPU a
score is the same bits whatever else is scored (segment_tree.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.data.plan import segment_starts
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.reading import num_rows
from dist_mem.lm_eval.segment_tree import Branches, Node, add_text, count_tokens, read_tree
from dist_mem.runtime.progress import Progress


class ScoredText(NamedTuple):
    """A text, of which the tokens from `first_scored` on are scored."""

    tokens: np.ndarray  # (num_tokens,) ids of any integer type, without BOS
    first_scored: int


class ScoredTextScore(NamedTuple):
    """The score of a passage."""

    log_prob: float  # nats, sum over the scored tokens
    is_greedy: bool  # every scored token is the most probable one


@torch.no_grad()
def score_passages(
    trained: TrainedModel,
    passages: Sequence[ScoredText],
    *,
    num_lanes: int,
    cut: str = "start",
    shown: bool = False,
    finished: Callable[[int, ScoredTextScore], None] = lambda number, score: None,
) -> list[ScoredTextScore]:
    """Score passages, each as `dist_mem.Model.score` scores its text.

    Args:
        cut: as `data.cut`: whether texts are cut into segments from their start or from their end.
        shown: print the progress to stderr.
        finished: called with the number of a passage and its score as soon as that is known.

    Raises:
        EvaluationError: a log-probability is not finite.
    """
    roots, scored, open_nodes = _plant(trained, passages, cut=cut)
    scores = [ScoredTextScore(0.0, True)] * len(passages)
    for number, nodes_left in enumerate(open_nodes):
        if not nodes_left:
            finished(number, scores[number])
    with Progress(count_tokens(roots), "scoring requests", shown=shown) as progress:
        for nodes, output in read_tree(trained, roots, num_lanes=num_lanes):
            assert output.hits is not None, "the model is in evaluation mode"
            nll, hits = output.nll.double().cpu(), output.hits.cpu()
            for lane, node in enumerate(nodes):
                for number, first in scored.pop(node, ()):
                    log_prob, is_greedy = scores[number]
                    log_prob -= float(nll[lane, first : node.length].sum())
                    if not math.isfinite(log_prob):
                        raise EvaluationError(
                            f"the log-likelihood of request {number} is {log_prob}: the model has diverged"
                        )
                    is_greedy = is_greedy and bool(hits[lane, first : node.length].all())
                    scores[number] = ScoredTextScore(log_prob, is_greedy)
                    open_nodes[number] -= 1
                    if not open_nodes[number]:
                        finished(number, scores[number])
                progress.add(node.length)
    return scores


def _plant(
    trained: TrainedModel, passages: Sequence[ScoredText], *, cut: str
) -> tuple[Branches, dict[Node, list[tuple[int, int]]], list[int]]:
    """Return the tree; by node its passages with their first scored row; each passage's number of nodes."""
    seg_len = trained.config.train.seg_len
    roots: Branches = {}
    scored: dict[Node, list[tuple[int, int]]] = {}
    num_nodes = [0] * len(passages)
    for number, (tokens, first_scored) in enumerate(passages):
        edges = [*segment_starts(len(tokens), seg_len=seg_len, cut=cut).tolist(), len(tokens)]
        rows = [seg_len] * (len(edges) - 2) + [_forward_rows(trained, edges[-1] - begin) for begin in edges[-2:-1]]
        whole = np.concatenate(([trained.tokenizer.bos_id], tokens)).astype(np.int32)
        for begin, node in add_text(roots, whole, edges, rows):
            if first_scored < begin + node.length:
                scored.setdefault(node, []).append((number, max(0, first_scored - begin)))
                num_nodes[number] += 1
    return roots, scored, num_nodes


def _forward_rows(trained: TrainedModel, length: int) -> int:
    """Return the rows of the forward pass of a last segment: few sizes, so that lanes of one size are many."""
    return num_rows(trained.model, min(1 << (length - 1).bit_length(), trained.config.train.seg_len))
