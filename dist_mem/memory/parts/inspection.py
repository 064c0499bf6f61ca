"""What a memory layer read, and from which tokens: the answer of `Inspectable.inspect`.

Tokens are counted from the first token of the segment that reads: it is token 0, and the newest token in the memory is
token -1. Shape letters: B lanes, T segment, R rows, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEGMENT, SUMMARY, SIGNAL = "segment", "summary", "signal"  # kinds of rows, beside memory and compressed


class Spans(NamedTuple):
    """The tokens that rows came from; begin = end for a row that holds nothing."""

    begin: Tensor  # (B, R) int64, the first of them
    end: Tensor  # (B, R) int64, one past the last


class Rows(NamedTuple):
    """Rows that a layer reads, how much each query reads of each, and the tokens that they came from."""

    weights: Tensor  # (H, B, T, R) float32 or wider, probability mass; 0 for a row that holds nothing
    spans: Spans


class Inspection(NamedTuple):
    """What one layer read in one segment. Queries past `valid_len` have values without a meaning."""

    # By kind: segment | memory | compressed | summary | signal. The weights of those that share a softmax sum to 1, or
    # to 0 where a query finds nothing to read; those of `signal` sum to the mass that its densities have in [0, 1].
    # A row of `summary` holds something of all tokens of its span, which begins with the document.
    rows: Mapping[str, Rows] = MappingProxyType({})
    values: Mapping[str, Tensor] = MappingProxyType({})  # others, by name
    trace: Any = None  # given to the next call for the same lanes; None where their documents begin


def token_spans(length: Tensor, num_rows: int) -> Spans:
    """Return the spans of a cache with a row per token, of which the newest `length` (B,) are valid."""
    begin = torch.arange(-num_rows, 0, device=length.device).expand(len(length), -1)
    return Spans(begin, begin + (begin >= -length[:, None]))


def row_spans(num_rows: int, *, kept_len: int, seg_len: int, per_update: int, rate: int) -> Spans:
    """Return the spans of a lane's rows, oldest first, both (R,), which are older than `kept_len` tokens.

    A segment has `per_update` rows, each from `rate` tokens; tokens at its end that fill no row are in none.
    """
    age = torch.arange(num_rows - 1, -1, -1)  # 0: the newest row
    begin = (per_update - 1 - age % per_update) * rate - (age // per_update + 1) * seg_len - kept_len
    return Spans(begin, begin + rate)


def rows_of(weights: Tensor, spans: Spans) -> Rows:
    """Return rows with weights (H, B, T, R) in float32 or wider."""
    return Rows(weights.detach().to(torch.promote_types(weights.dtype, torch.float32)), spans)


def segment_rows(weights: Tensor, valid_len: Tensor) -> Rows:
    """Return the rows of the segment itself, (H, B, T, T)."""
    begin = torch.arange(weights.shape[-1], device=weights.device).expand(len(valid_len), -1)
    return rows_of(weights, Spans(begin, begin + (begin < valid_len[:, None])))


def summary_rows(weights: Tensor, num_tokens: Tensor) -> Rows:
    """Return rows (H, B, T, R) that summarise all tokens before the segment, of which lanes have num_tokens (B,)."""
    begin = -num_tokens[:, None].expand(-1, weights.shape[-1])
    return rows_of(weights, Spans(begin, torch.zeros_like(begin)))


def of_tokens(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the shares of rows that came from tokens: what is read of others, as of learned rows, is left out."""
    masked = {kind: weights * (spans.begin < spans.end)[:, None] for kind, (weights, spans) in rows.items()}
    total = torch.stack([weights.sum(-1, keepdim=True) for weights in masked.values()]).sum(0).clamp(min=1e-30)
    return {kind: Rows(weights / total, rows[kind].spans) for kind, weights in masked.items()}


def tokens_read(trace: Tensor | None, valid_len: Tensor) -> Tensor:
    """Return how many tokens each lane has read before this segment, (B,); for a memory whose trace is this number."""
    return torch.zeros_like(valid_len) if trace is None else trace


def overlaps(spans: Spans, begin: Tensor, end: Tensor) -> Tensor:
    """Return which rows came from a token in [begin, end), both (B,): (B, R) bool; none if the range is empty."""
    reaches = (spans.begin < end[:, None]) & (spans.end > begin[:, None])
    return reaches & (spans.begin < spans.end) & (begin < end)[:, None]
