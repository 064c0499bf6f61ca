"""Attention of further rows of an open segment to keys and values that are kept, as generation needs it.

A segment's earlier rows and the context do not change while it is open, so a row costs one row in every layer. The
layers run in evaluation mode, without dropout. Shape letters: B lanes, R further rows, T segment, M context rows, J = M
+ T keys, D model, H heads, G heads of keys, K head width. The lane axis comes first, because lanes begin their segments
at different times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.convolution import Tail


class Places(NamedTuple):
    """Where further rows of the lanes are in their segments: R consecutive places, from another one in each lane."""

    row: Tensor  # (B, R) int64, 0..T - 1
    num_real: Tensor  # (B,) int64, how many of the R rows, the first ones, are real; what others leave is overwritten
    end: int  # one more than the largest place
    behind: Tensor | None  # (B, R) int64, `end - 1 - row`; None: it is 0 everywhere
    seg_len: int  # T


class Opened(NamedTuple):
    """What is kept of an open segment."""

    lanes: Any  # a NamedTuple of tensors, lane first
    shared: Any = ()  # what all lanes share, and no row changes


class StepOutput(NamedTuple):
    """What a memory returns of further rows, as of all rows of a segment in `MemoryOutput`."""

    y: Tensor  # (B, R, D)
    query: Tensor  # (H, B, R, K)
    opened: Opened  # for the rows after these


class StepHeads(NamedTuple):
    """What the attention of further rows reads, before its output projection."""

    rows: Tensor  # (B, R, H * K)
    query: Tensor  # (H, B, R, K), before rotation


class KeptPairs(NamedTuple):
    """Keys and values of the context and, at their places, of the rows read; float32 or wider."""

    pairs: Tensor  # (B, 2 G, J, K), heads of keys, then of values
    hidden: Tensor  # (B, 1, 1, J), -inf for rows of the context that are not valid, else 0
    tail: Tail = ()


class DistanceQuery(NamedTuple):
    """What adds scores by distance; for a number per head and distance K is 1."""

    query: Tensor  # (B, H, R, K)
    table: Tensor  # (H, K, J + 1), see `layers.RelativeProjections.position_keys`; scaled


def places_of(first: Tensor, num_real: Tensor, *, num_rows: int, seg_len: int, device: torch.device) -> Places:
    """Return the places of R rows from `first` (B,) on, of which `num_real` (B,) are real; both int64, on the CPU."""
    row = (first[:, None] + torch.arange(num_rows)).clamp(max=seg_len - 1)
    end = int(row.max()) + 1
    behind = end - 1 - row
    late = behind.to(device) if bool(behind.any()) else None
    return Places(row.to(device), num_real.to(device), end, late, seg_len)


def above_of(same_length: bool) -> int | None:
    """Return the limit of `visible_keys`, for `attend`."""
    return 0 if same_length else None


def lane_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Split the last axis into heads, lane first: (B, R, H * K) -> (B, H, R, K), a view."""
    return rows.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def keep_pairs(pairs: Tensor, valid: Tensor, *, seg_len: int, tail: Tail = ()) -> KeptPairs:
    """Return keys and values of the context (B, 2 G, M, K), of which `valid` (B, M) bool are attended to."""
    pairs = pairs.to(torch.promote_types(pairs.dtype, torch.float32))
    hidden = torch.where(valid, 0.0, -torch.inf).to(pairs.dtype)
    return KeptPairs(F.pad(pairs, (0, 0, 0, seg_len)), F.pad(hidden, (0, seg_len))[:, None, None], tail)


def attend(
    query: Tensor,
    pairs: Tensor,
    to: KeptPairs,
    places: Places,
    *,
    above: int | None = None,
    sees_itself: bool = True,
    num_always: int = 0,
    by_distance: DistanceQuery | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Keep the keys and values of further rows, and attend from these to all up to themselves.

    Args:
        query: (B, H, R, K), not scaled.  pairs: (B, 2 G, R, K), keys and values of the same rows.
        to: what is kept; it is changed in place.
        above: row i sees the keys j > i + above, as in `attention_inputs.Visible`; None: no lower limit.
        sees_itself: false: a row sees only those before it, and reads 0 if there are none.
        num_always: how many of the first keys every row sees, whatever `above` says.
        bias: (B, H, R, keys up to `places.end`), added to the scores.

    Returns:
        (B, R, H * K), in the dtype of the query.
    """
    num_rows, working = query.shape[2], to.pairs.dtype
    context_len = to.pairs.shape[2] - places.seg_len
    num_keys = context_len + places.end
    if num_rows > 1 and places.end == places.seg_len:
        # Rows that a lane does not have may stand at the last place too, and must not overwrite the row that it has.
        own = torch.arange(num_rows, device=query.device).minimum(places.seg_len - 1 - places.row[:, :1])
        pairs = pairs.take_along_dim(own[:, None, :, None], dim=2)
    to.pairs.scatter_(2, (places.row + context_len)[:, None, :, None].expand_as(pairs), pairs.to(working))
    key, value = to.pairs[:, :, :num_keys].chunk(2, dim=1)
    mask = to.hidden[..., :num_keys]
    if above is not None or not sees_itself or places.behind is not None:
        key_index = torch.arange(num_keys, device=query.device)
        ahead = key_index - places.row[:, None, :, None]
        seen = ahead <= context_len - (0 if sees_itself else 1)
        if above is not None:
            seen = seen & ((ahead > above) | (key_index < num_always))
        mask = mask + torch.where(seen, 0.0, -torch.inf)
    sees = None
    if not sees_itself:
        sees = mask.amax(-1, keepdim=True) > -torch.inf
        mask = torch.where(sees, mask, 0.0)  # a mask that shows everything keeps 0/0 away
    if by_distance is not None:
        mask = mask + scores_by_distance(by_distance, places, num_keys)
    if bias is not None:
        mask = mask + bias.to(working)
    grouped, shared = query.to(working), query.shape[1] // key.shape[1]
    if shared > 1:  # the heads that share a key are further rows of it
        grouped = grouped.unflatten(1, (-1, shared)).flatten(2, 3)
        mask = mask.expand(-1, -1, num_rows, -1).repeat(1, 1, shared, 1)
    rows = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask).reshape(query.shape)
    rows = rows if sees is None else rows * sees
    return rows.transpose(1, 2).flatten(2).to(query.dtype)


def scores_by_distance(asked: DistanceQuery, places: Places, num_keys: int) -> Tensor:
    """Return the scores by distance of the first keys, (B, H, R, num_keys); meaningless for those after a row."""
    query, table = asked
    columns = table[:, :, places.seg_len - places.end :][:, :, :num_keys]  # distances num_keys - 1 down to 0
    by_column = torch.bmm(query.transpose(0, 1).flatten(1, 2), columns)
    by_column = by_column.unflatten(1, (len(query), -1)).transpose(0, 1)
    if places.behind is None:
        return by_column
    index = places.behind[:, None, :, None] + torch.arange(num_keys, device=query.device)
    return by_column.gather(-1, index.clamp(max=num_keys - 1).expand_as(by_column))
