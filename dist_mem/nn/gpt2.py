"""GPT-2's embedding, feed-forward and first weights, in the place of Transformer-XL's (dist_mem/model.py).

Learned positions that begin at 0 in every segment, as the infinity-former's GPT-2 has them; embeddings that are not
scaled; GELU; a softmax that is the embedding and nothing else. Source: Radford et al. 2019, "Language models are
unsupervised multitask learners", and the published model. Shape letters: B lanes, T segment, D model, V vocabulary.
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
    """Token ids (B, T) to vectors (B, T, D): the token's and that of its place in the segment."""

    def __init__(self, bins: list[Bin], *, d_model: int, num_positions: int) -> None:
        super().__init__(bins, d_model=d_model)
        self.scale = 1.0
        self.positions = nn.Parameter(torch.zeros(num_positions, d_model))

    def forward(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        """`types` (B, T): tokens whose embeddings are added too, see `model.token_types`."""
        embedded = super().forward(tokens) + self.positions[: tokens.shape[1]]
        return embedded if types is None else embedded + super().forward(types)


class Softmax(vocabulary.Softmax):
    """Without biases."""

    def __init__(self, bins: list[Bin], *, d_model: int) -> None:
        super().__init__(bins, d_model=d_model)
        for logits in self.bins:
            logits.register_parameter("bias", None)


class FeedForward(nn.Module):
    """D -> d_inner, GELU by its tanh formula, -> D, dropout."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, d_inner)
        self.contract = nn.Linear(d_inner, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.contract(F.gelu(self.expand(x), approximate="tanh")))


@torch.no_grad()
def scale_residual_weights(model: nn.Module, *, num_layers: int) -> None:
    """First weights of what is added to the residual stream, smaller by sqrt(2 L), as GPT-2 begins."""
    for module in model.modules():
        last = {PlainAttention: "output", FeedForward: "contract"}.get(type(module))
        weight = getattr(module, last).weight if last else None
        if weight is not None and not weight.is_meta:
            weight.mul_(1.0 / math.sqrt(2 * num_layers))
