"""Transformer layers without memory: relative attention, feed-forward, masks.

A memory layer (dist_mem/memory/) decides which rows are attended to; this module projects them, and attention.py
attends. Source: Dai et al. 2019, "Transformer-XL", sec. 3.3, and the authors' PyTorch code. Shape letters: B lanes, T
segment, M context rows, J = M + T keys, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.attention import BackEndChoice, attend, choose, choose_kernel, simple_scores
from dist_mem.nn.attention import masked_softmax as masked_softmax
from dist_mem.nn.attention_inputs import Inputs, Relative, Visible
from dist_mem.nn.attention_inputs import newest_rows as newest_rows
from dist_mem.nn.attention_inputs import visible_keys as visible_keys
from dist_mem.nn.convolution import ShortConvolution, Tail, newest_of_both, short_convolution
from dist_mem.nn.kernel_shapes import device_type_of
from dist_mem.nn.stepping import DistanceQuery, KeptPairs, Opened, Places, StepOutput, above_of, keep_pairs, lane_heads
from dist_mem.nn.stepping import attend as attend_kept

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # train.precision


def sinusoid_table(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Return R_t = [sin(t w), cos(t w)], w_j = 10000^(-2j/D), as two halves, not interleaved: (J,) -> (J, D).

    Angles are computed in float32 or wider and cast at the end: in half precision, distances above 256 would collapse.
    """
    working = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, d_model, 2, device=distances.device, dtype=working) / d_model
    angles = distances.to(working)[:, None] * torch.pow(10000.0, -exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :d_model].to(dtype)


def key_distances(num_keys: int, *, clamp_len: int | None, device: torch.device) -> Tensor:
    """Return distances J - 1 down to 0, clamped at clamp_len, then a dummy for `align_to_keys`: (J + 1,) int64."""
    distances = torch.arange(num_keys - 1, -2, -1, device=device)
    return distances.clamp(min=0, max=clamp_len)


def split_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Split the last axis into heads: (B, T, H * K) -> (H, B, T, K), a view."""
    return rows.unflatten(-1, (num_heads, -1)).permute(2, 0, 1, 3)


def merge_heads(context: Tensor) -> Tensor:
    """Concatenate the heads: (H, B, T, K) -> (B, T, H * K)."""
    return context.permute(1, 2, 0, 3).flatten(-2)


def relative_queries(
    query: Tensor, position: Tensor, *, content_bias: Tensor, position_bias: Tensor
) -> tuple[Tensor, Relative]:
    """Return (q + u) / sqrt(K), and the scores by distance (q + v) . r / sqrt(K) of a segment's queries.

    Args:
        query: (H, B, T, K).  position: (H, K, J + 1), W_r R_t at `key_distances`.
        content_bias, position_bias: u and v, (H, K).
    """
    scale = 1.0 / math.sqrt(query.shape[-1])
    content_query = (query + content_bias[:, None, None]) * scale
    position_query = (query + position_bias[:, None, None]) * scale
    return content_query, Relative(position_query, position, query.shape[2] - 1)


# torch.compile cannot trace `random_`; as an operation of its own it draws the same bits.
_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_OPS.define("fill_random(Tensor(a!) words) -> ()")


def _fill_random(words: Tensor) -> None:
    words.random_(-(2**63), None)


_OPS.impl("fill_random", _fill_random, "CPU")
_OPS.impl("fill_random", lambda words: None, "Meta")


class Dropout(nn.Module):
    """Dropout that draws 16 random bits per element on CPUs: 1.5 (fp32) to 2.3 times (bf16) as fast as torch's."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.keep = round((1.0 - probability) * 2**16)  # of 2^16; the scale below is exact for the rounded probability

    @property
    def drops(self) -> bool:
        """Whether it draws random numbers in training."""
        return self.keep < 2**16

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drops:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, 1.0 - self.keep / 2**16)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        torch.ops.dist_mem.fill_random(words)
        kept = words.view(torch.int16)[: x.numel()].view(x.shape) < self.keep - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / self.keep)


class _FrozenProduct(torch.autograd.Function):
    """x W^T with a gradient for x only. Saves the parameter itself, which ZeRO-3 gathers again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight, None


class Projection(nn.Linear):
    """A linear map without bias; if called with `frozen`, the input gets a gradient and the weight does not."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        return _FrozenProduct.apply(x, self.weight) if frozen else super().forward(x)


class AttentionOutput(NamedTuple):
    y: Tensor  # (B, T, D), before the residual
    query: Tensor  # (H, B, T, K), before biases
    weights: Tensor | None = None  # (H, B, T, M + T), attention probabilities before dropout, where asked for

    def shares(self) -> Tensor:
        """Return the weights, which were asked for."""
        assert self.weights is not None
        return self.weights


class AttentionLayer(nn.Module):
    """Base of layers that attend by the back end of `model.attention`.

    They have the parts below, and with `memory.kernel` a convolution of queries, keys and values. The rows that it sees
    are those of the context that are marked as rows, then those of the segment; before them, and in place of rows
    without a mark, it sees zeros.
    """

    query: Projection
    key_value: nn.Module
    output: nn.Linear
    dropout: Dropout
    convolution: ShortConvolution | None
    num_heads: int
    num_kv_heads: int | None = None  # G, heads of keys and values; None: H
    relative_width: int | None = None  # K, if there are scores by distance
    has_numbers = False  # whether a score by distance is a number per head, whatever the query
    needs_log_sum = False  # whether it needs the log of the sum of exponentials
    shows_weights = False  # whether a memory reads the weights in every forward

    def __init__(self, *, attention_dropout: float, back_end: str) -> None:
        super().__init__()
        self.convolution = None
        self.attention_dropout = Dropout(attention_dropout)
        self.back_end = back_end
        self.drops = self.attention_dropout.keep < 2**16
        if self.drops and back_end not in ("auto", "simple"):
            raise ValueError(
                f"model.attention is {back_end}, which has no probabilities to drop: set model.attention_dropout to 0, "
                "or model.attention to auto or simple"
            )
        if self.needs_log_sum and back_end == "sdpa":
            raise ValueError(
                "model.attention is sdpa, which returns no log of the sum of exponentials, and look-ahead attention "
                "needs it: set model.attention to auto, simple, chunked or triton"
            )

    def pairs(self, *parts: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        """Return keys and values (G, B, J, K) of rows (B, J, D) in parts, any of which may be empty."""
        # Project them separately, so that no gradient is computed for context rows that need none.
        num_heads = 2 * (self.num_kv_heads or self.num_heads)
        projected = [split_heads(self.key_value(rows, frozen), num_heads) for rows in parts if rows.shape[1]]
        key, value = (projected[0] if len(projected) == 1 else torch.cat(projected, dim=2)).chunk(2)
        return key, value

    def frozen_pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (G, B, J, K) of rows (B, J, D), which get a gradient; no parameter does."""
        if self.convolution is None:
            return self.pairs(rows, frozen=True)
        projected = F.pad(self.key_value(rows, True), (0, 0, self.convolution.before_len, 0))
        (pairs,) = self.convolution(projected, frozen=True)
        key, value = split_heads(pairs, 2 * (self.num_kv_heads or self.num_heads)).chunk(2)
        return key, value

    def project_heads(
        self, x: Tensor, context: Tensor, visible: Visible | Tensor, is_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (H, B, T, K) of the segment, and keys and values (G, B, M + T, K) of context and segment.

        Args:
            x: (B, T, D).  context: (B, M, D); with a convolution it may begin with up to kernel - 1 rows more.
            visible: of the M + T keys.
            is_row: (B, context rows) bool, which of them the convolution sees; None: those that are valid keys.
        """
        if self.convolution is None:
            return split_heads(self.query(x), self.num_heads), *self.pairs(context, x)
        assert isinstance(visible, Visible), "a mask does not say which rows of the context are rows of the document"
        query, pairs = self.convolution(*self.before_convolution(x, context, visible.valid, is_row))
        key, value = split_heads(pairs, 2 * (self.num_kv_heads or self.num_heads)).chunk(2)
        return split_heads(query, self.num_heads), key, value

    def before_convolution(
        self, x: Tensor, context: Tensor, valid: Tensor, is_row: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return projected queries (B, kernel - 1 + T, H K), and keys and values (B, kernel - 1 + M + T, 2 G K)."""
        assert self.convolution is not None
        is_row = valid if is_row is None else is_row
        project, num_rows = self.convolution.after_context, context.shape[1]
        num_near = min(num_rows, self.convolution.before_len)
        near = slice(num_rows - num_near, num_rows)
        query = project(self.query, context[:, near], is_row[:, near], x, num_before=num_near)
        return query, project(self.key_value, context, is_row, x, num_before=num_rows - valid.shape[1])

    def open_pairs(self, context: Tensor, valid: Tensor, is_row: Tensor | None = None) -> tuple[Tensor, Tail]:
        """Return keys and values of a context (B, M, 2 G K), and the newest rows before a convolution: see `KeptPairs`.

        Args:
            valid: (B, M) bool, which rows of the context are attended to.  context, is_row: as in `project_heads`.
        """
        if self.convolution is None:
            return self.key_value(context), ()
        nothing = context.new_empty(len(context), 0, context.shape[2])
        query, pairs = self.before_convolution(nothing, context, valid, is_row)
        tail = torch.cat([query, pairs[:, pairs.shape[1] - query.shape[1] :]], dim=-1)
        return self.convolution(query, pairs)[1], tail

    def further(self, x: Tensor, to: KeptPairs, places: Places) -> tuple[Tensor, Tensor]:
        """Return queries (B, R, H K), and keys and values (B, R, 2 G K), of further rows of a segment, x (B, R, D).

        Args:
            to: its tail is changed in place.
        """
        query, pairs, before = self.after_tail(x, to.tail)
        if isinstance(to.tail, Tensor) and isinstance(before, Tensor):
            to.tail.copy_(newest_of_both(before, places.num_real, num_rows=to.tail.shape[1]))
        return query, pairs

    def after_tail(self, x: Tensor, tail: Tail) -> tuple[Tensor, Tensor, Tail]:
        """Return queries (B, R, H K), keys and values (B, R, 2 G K), and all before the convolution, tail first."""
        query, pairs = self.query(x), self.key_value(x)
        if self.convolution is None:
            return query, pairs, ()
        assert isinstance(tail, Tensor)
        before = torch.cat([tail.to(x.dtype), torch.cat([query, pairs], dim=-1)], dim=1)
        query, pairs = self.convolution(*before.split([query.shape[-1], pairs.shape[-1]], dim=-1))
        return query, pairs, before

    def empty_tail(self, num_lanes: int, device: torch.device | str, dtype: torch.dtype) -> Tail:
        """Return what a convolution sees before a document."""
        return () if self.convolution is None else self.convolution.empty_tail(num_lanes, device=device, dtype=dtype)

    def merge_output(self, rows: Tensor) -> Tensor:
        """Return the output of all heads, (H, B, T, K) -> (B, T, D)."""
        y: Tensor = self.dropout(self.output(merge_heads(rows)))
        return y

    def choose(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return the back end that attends, and why."""
        if self.shows_weights:
            return BackEndChoice("simple", "the memory reads the probabilities, which only it has")
        if self.back_end == "auto":
            return choose(device_type, num_queries, relative_width=self.relative_width, drops=self.drops)
        if self.back_end == "triton":
            return choose_kernel(device_type, relative_width=self.relative_width)
        return BackEndChoice(self.back_end, "model.attention")

    def read(self, inputs: Inputs, *, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the attended rows (H, B, T, K); and if asked for the weights, which then `simple` computes."""
        back_end = self.choose(device_type_of(inputs.query), inputs.query.shape[2]).back_end
        if isinstance(inputs.visible, Tensor) and self.back_end not in ("auto", "simple"):
            raise ValueError(
                f"model.attention is {self.back_end}, but this memory gives attention a mask, not the description that "
                "dist_mem.nn.layers.visible_keys returns: set model.attention to auto or simple"
            )
        if back_end != "simple" and not weights and isinstance(inputs.visible, Visible):
            return attend(inputs, back_end).rows, None
        shares = masked_softmax(simple_scores(inputs), inputs.visible).to(inputs.value.dtype)
        return self.attention_dropout(shares) @ inputs.value, shares if weights else None


def describe_attention(model: nn.Module, device_type: str, num_queries: int) -> list[str]:
    """Return one line for each back end that layers of the model use for segments of `num_queries` tokens, and why."""
    layers = [layer for layer in model.modules() if isinstance(layer, AttentionLayer)]
    choices = Counter(layer.choose(device_type, num_queries) for layer in layers)
    of_all = f"of {len(layers)} layers"
    return [f"attention of {count} {of_all}: {choice.back_end} ({choice.reason})" for choice, count in choices.items()]


class RelativeProjections(AttentionLayer):
    """The parameters of attention with relative positions."""

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        d_head: int,
        dropout: float,
        attention_dropout: float,
        clamp_len: int | None,
        back_end: str = "auto",
        kernel: int | None = None,
    ) -> None:
        """Make the parameters; `kernel`: tokens that a convolution of queries, keys and values sees, or None."""
        super().__init__(attention_dropout=attention_dropout, back_end=back_end)
        self.num_heads = num_heads
        self.relative_width = d_head
        self.clamp_len = clamp_len
        width = num_heads * d_head
        self.query = Projection(d_model, width)
        self.key_value = Projection(d_model, 2 * width)
        self.position = nn.Linear(d_model, width, bias=False)
        self.output = nn.Linear(width, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, d_head))  # u, see share_biases
        self.position_bias = nn.Parameter(torch.zeros(num_heads, d_head))  # v
        self.convolution = short_convolution([width, 2 * width], kernel)
        self.dropout = Dropout(dropout)

    def share_biases(self, first: nn.Module) -> None:
        """Use u and v of another layer; both register them, because ZeRO-3 gathers what a module itself registers."""
        assert isinstance(first, RelativeProjections)
        self.content_bias = first.content_bias
        self.position_bias = first.position_bias

    def position_keys(self, x: Tensor, *, num_keys: int) -> Tensor:
        """Return W_r R_t at every distance: (H, K, J + 1).

        Deviation: the published code applies dropout to R once per forward, for all layers; here each layer draws a
        separate mask.
        """
        distances = key_distances(num_keys, clamp_len=self.clamp_len, device=x.device)
        table = self.dropout(sinusoid_table(distances, x.shape[-1], x.dtype))
        return self.position(table).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)

    def open(self, context: Tensor, valid: Tensor, *, seg_len: int, is_row: Tensor | None = None) -> Opened:
        """Return what `step_rows` attends to at first; the arguments are those of `open_pairs`."""
        pairs, tail = self.open_pairs(context, valid, is_row)
        table = self.position_keys(context, num_keys=pairs.shape[1] + seg_len)
        lanes = keep_pairs(lane_heads(pairs, 2 * self.num_heads), valid, seg_len=seg_len, tail=tail)
        return Opened(lanes, table / math.sqrt(table.shape[1]))

    def step_rows(self, x: Tensor, opened: Opened, places: Places, *, same_length: bool = False) -> StepOutput:
        """Attend from further rows of the segment, x (B, R, D), to it and the context; change `opened` in place."""
        query, pairs = self.further(x, opened.lanes, places)
        query, pairs = lane_heads(query, self.num_heads), lane_heads(pairs, 2 * self.num_heads)
        by_distance = DistanceQuery(query + self.position_bias[:, None], opened.shared)
        content_query = query + self.content_bias[:, None]
        rows = attend_kept(
            content_query, pairs, opened.lanes, places, above=above_of(same_length), by_distance=by_distance
        )
        return StepOutput(self.output(rows), query.transpose(0, 1), opened)


class HeadRows(NamedTuple):
    """What attention reads, before its output projection, and what it is computed from, before rotation."""

    rows: Tensor  # (H, B, T, K)
    query: Tensor  # (H, B, T, K)
    key: Tensor  # (G, B, J, K)
    value: Tensor  # (G, B, J, K)
    weights: Tensor | None  # (H, B, T, J), if asked for


class ContextAttention(AttentionLayer):
    """Multi-head attention over context rows and the segment itself; a subclass says what its scores are made of."""

    def share_biases(self, first: nn.Module) -> None:
        """Share nothing: only attention with relative positions has u and v."""

    def forward(
        self, x: Tensor, context: Tensor, visible: Visible, *, weights: bool = False, is_row: Tensor | None = None
    ) -> AttentionOutput:
        """Attend from the segment to the context and the segment.

        Args:
            x: (B, T, D).  context: (B, M, D), M may be 0; with a convolution as in `project_heads`.
            visible: see `visible_keys`; or, without a convolution, a mask (B, T, M + T) bool, for which only `simple`
                computes.
            weights: whether to return attention probabilities.
            is_row: as in `project_heads`.
        """
        heads = self.attend_heads(x, context, visible, weights=weights, is_row=is_row)
        return AttentionOutput(self.merge_output(heads.rows), heads.query, heads.weights)

    def attend_heads(
        self, x: Tensor, context: Tensor, visible: Visible, *, weights: bool = False, is_row: Tensor | None = None
    ) -> HeadRows:
        """Attend as `forward`, without the output projection, for a memory that mixes other rows into the heads."""
        query, key, value = self.project_heads(x, context, visible, is_row)
        rows, shares = self.read(self.inputs(x, query, key, value, visible), weights=weights)
        return HeadRows(rows, query, key, value, shares)

    def inputs(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Inputs:
        """Return what scores are made of, of what `project_heads` returns for a segment x (B, T, D)."""
        raise NotImplementedError


class RelativeAttention(RelativeProjections, ContextAttention):
    """Attention with relative positions."""

    def inputs(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> Inputs:
        content_query, relative = relative_queries(
            query,
            self.position_keys(x, num_keys=key.shape[2]),
            content_bias=self.content_bias,
            position_bias=self.position_bias,
        )
        return Inputs(content_query, key, value, visible, relative)


class FeedForward(nn.Module):
    """Feed-forward layer: D -> d_inner, ReLU, dropout, -> D, dropout."""

    def __init__(self, d_model: int, *, d_inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(d_model, d_inner)
        self.contract = nn.Linear(d_inner, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # Not in place: the output of a linear map is a view, and autograd copies the gradient of a changed view twice.
        return self.dropout(self.contract(self.dropout(F.relu(self.expand(x)))))


@torch.no_grad()
def initialize(module: nn.Module, *, std: float) -> None:
    """Draw matrices from N(0, std^2), taps of convolutions by `draw_taps`; set biases to 0 and norms to the identity.

    Deviation: the published code draws layer norm gains from N(1, 0.02) and embedding projections from N(0, 0.01).
    """
    for child in module.modules():
        if isinstance(child, ShortConvolution):
            child.reset_parameters()
            continue
        norm = isinstance(child, nn.LayerNorm | nn.RMSNorm)
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.is_meta:
                continue  # it has no values; drawing them would import torch._dynamo, which costs a --check one second
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.constant_(parameter, 1.0 if norm and name == "weight" else 0.0)
