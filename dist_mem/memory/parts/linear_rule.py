"""The rule of linear memories: a matrix per head that every token may decay, writes to and reads.

    S <- diag(alpha) S + beta k (v - (diag(alpha) S)^T k)^T    by the delta rule
    S <- diag(alpha) S + beta k v^T                            without it
    o  = S^T q

Once token by token, as written here (`recurrent_rule`), and once in chunks (`chunked_rule`): Yang et al. 2024a, arXiv
2312.06635, sec. 4.3 (vector decays, secondary chunks), 2024b, 2406.06484, sec. 3.2 (delta rule), Yang et al. 2025,
2412.06464, sec. 3.3 (both, with scalar decays), Kimi Team 2025, 2510.26692, sec. 3 (both, with vector decays). Shape
letters: B lanes, H heads, T segment, N chunks of C tokens, K and V widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SUB_LEN = 8  # tokens of a secondary chunk: within it, vector decays cost its length times K numbers per token


class RuleTokens(NamedTuple):
    """What the rule reads of every token, float32 at least; a token with beta and decay 0 changes nothing."""

    query: Tensor  # (B, H, T, K), scaled
    key: Tensor  # (B, H, T, K)
    value: Tensor  # (B, H, T, V)
    decay: Tensor  # (B, H, T, 1) or, for a decay per row of the matrix, (B, H, T, K): log of alpha, at most 0
    beta: Tensor  # (B, H, T), how much of a value is written


def recurrent_rule(tokens: RuleTokens, matrix: Tensor, *, delta: bool) -> tuple[Tensor, Tensor]:
    """Apply the rule a token at a time: the reference for `chunked_rule`, which has the same arguments."""
    read = []
    for query, key, value, decay, beta in zip(
        *(part.split(1, dim=2) for part in tokens), strict=True
    ):  # rows (., 1, .)
        matrix = decay.exp().mT * matrix
        old = key @ matrix if delta else 0.0
        matrix = matrix + key.mT * (beta[..., None] * (value - old))
        read.append(query @ matrix)
    return torch.cat(read, dim=2), matrix


def chunks(seg_len: int, chunk_len: int, *, sub_len: int = 1) -> tuple[int, int]:
    """Return the size and the number of chunks of a segment; the last is filled up with padding.

    A size is a multiple of `sub_len`, or less than it.
    """
    size = min(seg_len, chunk_len)
    if size > sub_len:
        size = min(-(-size // sub_len), chunk_len // sub_len) * sub_len
    return size, -(-seg_len // size)


def chunked_rule(tokens: RuleTokens, matrix: Tensor, *, delta: bool, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Apply the rule to a segment in chunks.

    By the delta rule the corrections R of all tokens of a chunk follow from one triangular system,
    (I + L) R = beta (V - e^c K S); without it they are beta V. What does not depend on S
    is computed for all N chunks together: a GPU waits for launches otherwise.

    Args:
        matrix: (B, H, K, V), S before the segment.
        chunk_len: C; it changes no result but for rounding.

    Returns:
        What tokens read (B, H, T, V), and S after the segment.
    """
    seg_len, is_scalar = tokens.beta.shape[2], tokens.decay.shape[-1] == 1
    size, num_chunks = chunks(seg_len, chunk_len, sub_len=1 if is_scalar else SUB_LEN)
    missing = size * num_chunks - seg_len
    query, key, value, decay = (F.pad(rows, (0, 0, 0, missing)).unflatten(2, (-1, size)) for rows in tokens[:4])
    beta = F.pad(tokens.beta, (0, missing)).unflatten(2, (-1, size))[..., None]
    total = decay.cumsum(-2)  # (B, H, N, C, .), log of what is left at a token of the matrix before its chunk
    left = total[..., -1:, :]
    pairs = (scalar_pairs if is_scalar else vector_pairs)(key, total)
    parts = [beta * value, query * total.exp(), (key * (left - total).exp()).mT, left.exp().mT]
    if delta:
        scaled = beta * key
        one = torch.eye(size, device=beta.device, dtype=beta.dtype)
        parts += [scaled * total.exp(), one + pairs(scaled).tril(-1)]
    # Only what follows depends on the chunk before.
    read, written = [], []
    for new, asking, keys, kept, *system in zip(*(part.unbind(2) for part in parts), strict=True):
        if delta:
            of_matrix, lower = system
            new = torch.linalg.solve_triangular(lower, new - of_matrix @ matrix, upper=False, unitriangular=True)
        read.append(asking @ matrix)
        written.append(new)
        matrix = kept * matrix + keys @ new
    rows = torch.stack(read, 2) + pairs(query) @ torch.stack(written, 2)
    return rows.flatten(2, 3)[:, :, :seg_len], matrix


def scalar_pairs(keys: Tensor, total: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of rows (B, H, C, K): the products of each with all keys up to it, decayed, (B, H, C, C).

    Axes between H and C are kept, here and in `vector_pairs`.

    Args:
        keys: (B, H, C, K).
        total: (B, H, C, 1), cumulated logs of decays.
    """
    later, earlier = total.view_as(total), total.mT
    # Never e^(c_i - c_j) for i < j, which overflows.
    between = (later - earlier).masked_fill(later_keys(total), -torch.inf).exp()
    return lambda rows: rows @ keys.mT * between


def vector_pairs(keys: Tensor, total: Tensor) -> Callable[[Tensor], Tensor]:
    """Do the same for decays that differ by row of the matrix, `total` (B, H, C, K).

    Such a decay cannot be taken out of the product over K. Between secondary chunks of c tokens it is split at the
    first token of the later one, e^(c_i - c_first) e^(c_first - c_j): both are at most 1. Within one it is computed for
    every pair. Shape letters: N secondary chunks here, C = N c.
    """
    sub_len = min(SUB_LEN, keys.shape[-2])
    now, own = (part.unflatten(-2, (-1, sub_len)) for part in (total, keys))  # (B, H, N, c, K)
    within = (now[..., :, None, :] - now[..., None, :, :]).masked_fill(later_keys(now)[..., None], -torch.inf)
    within = within.exp() * own[..., None, :, :]  # (B, H, N, c, c, K)
    first = now[..., :1, :]
    places = torch.arange(keys.shape[-2], device=keys.device).unflatten(0, (-1, sub_len))
    is_later = places.flatten() >= places[:, :1]  # (N, C)
    before = (first - total[..., None, :, :]).masked_fill(is_later[..., None], -torch.inf)
    before = before.exp() * keys[..., None, :, :]  # (B, H, N, C, K)
    since = (now - first).exp()
    same = torch.eye(len(places), device=keys.device, dtype=keys.dtype)[:, None, :, None]

    def products(rows: Tensor) -> Tensor:
        mine = rows.unflatten(-2, (-1, sub_len))
        inside = (within * mine[..., None, :]).sum(-1)  # (B, H, N, c, c)
        earlier = ((mine * since) @ before.mT).unflatten(-1, (-1, sub_len))  # (B, H, N, c, N, c)
        return (earlier + same * inside[..., None, :]).flatten(-2).flatten(-3, -2)

    return products


def later_keys(total: Tensor) -> Tensor:
    """Return where a key (a column) is later than a row, (C, C) bool."""
    size = total.shape[-2]
    return torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
