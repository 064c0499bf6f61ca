"""A ring of keys and values per head, of which each query reads the k nearest.

Source: Wu et al. 2022, "Memorizing Transformers", sec. 3.1 and 3.2. Rows are constants: only queries, and what scales
them, get a gradient. Token number n of a document, counted from 0, is
in row n mod M. Shape letters: B lanes, H heads, T queries, M rows, k rows that a query reads, K head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.memory.parts.inspection import Spans
from dist_mem.memory.parts.row_mask import Shown

GROUP = 4  # scores whose maximum is compared first; 8 and 16 were slower


class Store(NamedTuple):
    """The rows of all lanes."""

    keys: Tensor  # (B, H, M, K), of length 1; 0 where nothing is written yet
    values: Tensor  # (B, H, M, K)
    num_written: Tensor  # (B,) int64, tokens written so far, also those that are overwritten
    shown: Shown = ()  # (B, M) bool, false for rows that `Inspectable.forget` takes out


def is_written(store: Store) -> Tensor:
    """Return which rows hold a token, (B, M) bool."""
    return torch.arange(store.keys.shape[2], device=store.num_written.device) < store.num_written[:, None]


def readable_rows(store: Store, *, empty: bool) -> Tensor:
    """Return which rows may be read, (B, M) bool; `empty`: also those not written yet, which are 0."""
    readable = is_written(store) | empty
    return readable & store.shown if isinstance(store.shown, Tensor) else readable


def spans_of(store: Store) -> Spans:
    """Return the tokens of the rows, counted from the next segment's first."""
    mem_len = store.keys.shape[2]
    newest = store.num_written[:, None] - 1
    age = (newest - torch.arange(mem_len, device=store.num_written.device)) % mem_len
    return Spans(-1 - age, is_written(store).long() - 1 - age)


@torch.no_grad()
def write(store: Store, keys: Tensor, values: Tensor) -> Store:
    """Write a segment's keys and values, (B, H, T, K), over the oldest rows."""
    mem_len, num_tokens = store.keys.shape[2], keys.shape[2]
    skipped = max(0, num_tokens - mem_len)  # of a segment longer than the ring only the newest tokens
    place = torch.arange(skipped, num_tokens, device=keys.device)
    row = (store.num_written[:, None] + place) % mem_len  # (B, T)
    index = row[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
    shown = store.shown.scatter(1, row, True) if isinstance(store.shown, Tensor) else ()
    return Store(
        store.keys.scatter(2, index, keys[:, :, skipped:].to(store.keys.dtype)),
        store.values.scatter(2, index, values[:, :, skipped:].to(store.values.dtype)),
        store.num_written + num_tokens,
        shown,
    )


@torch.no_grad()
def nearest(query: Tensor, store: Store, *, number: int, search: str, chunk_len: int, empty: bool) -> Tensor:
    """Return the rows of the largest products with each query (B, H, T, K): (B, H, T, k) int64.

    Scores exist for `chunk_len` queries at a time, in the dtype of the queries. Rows not written yet come last.

    Args:
        search: exact: the k nearest | buckets: the nearest of the rows r = j modulo k, for every j < k.
    """
    readable = readable_rows(store, empty=empty)
    last = torch.where(is_written(store), 0.0, -1e6) + torch.where(readable, 0.0, -math.inf)
    last, keys = last[:, None, None].to(query.dtype), store.keys.to(query.dtype).mT
    found = []
    for part in query.split(chunk_len, dim=2):
        scores = part @ keys
        scores += last
        if search == "exact":
            found.append(largest(scores, number))
        else:
            best = scores.unflatten(-1, (-1, number)).argmax(dim=-2)
            found.append(best * number + torch.arange(number, device=best.device))
    return torch.cat(found, dim=2)


def largest(scores: Tensor, number: int) -> Tensor:
    """Return the places of the largest of the last dimension, largest first: `scores.topk(number).indices`, sooner.

    They lie in the `number` groups with the largest maxima, so that two small searches replace a large one; of equal
    scores, either may be taken.
    """
    if scores.shape[-1] % GROUP or scores.shape[-1] < 2 * GROUP * number:
        return scores.topk(number, dim=-1).indices
    groups = scores.unflatten(-1, (-1, GROUP))
    best = groups.amax(dim=-1).topk(number, dim=-1, sorted=False).indices
    candidates = groups.gather(-2, best[..., None].expand(*best.shape, GROUP)).flatten(-2)
    place = candidates.topk(number, dim=-1).indices
    return best.gather(-1, place // GROUP) * GROUP + place % GROUP


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows (B, H, M, K) of an index (B, H, T, k): (B, H, T, k, K)."""
    first = torch.arange(0, rows.shape[:3].numel(), rows.shape[2], device=index.device)  # of each lane and head
    flat = (index + first.unflatten(0, (*rows.shape[:2], 1, 1))).flatten()
    return rows.flatten(0, 2).index_select(0, flat).view(*index.shape, rows.shape[3])  # gather takes 16 times as long


def weigh(query: Tensor, store: Store, index: Tensor, *, empty: bool) -> Tensor:
    """Return the softmax of scaled queries' products with the rows of `index`; 0 for rows that are not readable."""
    readable = readable_rows(store, empty=empty)
    chosen = readable[:, None, None].expand(*index.shape[:3], -1).gather(3, index)
    sees = readable.any(dim=1)[:, None, None, None]
    keys = pick(store.keys, index).to(query.dtype)
    scores = (query[..., None, :] @ keys.mT).squeeze(-2) + torch.where(chosen | ~sees, 0.0, -math.inf)
    return torch.where(chosen, scores.softmax(dim=-1), 0.0)


def read_rows(weights: Tensor, store: Store, index: Tensor) -> Tensor:
    """Return the weighted sum of the values of rows `index`, (B, H, T, K)."""
    values = pick(store.values, index).to(weights.dtype)
    return (weights[..., None, :] @ values).squeeze(-2)
