"""One softmax attention with four back ends, which compute the same function of the same inputs.

simple: all scores stand in memory; the reference, and the only one that has probabilities to show or to drop.
chunked: scores of one chunk of queries at a time, on every device (chunked_attention.py).
sdpa: torch's scaled_dot_product_attention; scores by distance become a bias of all pairs (fused_attention.py).
triton: our own kernels for GPUs, which compute scores by distance tile by tile (distance_attention.py).

Shape letters: B lanes, T queries, J keys, H heads, K head width. The head axis comes first, (H, B, T, K): the scores by
distance of all lanes are then one product per head with a table that the lanes share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.nn.attention_inputs import AttentionRead, Inputs, Visible
from dist_mem.nn.chunked_attention import attend_in_chunks
from dist_mem.nn.distance_attention import WIDEST, distance_attention, why_not
from dist_mem.nn.fused_attention import sdpa
from dist_mem.nn.position_scores import add_by_distance

BACK_ENDS = ("auto", "simple", "chunked", "sdpa", "triton")  # model.attention
SHORT = 128  # queries from which `auto` takes fused kernels on GPUs: two of their tiles
LONG = 512  # queries from which `auto` takes another back end than `simple` on CPUs, see docs/log


def simple_scores(inputs: Inputs) -> Tensor:
    """Return all scores without the mask, (H, B, T, J) float32 or wider; those of invisible keys are meaningless.

    `relative` must have the table of `layers.RelativeProjections.position_keys`.
    """
    tables = [] if inputs.relative is None else [inputs.relative.by_column()]
    scores = inputs.query @ inputs.key.mT
    if tables:
        scores = add_by_distance(scores, tables, [inputs.query.shape[2] - 1])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if inputs.bias is None else scores + inputs.bias


def mask_scores(scores: Tensor, visible: Tensor | Visible) -> Tensor:
    """Return scores (H, B, T, J) that are -inf where a key is not visible; as a mask (B, T, J) bool."""
    mask = visible if isinstance(visible, Tensor) else visible.mask()
    # Add the mask: masked_fill costs four times as much, and again in the backward, where its gradient is 0 anyway.
    return scores + torch.where(mask, 0.0, -math.inf)


def masked_softmax(scores: Tensor, visible: Tensor | Visible) -> Tensor:
    """Return the softmax over the visible keys, given as in `mask_scores`: scores (H, B, T, J) float32 or float64."""
    return mask_scores(scores, visible).softmax(dim=-1)


class BackEndChoice(NamedTuple):
    back_end: str  # one of BACK_ENDS besides auto
    reason: str


def choose(device_type: str, num_queries: int, *, relative_width: int | None, drops: bool) -> BackEndChoice:
    """Return the back end of `auto`, and why.

    Args:
        relative_width: head width of scores by distance; None: there are none.
        drops: whether dropout applies to probabilities.
    """
    if drops:
        return BackEndChoice("simple", "model.attention_dropout is of probabilities, which only it has")
    if num_queries < (SHORT if device_type == "cuda" else LONG):
        return BackEndChoice("simple", f"it is fast for segments of {num_queries} tokens")
    if relative_width is not None and device_type != "cuda":
        return BackEndChoice("chunked", f"it takes less time and memory for segments of {num_queries} tokens")
    return choose_kernel(device_type, relative_width=relative_width)


def choose_kernel(device_type: str, *, relative_width: int | None) -> BackEndChoice:
    """Return the fused kernel that computes such scores on a device, or what computes them where none does."""
    if relative_width is None:
        return BackEndChoice("sdpa", "torch's fused kernel, as there are no scores by distance")
    if device_type != "cuda":
        return BackEndChoice("chunked", "our kernels for scores by distance run on GPUs only")
    if reason := why_not():
        return BackEndChoice("chunked", f"our kernels for scores by distance do not run here: {reason}")
    if relative_width > WIDEST:
        return BackEndChoice(
            "chunked", f"our kernels take heads of at most {WIDEST} numbers, these have {relative_width}"
        )
    return BackEndChoice("triton", "our kernel adds the scores by distance")


def attend(inputs: Inputs, back_end: str, *, log_sum: bool = False) -> AttentionRead:
    """Compute attention by `chunked`, `sdpa` or `triton`.

    Args:
        log_sum: whether to return it, with its gradient; sdpa cannot.
    """
    if back_end == "triton" and inputs.query.dtype != torch.float64:  # our kernels sum in float32
        return distance_attention(inputs)
    if back_end in ("chunked", "triton"):
        return attend_in_chunks(inputs, log_sum=log_sum)
    assert back_end == "sdpa" and not log_sum, "LookAheadAttention refuses sdpa"
    return AttentionRead(sdpa(inputs), None)
