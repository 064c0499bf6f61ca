"""GPT-2's embedding, feed-forward and initial weights, which replace Transformer-XL's (dist_mem/model.py).

Positions are learned and restart at 0 in every segment, as in the infinity-former's GPT-2. Embeddings are not scaled,
the activation is GELU, and the softmax has no weights besides the embedding. Source: Radford et al. 2019, "Language
models are unsupervised multitask learners", and the published model. Shape letters: B lanes, T segment, D model, V
vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn import vocabulary
from dist_mem.nn.layers import Dropout
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.nn.vocabulary import Bin


class Embedding(vocabulary.Embedding):
    """Map token ids (B, T) to vectors (B, T, D): token embedding plus embedding of the position in the segment."""

    def __init__(self, bins: list[Bin], *, d_model: int, num_positions: int) -> None:
        super().__init__(bins, d_model=d_model)
        self.scale = 1.0
        self.positions = nn.Parameter(torch.zeros(num_positions, d_model))

    def forward(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed tokens (B, T); also add the embeddings of `types` (B, T), see `model.token_types`."""
        embedded = super().forward(tokens) + self.positions[: tokens.shape[1]]
        return embedded if types is None else embedded + super().forward(types)


class Softmax(vocabulary.Softmax):
    """A softmax without biases."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__(bins, d_model=d_model)
        for logits in self.bins:
            logits.register_parameter("bias", None)


class FeedForward(nn.Module):
    """Feed-forward layer: D -> d_inner, GELU (tanh formula), -> D, dropout."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, d_inner)
        self.contract = nn.Linear(d_inner, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.contract(F.gelu(self.expand(x), approximate="tanh")))


@torch.no_grad()
def scale_residual_weights(model: nn.Module, *, num_layers: int) -> None:
    """Divide the initial weights of projections into the residual stream by sqrt(2 L), as GPT-2 does."""
    for module in model.modules():
        last = {PlainAttention: "output", FeedForward: "contract"}.get(type(module))
        weight = getattr(module, last).weight if last else None
        if weight is not None and not weight.is_meta:
            weight.mul_(1.0 / math.sqrt(2 * num_layers))
