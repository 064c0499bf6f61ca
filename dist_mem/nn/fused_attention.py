"""Attention by torch's fused kernels: those of windows on GPUs, else scaled_dot_product_attention.

Shape letters: B lanes, T queries, J keys, H heads, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.nn.attention_inputs import Inputs, Visible
from dist_mem.nn.kernel_shapes import device_type_of, fused_shapes
from dist_mem.nn.window_attention import has_window_kernel, window_attention


def sdpa(inputs: Inputs) -> Tensor:
    """Return the rows (H, B, T, K); the kernels of scaled_dot_product_attention have the lane axis first."""
    if has_window_kernel(inputs):
        return window_attention(inputs)
    query, key, value, visible, relative, bias = inputs
    plain = relative is None and bias is None and is_plainly_causal(visible)
    if query.is_meta and plain:
        return fused_shapes(query, key, value, None)[0]
    lanes_first = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if plain:  # needs no mask: kernels skip later keys
        return F.scaled_dot_product_attention(*lanes_first, is_causal=True, scale=1.0).transpose(0, 1)
    added = torch.where(visible.mask(), 0.0, -torch.inf).to(query.dtype)[:, None]
    for scores in (relative and relative.by_key(), bias):
        if scores is not None:
            added = added + scores.transpose(0, 1).to(query.dtype)
    on_cpu = device_type_of(query) == "cpu"  # there, torch has no kernel with a gradient of what is added
    if query.is_meta and not (on_cpu and added.requires_grad):
        return fused_shapes(query, key, value, added)[0]
    return F.scaled_dot_product_attention(*lanes_first, attn_mask=added, scale=1.0).transpose(0, 1)


def is_plainly_causal(visible: Visible) -> bool:
    """Return whether each query sees exactly the keys up to its own, in every lane."""
    alone = visible.valid.shape[1] == 0 and visible.num_keys == visible.num_queries
    return alone and (visible.above, visible.upto, visible.sees) == (None, 0, None)
