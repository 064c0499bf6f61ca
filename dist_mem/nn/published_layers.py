"""Embedding, feed-forward, softmax and initial weights of GPT-2 and of Llama, which replace Transformer-XL's.

In both, embeddings are not scaled, and the softmax has no biases. GPT-2: positions are learned and restart at 0 in
every segment, as in the infinity-former's GPT-2; the activation is GELU. Llama: positions are in the attention
(rotary_attention.py); the activation is SwiGLU. Sources: Radford et al. 2019, "Language models are unsupervised
multitask learners"; Touvron et al. 2023, "LLaMA"; and the published models. Shape letters: B lanes, T segment, D model,
V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn import vocabulary
from dist_mem.nn.layers import Dropout
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.nn.rotary_attention import RotaryAttention
from dist_mem.nn.vocabulary import Bin


class UnscaledEmbedding(vocabulary.Embedding):
    """Map token ids (B, T) to vectors (B, T, D), not scaled."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__(bins, d_model=d_model)
        self.scale = 1.0


class GPT2Embedding(UnscaledEmbedding):
    """Map token ids (B, T) to vectors (B, T, D): token embedding plus embedding of the position in the segment."""

    def __init__(self, bins: list[Bin], *, d_model: int, num_positions: int) -> None:
        super().__init__(bins, d_model=d_model)
        self.positions = nn.Parameter(torch.zeros(num_positions, d_model))

    def forward(self, tokens: Tensor | None, types: Tensor | None = None, *, places: Tensor | None = None) -> Tensor:
        """Embed tokens (B, T); also add the embeddings of `types` (B, T), see `model.token_types`.

        Without tokens, return the positions at `places`.
        """
        if tokens is None:
            return self.positions[places]
        positions = self.positions[: tokens.shape[1]] if places is None else self.positions[places]
        embedded = super().forward(tokens) + positions
        return embedded if types is None else embedded + super().forward(types)


class UnbiasedSoftmax(vocabulary.Softmax):
    """A softmax without biases."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__(bins, d_model=d_model)
        for logits in self.bins:
            logits.register_parameter("bias", None)


class GPT2FeedForward(nn.Module):
    """Feed-forward layer: D -> d_inner, GELU (tanh formula), -> D, dropout."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, d_inner)
        self.contract = nn.Linear(d_inner, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.contract(F.gelu(self.expand(x), approximate="tanh")))


class SwiGLU(nn.Module):
    """Feed-forward layer: D -> gate and rows, both d_inner; silu(gate) * rows -> D, dropout; no biases."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, 2 * d_inner, bias=False)
        self.contract = nn.Linear(d_inner, d_model, bias=False)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, rows = self.expand(x).chunk(2, dim=-1)
        return self.dropout(self.contract(F.silu(gate) * rows))


# Projections into the residual stream.
_LAST = {PlainAttention: "output", RotaryAttention: "output", GPT2FeedForward: "contract", SwiGLU: "contract"}


@torch.no_grad()
def scale_residual_weights(model: nn.Module, *, num_layers: int) -> None:
    """Divide the initial weights of projections into the residual stream by sqrt(2 L), as GPT-2 does."""
    for module in model.modules():
        last = _LAST.get(type(module))
        weight = getattr(module, last).weight if last else None
        if weight is not None and not weight.is_meta:
            weight.mul_(1.0 / math.sqrt(2 * num_layers))
