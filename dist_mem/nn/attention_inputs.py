"""Inputs and outputs of attention; which keys a query may see is a description, so that no mask of pairs is needed.

Shape letters: B lanes, T queries, J keys, M context rows, H heads, K head width. The head axis comes first, (H, B, T,
K): the scores by distance of all lanes are then one product per head with a table that the lanes share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.named_tuples import replace
from dist_mem.nn.position_scores import align_to_keys


class Visible(NamedTuple):
    """Query i of a lane sees the valid keys j of that lane with i + above < j <= i + upto."""

    valid: Tensor  # (B, M) bool, which of the first M keys are valid; the keys after them all are
    num_queries: int  # T
    num_keys: int  # J
    above: int | None = None  # None: no lower limit
    upto: int | None = None  # None: no upper limit
    sees: Tensor | None = None  # (B, T) bool, queries that see keys at all; None: each sees at least one
    is_tail: bool = False  # whether it is known that in every lane the valid ones of the first M keys are their last

    def keys(self) -> Tensor:
        """Return which keys are valid, (B, J) bool."""
        return F.pad(self.valid, (0, self.num_keys - self.valid.shape[1]), value=True)

    def mask(self, queries: slice | None = None, keys: slice | None = None) -> Tensor:
        """Return the mask of a block of queries and keys, or of all: (B, T, J) bool."""
        queries, keys = queries or slice(0, self.num_queries), keys or slice(0, self.num_keys)
        query = torch.arange(queries.start, queries.stop, device=self.valid.device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=self.valid.device)
        mask = self.keys()[:, None, keys]
        if self.upto is not None:
            mask = (key <= query + self.upto) & mask
        if self.above is not None:
            mask = (key > query + self.above) & mask
        return mask if self.sees is None else mask & self.sees[:, queries, None]

    def reach(self, queries: slice) -> slice:
        """Return the keys between the first and the last that any of these queries may see."""
        begin = 0 if self.above is None else max(0, queries.start + self.above + 1)
        return slice(begin, self.num_keys if self.upto is None else min(self.num_keys, queries.stop + self.upto))


class Relative(NamedTuple):
    """Scores by distance: key j adds `query`_i . `table`[:, first - i + j] to the score of query i."""

    query: Tensor  # (H, B, T, K), scaled
    table: Tensor  # (H, K, columns); pairs beyond its columns must be invisible
    first: int

    def by_column(self) -> Tensor:
        """Return the scores of all queries and columns, (H, B, T, columns)."""
        return torch.bmm(self.query.flatten(1, 2), self.table).unflatten(1, self.query.shape[1:3])

    def by_key(self) -> Tensor:
        """Return the scores of all queries and keys, (H, B, T, J), of a table at `layers.key_distances`.

        Only keys up to the query's position are meaningful; the rest must be masked.
        """
        return align_to_keys(self.by_column(), offset=self.query.shape[2] - 1, num_keys=self.table.shape[-1] - 1)


class Inputs(NamedTuple):
    query: Tensor  # (H, B, T, K), scaled
    key: Tensor  # (H, B, J, K)
    value: Tensor  # (H, B, J, K)
    visible: Visible
    relative: Relative | None = None
    bias: Tensor | None = None  # (H, 1, T, J), a constant that is added to the scores


class AttentionRead(NamedTuple):
    """What each query reads."""

    rows: Tensor  # (H, B, T, K)
    log_sum: Tensor | None  # (H, B, T) float32 or wider, log of the sum of exponentials; None if not asked for


def visible_keys(context_valid: Tensor, num_queries: int, *, same_length: bool, is_tail: bool = False) -> Visible:
    """Return which keys the queries of a segment see: `context_valid` (B, M) bool, the keys are context and segment.

    Query i sees the valid context and the segment up to itself; with `same_length` only keys j > i, so exactly M of
    them once the context is full. A query always sees itself, so no row is empty and the softmax never computes 0/0,
    even in idle lanes.
    """
    context_len = context_valid.shape[1]
    above = 0 if same_length else None
    return Visible(
        context_valid, num_queries, context_len + num_queries, above=above, upto=context_len, is_tail=is_tail
    )


def within(visible: Visible, sliding_window: int | None) -> Visible:
    """Return what queries see if each sees only the newest `sliding_window` keys up to its own, itself included.

    Args:
        visible: without this limit; a mask (B, T, J) bool remains one.
    """
    if isinstance(visible, Tensor):
        nothing = visible.new_ones(len(visible), 0)
        return visible & within(Visible(nothing, *visible.shape[1:]), sliding_window).mask()
    if sliding_window is None or sliding_window >= visible.num_keys:
        return visible
    above = visible.num_keys - visible.num_queries - sliding_window
    return replace(visible, above=above if visible.above is None else max(above, visible.above))


def newest_rows(length: Tensor, num_rows: int) -> Tensor:
    """Return the mask of the `length` newest of right-aligned rows: (B,) int64 -> (B, num_rows) bool."""
    return torch.arange(num_rows, device=length.device) >= num_rows - length[:, None]
