"""Parts of the Block-Recurrent Transformer: attention with unit keys and queries, position biases, gates, the cell.

Source: Hutchins et al. 2022 and the authors' code (google-research/meliad, Apache-2.0), from which details come that
the paper leaves open; rewritten. Shape letters: B lanes, T tokens, W window, S state vectors, D model, H heads, K
head width, F inner width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.convolution import Tail, short_convolution
from dist_mem.nn.layers import Dropout, Projection
from dist_mem.nn.norms import ExactNorm
from dist_mem.nn.unit_attention import NUM_BUCKETS, buckets, unit

NOTHING = -1000.0  # the score of a row of zeros that everything sees: what sees nothing else reads 0


class CellRows(NamedTuple):
    """Rows as attention reads them. Queries and keys have length 1; queries are multiplied by the scale of the head."""

    key: Tensor  # (B, H, T, K)
    value: Tensor  # (B, H, T, K)
    query: Tensor  # (B, H, T, K), for rows of the same kind: tokens read tokens, and states read states
    cross_query: Tensor  # (B, H, T, K), for rows of the other kind
    content: Tensor  # (B, H, T, K), the queries of `query` as projected


class CellHeads(nn.Module):
    """The projections of tokens or of states: both directions share keys and values, and differ in the queries."""

    def __init__(self, d_model: int, *, num_heads: int, d_head: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.rows = Projection(d_model, 4 * num_heads * d_head)  # keys, values, queries, cross queries
        self.scale = nn.Parameter(torch.ones(num_heads))
        self.cross_scale = nn.Parameter(torch.ones(num_heads))

    def project(self, rows: Tensor) -> CellRows:
        """Project rows (B, T, D); for the forward of this module."""
        return self.split(self.rows(rows))

    def split(self, projected: Tensor) -> CellRows:
        """Return rows as attention reads them, of projected ones (B, T, 4 H K)."""
        heads = projected.unflatten(-1, (4 * self.num_heads, -1)).transpose(1, 2)
        key, value, query, cross_query = heads.chunk(4, dim=1)
        scale, cross_scale = (part.abs()[:, None, None] for part in (self.scale, self.cross_scale))
        asking = (unit(rows) * by for rows, by in ((query, scale), (cross_query, cross_scale)))
        units = [rows.to(key.dtype) for rows in (unit(key), *asking)]
        return CellRows(units[0], value, units[1], units[2], query)


class TokenHeads(CellHeads):
    """Those of tokens, with a learned bias for each head and bucket of distances (Raffel et al. 2020, "T5")."""

    def __init__(self, d_model: int, *, num_heads: int, d_head: int, kernel: int | None = None) -> None:
        super().__init__(d_model, num_heads=num_heads, d_head=d_head)
        self.table = nn.Parameter(torch.zeros(num_heads, NUM_BUCKETS))
        self.convolution = short_convolution([4 * num_heads * d_head], kernel)

    def after_tail(self, rows: Tensor, tail: Tail) -> tuple[CellRows, Tail]:
        """Project rows (B, T, D), and return them before a convolution too, with the tail that it sees before them."""
        projected = self.rows(rows)
        if self.convolution is None:
            return self.split(projected), ()
        assert isinstance(tail, Tensor)
        before = torch.cat([tail.to(projected.dtype), projected], dim=1)
        return self.split(*self.convolution(before)), before

    def forward(self, rows: Tensor, window: int, tail: Tail = ()) -> tuple[CellRows, Tensor, Tail]:
        """Project rows, and return the biases of distances W, ..., 1 too, (H, W), multiplied by the scale.

        Args:
            rows: (B, T, D).  tail: as in `after_tail`, whose rows before the convolution come last.
        """
        found = buckets(torch.arange(window, 0, -1, device=rows.device))
        chosen = found == torch.arange(NUM_BUCKETS, device=rows.device)[:, None]
        # A product and no index: its backward adds in a fixed order on every device.
        projected, before = self.after_tail(rows, tail)
        return projected, self.table @ chosen.to(self.table.dtype) * self.scale.abs()[:, None], before


class Gate(nn.Module):
    """Mixes the old state and a candidate. Deviation from the paper, as in the authors' code: no bias, no tanh here."""

    def __init__(self, kind: str, d_model: int, *, inner: int) -> None:
        super().__init__()
        self.is_fixed = kind == "fixed"
        if self.is_fixed:
            self.bias = nn.Parameter(torch.zeros(d_model))
        else:
            self.rates = nn.Linear(inner, 2 * d_model)  # forget, input

    def forward(self, old: Tensor, candidate: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new state (B, S, D) in the dtype of the old one, and the share of the old one that is kept.

        Args:
            hidden: (B, S, inner), what the candidate was computed from; the gate of kind lstm reads it.
        """
        candidate = candidate.to(old.dtype)
        if self.is_fixed:
            kept = self.bias.to(old.dtype).sigmoid()
            return kept * old + (1.0 - kept) * candidate, kept.detach().expand_as(old)
        forget, new = self.rates(hidden).to(old.dtype).chunk(2, dim=-1)
        kept = (forget + 1.0).sigmoid()
        return kept * old + (new - 1.0).sigmoid() * candidate, kept.detach()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw small values, as published: with large ones training learns to ignore the state for good."""
        if self.is_fixed:
            self.bias.normal_(std=0.1)
        else:
            std = math.sqrt(0.1 / self.rates.in_features)
            nn.init.trunc_normal_(self.rates.weight, std=std, a=-2 * std, b=2 * std)
            self.rates.bias.normal_(std=0.1)


class StateHeads(CellHeads):
    """Those of the states, which are normed, and each gets the id of its place."""

    def __init__(self, num_states: int, d_model: int, *, num_heads: int, d_head: int) -> None:
        super().__init__(d_model, num_heads=num_heads, d_head=d_head)
        self.norm = ExactNorm(d_model, eps=1e-6)
        self.ids = nn.Parameter(torch.zeros(num_states, d_model))

    def forward(self, states: Tensor, dtype: torch.dtype) -> CellRows:
        """Project states (B, S, D) in `dtype`, that of the activations."""
        return self.project((self.norm(states) + self.ids.to(states.dtype)).to(dtype))


class StateUpdate(nn.Module):
    """The new states from the old ones and what they have read."""

    def __init__(self, d_model: int, *, width: int, d_inner: int, cell: str, gate: str) -> None:
        """Make the layers of a cell: `width` is that of what was read, 2 H K."""
        super().__init__()
        self.cell = cell
        if cell != "single":
            self.project = Projection(width, d_model)
            self.gate = Gate(gate, d_model, inner=width)
        if cell == "dual":
            self.norm = ExactNorm(d_model, eps=1e-6)
        if cell != "skip":
            self.expand = Projection(width if cell == "single" else d_model, d_inner)
            self.contract = Projection(d_inner, d_model)
            self.inner_gate = Gate(gate, d_model, inner=d_inner)

    def forward(self, states: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new states (B, S, D), and the share of the old ones in each entry.

        Args:
            read: (B, S, 2 H K), what the states have read of each other, then of the tokens.
        """
        if self.cell == "single":
            hidden = F.relu(self.expand(read))
            only: tuple[Tensor, Tensor] = self.inner_gate(states, self.contract(hidden).tanh(), hidden)
            return only
        states, kept = self.gate(states, self.project(read), read)
        if self.cell == "skip":
            return states, kept
        hidden = F.relu(self.expand(self.norm(states).to(read.dtype)))
        states, also_kept = self.inner_gate(states, self.contract(hidden), hidden)
        return states, kept * also_kept

    def gates(self) -> list[Gate]:
        return [part for part in self.children() if isinstance(part, Gate)]


def by_key(bias: Tensor, num_queries: int) -> Tensor:
    """Place biases of distances (H, W) so that query i has that of key j, W + i - j, in (H, T, W + T); elsewhere 0.

    Row i is the biases moved right by i places: entry i (W + T) + j of rows that are one entry longer.
    """
    window = bias.shape[1]
    rows = F.pad(bias, (0, num_queries + 1))[:, None].expand(-1, num_queries, -1)
    num_keys = window + num_queries
    return rows.flatten(1)[:, : num_queries * num_keys].unflatten(1, (num_queries, num_keys))


def in_window(num_queries: int, window: int, device: torch.device) -> Tensor:
    """Return which of W + T keys are among the W before query i, (T, W + T) bool: itself is not."""
    place = torch.arange(window + num_queries, device=device) - torch.arange(num_queries, device=device)[:, None]
    return (place >= 0) & (place < window)


def read(
    query: Tensor, rows: tuple[Tensor, Tensor], *, visible: Tensor | None = None, bias: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:  # fmt: skip
    """Attend to keys and values (B, H, J, K) as `shares_of`; return (B, H, T, K), 0 where nothing is visible."""
    key, value = rows
    shares = shares_of(query, key, visible=visible, bias=bias).to(value.dtype)
    return (shares if dropout is None else dropout(shares)) @ value


def shares_of(query: Tensor, key: Tensor, *, visible: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the share of every key in what queries read, (B, H, T, J) float32 or wider; 0 where nothing is visible.

    Args:
        visible: (B, T or 1, J) bool; None: all rows are.  bias: (H, T, J), added to the scores.
    """
    scores = query @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores if bias is None else scores + bias
    if visible is not None:
        scores = scores + torch.where(visible[:, None], 0.0, -torch.inf)  # as `attention.mask_scores`
    return F.pad(scores, (0, 1), value=NOTHING).softmax(dim=-1)[..., :-1]


def merge_parts(*parts: Tensor) -> Tensor:
    """Put the heads of all parts (B, H, T, K) side by side: (B, T, parts H K)."""
    return torch.cat(parts, dim=1).transpose(1, 2).flatten(2)
