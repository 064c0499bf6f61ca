"""Attention to learned rows beside those of the text: persistent memory (Behrouz et al. 2024, "Titans", eq. 19).

Shape letters: B lanes, T segment, M context rows, P persistent rows, D model, H heads, K head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.attention import Choice
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import Attended, AttentionLayer, Projection, masked_softmax, merge_heads, split_heads
from dist_mem.nn.stepping import Opened, Places, StepOutput, attend, kept, lane_heads


class PersistentAttention(AttentionLayer):
    """Attention without positions to learned rows, a context and the segment.

    Every query sees all learned rows and, of the others, what a mask says, so only `simple` computes it: the other back
    ends take one window over all keys.
    """

    def __init__(self, spec: LayerSpec, *, num_rows: int) -> None:
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        if spec.back_end not in ("auto", "simple"):
            raise ValueError(
                f"model.attention is {spec.back_end}, but memory.kind is titans, whose queries see learned rows "
                "outside of their window: set model.attention to auto or simple, or memory.variant to alone"
            )
        width = spec.num_heads * spec.d_head
        self.num_heads = spec.num_heads
        self.learned = nn.Parameter(torch.zeros(num_rows, spec.d_model))
        self.query, self.key_value = Projection(spec.d_model, width), Projection(spec.d_model, 2 * width)
        self.output = Projection(width, spec.d_model)

    def choose(self, device_type: str, num_queries: int) -> Choice:
        return Choice("simple", "queries see learned rows outside of their window, which only it can mask")

    def forward(self, x: Tensor, context: Tensor, visible: Tensor, *, num_shown: int = 0) -> Attended:
        """Attend from the segment.

        Args:
            x: (B, T, D).  context: (B, M, D), M may be 0.  visible: (B, T, M + T) bool.
            num_shown: of so many of the newest rows, shares in what is read of these are returned; 0: none.
        """
        query = split_heads(self.query(x), self.num_heads)
        persistent = split_heads(self.persistent(x), 2 * self.num_heads)
        parts = [split_heads(self.key_value(rows), 2 * self.num_heads) for rows in (context, x) if rows.shape[1]]
        key, value = torch.cat([persistent, *parts], dim=2).chunk(2)
        everywhere = torch.ones(*visible.shape[:2], len(self.learned), dtype=torch.bool, device=x.device)
        mask = torch.cat([everywhere, visible], dim=-1)
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rows = self.attention_dropout(masked_softmax(scores, mask).to(value.dtype)) @ value
        # Not the probabilities divided by their sum, which is 0 if learned rows have nearly all.
        newest = masked_softmax(scores[..., -num_shown:], visible[..., -num_shown:]) if num_shown else None
        return Attended(self.output(merge_heads(rows)), query, newest)

    def persistent(self, like: Tensor) -> Tensor:
        """Return keys and values of the learned rows, (B, P, 2 H K), with the lanes and the dtype of `like`."""
        projected: Tensor = self.key_value(self.learned.to(like.dtype))
        return projected.expand(len(like), -1, -1)

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int) -> Opened:
        """Return what `step` attends to at first: context (B, M, D), of which `valid` (B, M) bool are attended to."""
        pairs = torch.cat([self.persistent(context), self.key_value(context)], dim=1)
        valid = F.pad(valid, (len(self.learned), 0), value=True)
        return Opened(kept(lane_heads(pairs, 2 * self.num_heads), valid, seg_len=seg_len))

    def step(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        """Attend from further rows to the learned rows and the newest M + 1; change `opened` in place."""
        query, pairs = lane_heads(self.query(x), self.num_heads), lane_heads(self.key_value(x), 2 * self.num_heads)
        number = len(self.learned)
        rows = attend(query, pairs, opened.lanes, places, above=number - 1, num_always=number)
        return StepOutput(self.output(rows), query.transpose(0, 1), opened)
