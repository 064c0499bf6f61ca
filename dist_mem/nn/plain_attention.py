"""GPT-2's attention: the rows contain their positions, or ALiBi's slopes penalise distances.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners", and the weights published with it;
Press et al. 2022, "Train short, test long", sec. 3. Shape letters: B lanes, T segment, M context rows, J = M +
T keys, D model, H heads, K head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dist_mem.nn.attention_inputs import Inputs, Visible
from dist_mem.nn.constants import constant
from dist_mem.nn.convolution import short_convolution
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.layers import ContextAttention, Dropout, Projection
from dist_mem.nn.stepping import Opened, Places, StepHeads, StepOutput, above_of, attend, keep_pairs, lane_heads

# none: only the rows may contain positions | alibi: every distance counts | alibi_memory: only that of context rows
BIASES = ("none", "alibi", "alibi_memory")


class BiasedProjection(Projection):
    """A linear map; if called with `frozen`, the input gets a gradient, and weight and bias do not."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        product = super().forward(x, frozen)
        return product + self.bias.detach() if frozen else product


def alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8 i / H) for head i = 1..H.

    If H is no power of two, the slopes come from the powers below and above it, as in the authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    between = [2.0 ** (-4.0 * head / power) for head in range(1, 2 * (num_heads - power), 2)]
    return slopes + between


def alibi_bias(num_heads: int, *, num_queries: int, context_len: int, bias: str, device: torch.device) -> Tensor:
    """Return -slope times the distance of a key before its query: (H, 1, T, J) float32; meaningless after the query."""
    place = torch.arange(num_queries, device=device)
    return alibi_at(num_heads, place, context_len=context_len, num_keys=context_len + num_queries, bias=bias)


def alibi_at(num_heads: int, place: Tensor, *, context_len: int, num_keys: int, bias: str) -> Tensor:
    """Return `alibi_bias` of queries at these places of the segment, (T,) or (B, T) int64: (H, 1 or B, T, J)."""
    key = torch.arange(num_keys, device=place.device)
    distance = context_len + place[..., None] - key
    if bias == "alibi_memory":
        distance = distance.masked_fill(key >= context_len, 0)
    slopes = constant(tuple(alibi_slopes(num_heads)), device=place.device, dtype=torch.float32)
    return -slopes[:, None, None, None] * distance


class PlainAttention(ContextAttention):
    """Attention without positions, or with biases by distance; all projections have biases."""

    def __init__(self, spec: LayerSpec, *, bias: str = "none", kernel: int | None = None) -> None:
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        width = spec.num_heads * spec.d_head
        self.num_heads, self.bias = spec.num_heads, bias
        self.query = BiasedProjection(spec.d_model, width)
        self.key_value = BiasedProjection(spec.d_model, 2 * width)
        self.output = BiasedProjection(width, spec.d_model)
        self.convolution = short_convolution([width, 2 * width], kernel)
        self.dropout = Dropout(spec.dropout)

    def inputs(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Inputs:
        bias = None
        if self.bias != "none":
            lengths = {"num_queries": x.shape[1], "context_len": key.shape[2] - x.shape[1]}
            bias = alibi_bias(self.num_heads, **lengths, bias=self.bias, device=x.device)
        return Inputs(query / math.sqrt(query.shape[-1]), key, value, visible, bias=bias)

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int, is_row: Tensor | None = None) -> Opened:
        """Return what `step_rows` attends to, as `layers.RelativeAttention` does."""
        pairs, tail = self.open_pairs(context, valid, is_row)
        return Opened(keep_pairs(lane_heads(pairs, 2 * self.num_heads), valid, seg_len=seg_len, tail=tail))

    def step_rows(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepOutput:
        """Attend as `layers.RelativeAttention` does."""
        heads = self.step_heads(x, opened, places, same_length=same_length)
        return StepOutput(self.output(heads.rows), heads.query, opened)

    def step_heads(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepHeads:
        """Attend as `step_rows`, without the output projection."""
        query, pairs = self.further(x, opened.lanes, places)
        query, pairs = lane_heads(query, self.num_heads), lane_heads(pairs, 2 * self.num_heads)
        bias = None
        if self.bias != "none":
            context_len = opened.lanes.pairs.shape[2] - places.seg_len
            sizes = {"context_len": context_len, "num_keys": context_len + places.end}
            bias = alibi_at(self.num_heads, places.row, **sizes, bias=self.bias).transpose(0, 1)
        rows = attend(query, pairs, opened.lanes, places, above=above_of(same_length), bias=bias)
        return StepHeads(rows, query.transpose(0, 1))
