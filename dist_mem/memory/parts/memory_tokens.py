"""Attention of a segment with memory tokens around it (memory/rmt.py): [cache; read rows; tokens; write rows].

Tokens see the cache, all read rows and the tokens up to themselves: a band, which every back end computes. Read rows
see each other, and write rows see all rows; their scores, of M queries each, are computed by the simple back end.

Keys to the right of a memory row, at j > i in its block, have the scores by distance that the published code gives
them and the paper does not mention: where that code aligns distances with keys, what lies beyond the diagonal comes
from the next row. For j = i + 1 the score by distance is 0. For j = i + delta it is that of query i + 1 at distance
m + R + 1 - delta, near the largest one. All published models have it. So outputs depend on R, the number of rows that
are computed: with M > 2 those of a segment with padding differ from those of its tokens alone.

Shape letters: B lanes, T segment, M memory tokens, R = T + 2 M rows, m valid cache rows, J keys, D model, H heads, K
head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.attention_inputs import Inputs, Relative
from dist_mem.nn.layers import RelativeProjections, masked_softmax, relative_queries, sinusoid_table, visible_keys
from dist_mem.nn.position_scores import add_by_distance


class MemoryTokenOutput(NamedTuple):
    y: Tensor  # (B, R, D), before the residual
    query: Tensor  # (H, B, T, K) of the tokens, before biases
    written: Tensor | None  # (B,) share of the tokens in what write rows read; None without write rows
    weights: Tensor | None  # (H, B, T, cache_len + M + T) of the tokens' reading, where asked for


class ScoredRows(NamedTuple):
    """Queries, keys and values of some rows, and their scores by distance."""

    query: Tensor  # (H, B, R, K), scaled
    key: Tensor  # (H, B, J, K)
    value: Tensor  # (H, B, J, K)
    position_query: Tensor  # (H, B, R, K), scaled
    position: Tensor  # (H, K, J + 1) at distances J - 1 down to 0, then a dummy

    def part(self, queries: slice, keys: slice) -> ScoredRows:
        """Return some queries and keys, of which the last ones are those of the queries."""
        num_keys = keys.stop - keys.start
        return ScoredRows(
            self.query[:, :, queries],
            self.key[:, :, keys],
            self.value[:, :, keys],
            self.position_query[:, :, queries],
            self.position[..., -(num_keys + 1) :],
        )


class MemoryTokenAttention(RelativeProjections):
    """Multi-head attention with relative positions over a cache, memory tokens and the segment."""

    def __init__(self, *, num_tokens: int, at_end: bool, read_cache: bool, **attention: Any) -> None:
        """Make the layer.

        Args:
            num_tokens: M.  at_end: whether there are write rows.  read_cache: whether memory rows see the cache.
        """
        super().__init__(**attention)
        self.num_tokens, self.num_after, self.read_cache = num_tokens, num_tokens if at_end else 0, read_cache

    def forward(
        self, x: Tensor, cache: Tensor, cache_valid: Tensor, valid_len: Tensor, *, weights: bool = False
    ) -> MemoryTokenOutput:
        """Attend from all rows.

        Args:
            x: (B, R, D).  cache: (B, cache_len, D).  cache_valid: (B, cache_len) bool, the newest m are valid.
            valid_len: (B,) int64, real tokens.  weights: whether they are returned too.
        """
        num_tokens, cache_len, num_rows = self.num_tokens, cache.shape[1], x.shape[1]
        seg_len = num_rows - num_tokens - self.num_after
        is_real = torch.arange(seg_len, device=x.device) < valid_len[:, None]
        if self.convolution is not None:  # whose rows after the padding would see it
            x = torch.where(F.pad(is_real, (num_tokens, self.num_after), value=True)[..., None], x, 0.0)
        query, key, value = self.project_heads(x, cache, visible_keys(cache_valid, num_rows, same_length=False))
        table = self.position_keys(x, num_keys=key.shape[2])
        biases = {"content_bias": self.content_bias, "position_bias": self.position_bias}
        content_query, relative = relative_queries(query, table, **biases)
        rows = ScoredRows(content_query, key, value, relative.query, table)
        right = self.right_keys(cache_valid, num_rows, x.dtype) if self.counts_rows else None
        begin = 0 if self.read_cache else cache_len  # of the keys that memory rows see
        read_end, seg_end = cache_len + num_tokens, cache_len + num_tokens + seg_len
        shown = cache_valid[:, begin:], cache_valid.new_ones(len(x), num_tokens)
        before = rows.part(slice(0, num_tokens), slice(begin, read_end))
        parts = [self.read_block(before, right, torch.cat(shown, dim=1))[0]]
        tokens = rows.part(slice(num_tokens, num_tokens + seg_len), slice(0, seg_end))
        visible = visible_keys(torch.cat([cache_valid, shown[1]], dim=1), seg_len, same_length=False)
        by_distance = Relative(tokens.position_query, tokens.position, seg_len - 1)
        attended, token_weights = self.read(Inputs(*tokens[:3], visible, by_distance), weights=weights)
        parts.append(attended)
        written = None
        if self.num_after:
            after = rows.part(slice(num_tokens + seg_len, num_rows), slice(begin, key.shape[2]))
            found, shares = self.read_block(after, right, torch.cat([*shown, is_real, shown[1]], dim=1))
            parts.append(found)
            written = shares.detach()[..., read_end - begin : seg_end - begin].float().sum(-1).mean(dim=(0, 2))
        y = self.merge_output(torch.cat(parts, dim=2))
        return MemoryTokenOutput(y, query[:, :, num_tokens : num_tokens + seg_len], written, token_weights)

    @property
    def counts_rows(self) -> bool:
        """Whether outputs depend on R: some key is two or more to the right of a memory row."""
        return self.num_tokens > 2

    def right_keys(self, cache_valid: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return W_r R_t at the distances of keys two and more to the right, m + R - 1 and less: (H, B or 1, K, M - 2).

        With a cache they differ by lane, as m does.
        """
        num_valid = cache_valid[:1].sum(1) if not cache_valid.shape[1] else cache_valid.sum(1)
        steps = torch.arange(2, self.num_tokens, device=cache_valid.device)
        distances = (num_valid[:, None] + num_rows + 1 - steps).clamp(min=0, max=self.clamp_len)
        table = sinusoid_table(distances.flatten(), self.position.in_features, dtype)
        keys: Tensor = self.position(self.dropout(table))
        return keys.unflatten(-1, (self.num_heads, -1)).unflatten(0, distances.shape).permute(2, 0, 3, 1)

    def read_block(self, rows: ScoredRows, right: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a block of M memory rows reads, (H, B, M, K), and the shares of all keys, (H, B, M, J).

        Args:
            rows: the block and all keys that it sees; the last M are the block's.
            right: see `right_keys`; None for blocks of one or two rows, which read nothing there.
            valid: (B, J) bool.
        """
        content = rows.query @ rows.key.mT
        by_column = rows.position_query @ rows.position[:, None, :, :-1]  # distances J - 1, ..., 0
        if right is not None:
            of_next = F.pad(rows.position_query[:, :, 1:] @ right, (1, 0, 0, 1))  # 0 at the first key to the right
            by_column = torch.cat([by_column, of_next], dim=-1)
        # Key j of row i is column M - 1 + j - i.
        num_columns = content.shape[-1] + self.num_tokens
        by_column = F.pad(by_column, (0, num_columns - by_column.shape[-1]))
        scores = add_by_distance(content, [by_column], [self.num_tokens - 1])
        shares = masked_softmax(scores, valid[:, None]).to(rows.value.dtype)
        return self.attention_dropout(shares) @ rows.value, shares
