"""Look-ahead attention: the rows of a memory attend to later rows (Ji et al. 2022, "LaMemo").

A memory row keeps its attention result, the context C (before the output projection), and s, the log of the sum of
exponentials of that softmax. Keys to its right refresh it: C' = alpha C + (1 - alpha) C_ahead, alpha = e^s / (e^s +
e^s_ahead), and s' = logaddexp(s, s_ahead). That equals one softmax in which the old context is one more key, of score s
and value C, and is computed so: nothing overflows, and a row without a visible key has alpha = 1. The epsilon of eq. 11
is 0 by default, because that row needs none; see `epsilon_shift`. The published code has 1e-6, hides 0/0 behind
nan_to_num, clamps infinities after the feed-forward and stores s in the dtype of the activations.

Shape letters as in dist_mem/nn/layers.py; W is the window, the largest number of keys that a memory row can see: the
newest W - 1 memory rows and the first token of the segment (eq. 7). That token is the input of the first prediction, so
nothing leaks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.attention import attend, mask_scores, simple_scores
from dist_mem.nn.attention_inputs import Inputs, Visible
from dist_mem.nn.chunked_attention import log_sum_exp
from dist_mem.nn.kernel_shapes import device_type_of
from dist_mem.nn.layers import AttentionOutput, RelativeProjections, relative_queries, sinusoid_table, split_heads
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.position_scores import add_by_distance


class Past(NamedTuple):
    """Attention results of memory rows so far."""

    context: Tensor  # (B, M, H, K), C, before the output projection
    log_sum: Tensor  # (B, M, H), s, float32 at least


class RefreshedPast(NamedTuple):
    past: Past  # of the newest M of the M + T rows, without gradient
    alpha: Tensor  # (H, B, M), weight of a memory row's old context, eq. 11


def visible_ahead(valid: Tensor, window_len: Tensor, num_keys: int) -> Visible:
    """Return which of the W window keys each memory row sees: valid (B, M) bool, window_len (B,) int64.

    A valid row sees the keys to its right among the newest `window_len`.
    """
    mem_len = valid.shape[1]
    key = torch.arange(mem_len - num_keys + 1, mem_len + 1, device=valid.device)
    in_window = key > mem_len - window_len[:, None]
    return Visible(in_window, mem_len, num_keys, above=num_keys - mem_len - 1, sees=valid)


def row_blocks(mem_len: int, window: int) -> list[tuple[int, int]]:
    """Return (first row, last row + 1) of each block of `ahead_scores`; all have W rows, the oldest maybe fewer."""
    return [(max(0, end - window), end) for end in range(mem_len, 0, -window)][::-1]


def ahead_scores(
    query: Tensor, key: Tensor, position: Tensor, *, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """Compute score(i, j) = [(q_i + u) . k_j + (q_i + v) . r_(j-i)] / sqrt(K) of memory rows i and window keys j.

    Rows are processed in blocks of W, each with the distances that occur in it, so the cost grows with M W, not M M.

    Args:
        query: (H, B, M, K).  key: (H, B, W, K), of rows M - W + 1, ..., M.
        position: (H, K, M + 1), W_r R_t at distances 1, ..., M and a dummy.
        content_bias, position_bias: u and v, (H, K).

    Returns:
        (H, B, M, W) in float32 or wider. Entries of keys that are not to the right of the row are meaningless.
    """
    num_heads, num_lanes, mem_len, d_head = query.shape
    window = key.shape[2]
    scale = 1.0 / math.sqrt(d_head)
    position_query = (query + position_bias[:, None, None]) * scale
    tables, offsets = [], []
    for begin, end in row_blocks(mem_len, window):
        rows = end - begin
        # Row r of the block and key c have distance nearest + c - r. Columns begin at distance 1, or at the smallest
        # distance in the block, so that this is column skipped + c - r.
        nearest = mem_len - window + 1 - begin
        skipped = min(rows, nearest) - 1
        distances = position[..., nearest - skipped - 1 : nearest + window]
        block_query = position_query[:, :, begin:end].reshape(num_heads, num_lanes * rows, d_head)
        tables.append(torch.bmm(block_query, distances).unflatten(1, (num_lanes, rows)))
        offsets.append(skipped)
    by_content = ((query + content_bias[:, None, None]) * scale) @ key.transpose(-1, -2)
    return add_by_distance(by_content, tables, offsets)


def epsilon_shift(log_sum: Tensor, scores: Tensor, visible: Tensor, *, epsilon: float) -> Tensor:
    """Return the shift of a row's look-ahead scores that gives the softmax with the old context eq. 11's epsilon.

    alpha = e^(s-c) / (e^(s-c) + e^(s_ahead-c) + epsilon) with c = max(s, s_ahead): as in the published code, epsilon is
    relative to the larger sum, whereas eq. 11 adds it to the sums. The look-ahead context has weight 1 - alpha, so
    its scores rise by log(1 + epsilon e^(c - s_ahead)).

    Args:
        log_sum: (H, B, M), s.  scores: (H, B, M, W).  visible: (B, M, W) bool.

    Returns:
        (H, B, M, 1), 0 for rows without a visible key.
    """
    sees = visible.any(-1, keepdim=True)
    ahead = (scores + torch.where(visible | ~sees, 0.0, -math.inf)).logsumexp(-1, keepdim=True)
    exponent = math.log(epsilon) + (log_sum[..., None] - ahead).clamp(min=0.0)
    return torch.where(sees, torch.logaddexp(exponent, torch.zeros_like(exponent)), 0.0)


def refresh_weights(
    log_sum: Tensor, scores: Tensor, visible: Tensor, *, interpolation: bool, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return alpha, then (1 - alpha) times the look-ahead probabilities, as one softmax; and the new s.

    Args:
        log_sum: (H, B, M).  scores: (H, B, M, W).  visible: (B, M, W) bool.
        interpolation: if false, the old context counts only where no key is visible.
        epsilon: of eq. 11, see `epsilon_shift`; the new s does not include it.

    Returns:
        (H, B, M, 1 + W), and (H, B, M) without gradient: logaddexp(s, s_ahead).
    """
    kept = torch.ones_like(visible[..., :1]) if interpolation else ~visible.any(-1, keepdim=True)
    shown = torch.where(torch.cat([kept, visible], dim=-1), 0.0, -math.inf)
    joint = torch.cat([log_sum[..., None], scores], dim=-1) + shown
    if epsilon == 0.0:
        weights = joint.softmax(dim=-1)
        return weights, log_sum_exp(joint, weights)
    shift = epsilon_shift(log_sum, scores, visible, epsilon=epsilon)
    return (joint + F.pad(shift.expand_as(scores), (1, 0))).softmax(dim=-1), joint.detach().logsumexp(-1)


def shares_of_old(log_sum: Tensor, ahead: Tensor, *, interpolation: bool, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return alpha and the new s without gradient, both (H, B, M), as `refresh_weights` from the sums alone.

    Args:
        log_sum: s.  ahead: s_ahead; -inf where no key is visible.
    """
    sees = ahead > -math.inf
    gap = torch.where(sees, log_sum - ahead, 0.0)
    if epsilon:
        exponent = math.log(epsilon) + gap.clamp(min=0.0)
        gap = gap - torch.logaddexp(exponent, torch.zeros_like(exponent))
    alpha = torch.where(sees, gap.sigmoid() if interpolation else 0.0 * gap, 1.0)
    total = torch.logaddexp(log_sum, ahead) if interpolation else torch.where(sees, ahead, log_sum)
    return alpha, total.detach()


class LookAheadAttention(RelativeProjections):
    """Relative attention of the segment to memory and segment, and of the memory rows to keys on their right."""

    needs_log_sum = True

    def __init__(
        self,
        *,
        mem_len: int,
        window: int,
        look_ahead: bool,
        interpolation: bool,
        disentangled: bool,
        epsilon: float = 0.0,
        **attention: Any,
    ) -> None:
        super().__init__(**attention)
        self.mem_len = mem_len
        self.window = window
        self.look_ahead = look_ahead
        self.interpolation = interpolation
        self.epsilon = epsilon
        if look_ahead and disentangled:
            # v of keys to the right. Deviation: the published code draws it by Xavier, ten times wider than u and v.
            self.ahead_bias = nn.Parameter(torch.zeros_like(self.position_bias))
        else:
            self.register_parameter("ahead_bias", None)

    def share_biases(self, first: nn.Module) -> None:
        super().share_biases(first)
        assert isinstance(first, LookAheadAttention)
        self.ahead_bias = first.ahead_bias

    def forward(
        self, x: Tensor, past: Past, visible: Visible, ahead: Visible, *, weights: bool = False
    ) -> tuple[AttentionOutput, RefreshedPast]:
        """Attend from the segment to memory and segment, and refresh the attention results of the memory rows.

        Args:
            x: (B, M + T, D), memory rows first.  past: of the memory rows.
            visible: see `visible_keys`.  ahead: see `visible_ahead`.
            weights: whether to return attention probabilities of the segment.

        Returns:
            The attended rows are (B, M + T, D), before the residual: the refreshed memory rows, then the segment.
        """
        mem_len = self.mem_len
        query, pairs = self.of_rows(x, visible.valid)
        key, value = split_heads(pairs, 2 * self.num_heads).contiguous().chunk(2)
        position = self.position_keys(x, num_keys=x.shape[1])
        segment_query = query[:, :, mem_len - x.shape[1] :]
        content_query, relative = relative_queries(
            segment_query, position, content_bias=self.content_bias, position_bias=self.position_bias
        )
        back_end = "simple" if weights else self.choose(device_type_of(x), segment_query.shape[2]).back_end
        inputs = Inputs(content_query, key, value, visible, relative)
        context, log_sum, shares = self.attend_segment(inputs, back_end)
        refreshed, alpha = self.refresh(query[:, :, :mem_len], key, value, position, past, ahead, back_end)
        contexts = torch.cat([refreshed.context, context.permute(1, 2, 0, 3)], dim=1)
        log_sums = torch.cat([refreshed.log_sum, log_sum.permute(1, 2, 0)], dim=1)
        newest = Past(
            contexts[:, -mem_len:].detach().to(past.context.dtype, copy=True),
            log_sums[:, -mem_len:].to(past.log_sum.dtype),
        )
        y = self.dropout(self.output(contexts.flatten(-2)))
        return AttentionOutput(y, segment_query, shares if weights else None), RefreshedPast(newest, alpha)

    def of_rows(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Project all rows, and convolve them.

        Args:
            x: (B, M + T, D).  valid: (B, M) bool, which memory rows are filled.

        Returns:
            Queries (H, B, M + T, K), without look-ahead only the segment's; keys and values (B, M + T, 2 H K).
        """
        if self.convolution is None:
            query, pairs = self.query(x if self.look_ahead else x[:, self.mem_len :]), self.key_value(x)
            return split_heads(query, self.num_heads), pairs
        is_row, nothing = F.pad(valid, (0, x.shape[1] - self.mem_len), value=True), x[:, :0]
        query, pairs = self.convolution(
            *(
                self.convolution.after_context(project, x, is_row, nothing, num_before=0)
                for project in (self.query, self.key_value)
            )
        )
        return split_heads(query if self.look_ahead else query[:, self.mem_len :], self.num_heads), pairs

    def attend_segment(self, inputs: Inputs, back_end: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return contexts, log-sums without gradient and, if `back_end` is simple, probabilities of the segment."""
        if back_end != "simple":
            rows, log_sum = attend(inputs, back_end, log_sum=True)
            assert log_sum is not None
            return rows, log_sum.detach(), None
        scores = mask_scores(simple_scores(inputs), inputs.visible)
        shares = scores.softmax(dim=-1)
        context = self.attention_dropout(shares.to(inputs.value.dtype)) @ inputs.value
        return context, log_sum_exp(scores, shares), shares

    def refresh(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, past: Past, ahead: Visible, back_end: str
    ) -> tuple[Past, Tensor]:
        """Return the refreshed attention results of memory rows, and alpha (H, B, M).

        Args:
            query: (H, B, M, K); the rest as in `forward`.
        """
        if not self.look_ahead:
            return Past(past.context.to(value.dtype), past.log_sum), torch.ones_like(past.log_sum).permute(2, 0, 1)
        window = slice(self.mem_len - self.window + 1, self.mem_len + 1)
        key, value, table = key[:, :, window], value[:, :, window], self.ahead_position_keys(position)
        position_bias = self.position_bias if self.ahead_bias is None else self.ahead_bias
        biases = {"content_bias": self.content_bias, "position_bias": position_bias}
        old_log_sum, old_context = past.log_sum.permute(2, 0, 1), past.context.permute(2, 0, 1, 3)
        options: dict[str, Any] = {"interpolation": self.interpolation, "epsilon": self.epsilon}
        if back_end == "simple":
            scores = ahead_scores(query, key, table, **biases)
            weights, log_sum = refresh_weights(old_log_sum, scores, ahead.mask(), **options)
            alpha, looking = weights[..., :1], weights[..., 1:]
            attended = self.attention_dropout(looking.to(value.dtype)) @ value
        else:
            content_query, relative = relative_queries(query, table, **biases)
            relative = replace(relative, first=self.mem_len - self.window)
            rows, log_sum_ahead = attend(Inputs(content_query, key, value, ahead, relative), back_end, log_sum=True)
            assert log_sum_ahead is not None
            alpha, log_sum = shares_of_old(old_log_sum, log_sum_ahead, **options)
            alpha = alpha[..., None]
            attended = (1.0 - alpha) * rows
        context = alpha * old_context + attended
        return Past(context.to(value.dtype).permute(1, 2, 0, 3), log_sum.permute(1, 2, 0)), alpha[..., 0]

    def ahead_position_keys(self, position: Tensor) -> Tensor:
        """Return W_r R_t at t = 1, ..., M and a dummy, (H, K, M + 1), from those of the segment; or at t = -1, ..., -M.

        With disentangled positions both directions share R_t, and here also its dropout; they differ in v.
        """
        if self.ahead_bias is not None:
            num_tokens = position.shape[-1] - 1 - self.mem_len
            return F.pad(position[..., num_tokens - 1 : -2].flip(-1), (0, 1))
        # Deviation: the published code clamps only distances to the left.
        distances = -torch.arange(1, self.mem_len + 2, device=position.device).clamp(min=1, max=self.clamp_len)
        table = self.dropout(sinusoid_table(distances, self.position.in_features, position.dtype))
        return self.position(table).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)
