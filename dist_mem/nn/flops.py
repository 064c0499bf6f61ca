"""Floating-point operations by formula: what one complete segment of one lane costs once its memory is full.

Matrix products and convolutions count, a multiplication and an addition as two operations, as torch's own counter has
it; all else is below a per cent. Formulas and not that counter, because it would import torch's compiler, a second for
a --check; the tests hold them against it. Shape letters: T segment, J keys, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_mem.nn.layer_spec import LayerSpec


@dataclass(frozen=True)
class Flops:
    scoring: int = 0  # a forward
    training: int = 0  # a forward and a backward, without what activation checkpointing computes again

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.scoring + other.scoring, self.training + other.training)


def product(rows: int, inner: int, columns: int, *, gradients: int = 2, scored: bool = True) -> Flops:
    """(rows, inner) @ (inner, columns).

    Args:
        gradients: how many of the two factors get one, each by a product of the same cost.
        scored: false for what only training computes.
    """
    forward = 2 * rows * inner * columns
    return Flops(forward if scored else 0, (1 + gradients) * forward)


def relative_attention(spec: LayerSpec, *, context_len: int, context_learns: bool) -> Flops:
    """`layers.RelativeAttention` over a context; `context_learns` if its rows get a gradient."""
    seg_len, d_model, width = spec.seg_len, spec.d_model, spec.num_heads * spec.d_head
    keys = product(context_len, d_model, 2 * width, gradients=1 + context_learns)
    own = product(seg_len, d_model, 3 * width) + product(seg_len, width, d_model)  # q, k, v, output
    return own + keys + attending(seg_len, context_len + seg_len, d_model=d_model, width=width)


def attending(num_queries: int, num_keys: int, *, d_model: int, width: int) -> Flops:
    """Scores by content and by distance, the table of distances, and the sum of the values."""
    table = product(num_keys + 1, d_model, width, gradients=1)
    scores = product(num_queries, width, num_keys) + product(num_queries, width, num_keys + 1)
    return table + scores + product(num_queries, num_keys, width)
