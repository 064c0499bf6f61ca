"""Floating-point operations of a forward over complete segments of lanes with full memories, by formula.

Only matrix products and convolutions count; all else is below one per cent. A multiplication and an addition are two
operations, as in torch's own counter. That counter is not used because it imports torch's compiler, which costs a
--check one second; the tests compare the formulas with it. Shape letters: T segment, J keys, D model.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from dist_mem.nn.layer_spec import LayerSpec


@dataclass(frozen=True)
class Flops:
    """Operations that each lane of a forward costs, and operations that do not depend on the number of its lanes."""

    scoring: int = 0  # a forward, per lane
    training: int = 0  # a forward and a backward, per lane, without the recomputation of activation checkpointing
    scoring_once: int = 0  # the same two for operations made once for all lanes
    training_once: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))

    def once(self) -> Flops:
        """Return the same operations as made once for all lanes."""
        return Flops(0, 0, self.scoring, self.training)

    def of_lanes(self, num_lanes: int) -> Flops:
        """Return all operations of a forward of so many lanes, as `scoring` and `training`."""
        return Flops(num_lanes * self.scoring + self.scoring_once, num_lanes * self.training + self.training_once)


def product(rows: int, inner: int, columns: int, *, gradients: int = 2, scored: bool = True) -> Flops:
    """Count the product (rows, inner) @ (inner, columns).

    Args:
        gradients: number of factors, of the two, that get a gradient; each costs one more product of this size.
        scored: false for a product that only training computes.
    """
    forward = 2 * rows * inner * columns
    return Flops(forward if scored else 0, (1 + gradients) * forward)


def relative_attention(spec: LayerSpec, *, context_len: int, context_learns: bool) -> Flops:
    """Count `layers.RelativeAttention` over a context; `context_learns` if the context rows get a gradient."""
    seg_len, d_model, width = spec.seg_len, spec.d_model, spec.num_heads * spec.d_head
    keys = product(context_len, d_model, 2 * width, gradients=1 + context_learns)
    segment = product(seg_len, d_model, 3 * width) + product(seg_len, width, d_model)  # q, k, v, output
    return segment + keys + attending(seg_len, context_len + seg_len, d_model=d_model, width=width)


def attending(num_queries: int, num_keys: int, *, d_model: int, width: int) -> Flops:
    """Count the scores by content and by distance, the table of distances, and the weighted sum of the values."""
    table = product(num_keys + 1, d_model, width, gradients=1).once()
    scores = product(num_queries, width, num_keys) + product(num_queries, width, num_keys + 1)
    return table + scores + product(num_queries, num_keys, width)
