"""Attention to learned rows beside those of the text: persistent memory (Behrouz et al. 2024, "Titans", eq. 19).

Every query sees all learned rows and, of the others, what a mask says. `simple` computes it, or torch's fused kernel
with that mask, which keeps no scores; the other back ends take one window over all keys. Shape letters: B lanes, T
segment, M context rows, P persistent rows, J keys, D model, H heads, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.kernel_shapes import device_type_of, fused_shapes
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import AttentionLayer, AttentionOutput, Projection, masked_softmax, merge_heads, split_heads
from dist_mem.nn.stepping import Opened, Places, StepOutput, attend, keep_pairs, lane_heads

_ALIGNED = 8  # keys: torch copies a mask whose rows do not begin at a multiple of 16 bytes


def fused_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend by torch's fused kernel: scaled query (H, B, T, K), keys and values (H, B, J, K), mask (B, T, J) bool."""
    added = torch.where(mask, 0.0, -torch.inf).to(query.dtype)[:, None]
    if query.is_meta:
        return fused_shapes(query, key, value, added)[0]
    lanes_first = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    return F.scaled_dot_product_attention(*lanes_first, attn_mask=added, scale=1.0).transpose(0, 1)


class PersistentAttention(AttentionLayer):
    """Attention without positions to learned rows, a context and the segment."""

    def __init__(self, spec: LayerSpec, *, num_rows: int) -> None:
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        if spec.back_end not in ("auto", "simple", "sdpa"):
            raise ValueError(
                f"model.attention is {spec.back_end}, but memory.kind is titans, whose queries see learned rows "
                "outside of their window: set model.attention to auto, simple or sdpa, or memory.variant to alone"
            )
        width = spec.num_heads * spec.d_head
        self.num_heads = spec.num_heads
        self.learned = nn.Parameter(torch.zeros(num_rows, spec.d_model))
        self.query, self.key_value = Projection(spec.d_model, width), Projection(spec.d_model, 2 * width)
        self.output = Projection(width, spec.d_model)

    def forward(self, x: Tensor, context: Tensor, visible: Tensor, *, num_shown: int = 0) -> AttentionOutput:
        """Attend from the segment.

        Args:
            x: (B, T, D).  context: (B, M, D), M may be 0.  visible: (B, T, M + T) bool.
            num_shown: of so many of the newest rows, shares in what is read of these are returned; 0: none.
        """
        query = split_heads(self.query(x), self.num_heads)
        scaled = query / math.sqrt(query.shape[-1])
        is_fused = not num_shown and self.choose(device_type_of(x), x.shape[1]).back_end == "sdpa"
        parts = [self.persistent(x), *(self.key_value(rows) for rows in (context, x) if rows.shape[1])]
        number = len(self.learned)
        masks = [torch.ones(*visible.shape[:2], number, dtype=torch.bool, device=x.device), visible]
        if is_fused and (missing := -(number + visible.shape[-1]) % _ALIGNED):  # keys that no query sees
            parts.append(parts[-1].new_zeros(len(x), missing, parts[-1].shape[-1]))
            masks.append(torch.zeros(*visible.shape[:2], missing, dtype=torch.bool, device=x.device))
        heads = [split_heads(part, 2 * self.num_heads) for part in parts]
        key, value = torch.cat(heads, dim=2).chunk(2)
        mask = torch.cat(masks, dim=-1)
        newest: Tensor | None = None
        if is_fused:
            rows = fused_rows(scaled, key, value, mask)
        else:
            scores = scaled @ key.mT
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            rows = self.attention_dropout(masked_softmax(scores, mask).to(value.dtype)) @ value
        if num_shown:
            # Not the probabilities divided by their sum, which is 0 if learned rows have nearly all.
            newest = masked_softmax(scores[..., -num_shown:], visible[..., -num_shown:])
        return AttentionOutput(self.output(merge_heads(rows)), query, newest)

    def persistent(self, like: Tensor) -> Tensor:
        """Return keys and values of the learned rows, (B, P, 2 H K), with the lanes and the dtype of `like`."""
        projected: Tensor = self.key_value(self.learned.to(like.dtype))
        return projected.expand(len(like), -1, -1)

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int) -> Opened:
        """Return what `step_rows` first attends to: context (B, M, D), of which `valid` (B, M) bool are attended to."""
        pairs = torch.cat([self.persistent(context), self.key_value(context)], dim=1)
        valid = F.pad(valid, (len(self.learned), 0), value=True)
        return Opened(keep_pairs(lane_heads(pairs, 2 * self.num_heads), valid, seg_len=seg_len))

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        """Attend from further rows to the learned rows and the newest M + 1; change `opened` in place."""
        query, pairs = lane_heads(self.query(x), self.num_heads), lane_heads(self.key_value(x), 2 * self.num_heads)
        number = len(self.learned)
        rows = attend(query, pairs, opened.lanes, places, above=number - 1, num_always=number)
        return StepOutput(self.output(rows), query.transpose(0, 1), opened)
