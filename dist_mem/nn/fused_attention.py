"""Attention by torch's fused kernels: scaled_dot_product_attention, and FlexAttention (Dong et al. 2024).

FlexAttention adds scores by distance inside its kernel: each query has a row of scores by distance, in the dtype of the
activations, and the kernel reads it at T - 1 - i + j. On CPUs it has no backward; there, the gradient is computed as in
chunked_attention.py. Shape letters: B lanes, T queries, J keys, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.attention_inputs import Inputs, Read, Visible
from dist_mem.nn.chunked_attention import recomputed
from dist_mem.nn.kernel_shapes import device_type_of, fused
from dist_mem.nn.named_tuples import replaced


def sdpa(inputs: Inputs) -> Tensor:
    """Return the rows (H, B, T, K) of scaled_dot_product_attention, whose kernels have the lane axis first."""
    query, key, value, visible, relative, bias = inputs
    plain = relative is None and bias is None and is_plainly_causal(visible)
    if query.is_meta and plain:
        return fused(query, key, value, None)[0]
    lanes_first = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if plain:  # needs no mask: kernels skip later keys
        return F.scaled_dot_product_attention(*lanes_first, is_causal=True, scale=1.0).transpose(0, 1)
    added = torch.where(visible.mask(), 0.0, -torch.inf).to(query.dtype)[:, None]
    for scores in (relative and relative.by_key(), bias):
        if scores is not None:
            added = added + scores.transpose(0, 1).to(query.dtype)
    on_cpu = device_type_of(query) == "cpu"  # there, torch has no kernel with a gradient of what is added
    if query.is_meta and not (on_cpu and added.requires_grad):
        return fused(query, key, value, added)[0]
    return F.scaled_dot_product_attention(*lanes_first, attn_mask=added, scale=1.0).transpose(0, 1)


def is_plainly_causal(visible: Visible) -> bool:
    """Return whether each query sees exactly the keys up to its own, in every lane."""
    alone = visible.valid.shape[1] == 0 and visible.num_keys == visible.num_queries
    return alone and (visible.above, visible.upto, visible.sees) == (None, 0, None)


def flex(inputs: Inputs, *, log_sum: bool) -> Read:
    """Compute attention by FlexAttention; on CPUs with the gradient of `chunked`, and without a log of sums."""
    if device_type_of(inputs.query) != "cpu":
        return _planned_kernel(inputs) if inputs.query.is_meta else flex_kernel(inputs, log_sum=log_sum)
    assert not log_sum, "AttentionLayer.choose"
    if inputs.query.is_meta:
        return recomputed(inputs, lambda inputs: replaced(_planned_kernel(inputs), log_sum=None))
    return recomputed(inputs, lambda inputs: flex_kernel(inputs, log_sum=False))


def _planned_kernel(inputs: Inputs) -> Read:
    """Return what the kernel would, without values."""
    table = None if inputs.relative is None else inputs.relative.padded().by_column()
    return Read(*fused(inputs.query, inputs.key, inputs.value, table))


# The fastest of seven on an H100 with torch 2.11, by head width; torch's own forward takes twice as long for 64, as its
# blocks spill registers where scores by distance are read (docs/log/2026-11.md).
_FORWARD = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 4, "fwd_num_stages": 2}
_BACKWARD = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
BLOCKS = {64: _FORWARD, 128: {**_FORWARD, **_BACKWARD, "bwd_num_warps": 4, "bwd_num_stages": 1}}


def blocks(width: int) -> dict[str, int] | None:
    """Return the sizes of a GPU's kernels of FlexAttention with scores by distance, for a head width; None: torch's."""
    return next((found for largest, found in BLOCKS.items() if width <= largest), None)


def flex_kernel(inputs: Inputs, *, log_sum: bool) -> Read:
    """Call the kernel, compiled at the first call for a shape."""
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value, visible, relative, _ = inputs
    on_gpu = query.device.type == "cuda"
    rows, aux = compiled()(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        score_mod=score_change(inputs),
        block_mask=band(visible.num_queries, visible.num_keys, visible.above, visible.upto, query.device),
        scale=1.0,
        kernel_options=blocks(query.shape[-1]) if on_gpu and relative is not None else None,
        return_aux=AuxRequest(lse=log_sum),
    )
    return Read(rows.transpose(0, 1), aux.lse.transpose(0, 1) if log_sum else None)


@cache
def compiled() -> Callable[..., Any]:
    """Return the compiled function; uncompiled, FlexAttention keeps all scores. torch's compiler is imported here."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def stored(mask: Tensor) -> Tensor:
    """Return the same mask, which Inductor writes to memory.

    In a compiled block, torch 2.14 would compute a padded mask inside the kernel, and its code generator fails there.
    """
    return mask.as_strided(mask.shape, mask.stride())


def score_change(inputs: Inputs) -> Callable[..., Tensor]:
    """Return the function of a score and its lane, head, query and key that adds distances, bias and lane's mask."""
    visible, relative, bias = inputs.visible, inputs.relative, inputs.bias
    table = None if relative is None else relative.padded().by_column()
    first, last = (0, 0) if relative is None else (relative.first, relative.table.shape[-1] - 1)
    keys, sees = stored(visible.keys()), None if visible.sees is None else stored(visible.sees)

    def change(score: Tensor, lane: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if table is not None:
            score = score + table[head, lane, query, (first - query + key).clamp(0, last)]
        if bias is not None:
            score = score + bias[head, 0, query, key]
        shown = keys[lane, key] if sees is None else keys[lane, key] & sees[lane, query]
        return torch.where(shown, score, -torch.inf)

    return change


@cache
def band(num_queries: int, num_keys: int, above: int | None, upto: int | None, device: torch.device) -> Any:
    """Return the blocks of queries and keys that have a visible pair in some lane, a BlockMask; None if all do."""
    from torch.nn.attention.flex_attention import create_block_mask

    if above is None and upto is None:
        return None

    def visible(lane: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        after = query >= 0 if above is None else key > query + above
        return after if upto is None else after & (key <= query + upto)

    return create_block_mask(visible, None, None, num_queries, num_keys, device=str(device))
