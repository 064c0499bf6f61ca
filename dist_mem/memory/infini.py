"""Infini-attention (Munkhdalai et al. 2024): one matrix per head, to which every segment adds its keys and values.

Source: arXiv 2404.07143v2, eqs. 5 to 11. Gradients flow through the state within an update (`train.bptt_segments`);
with one segment a window, nothing teaches the memory what later segments need, as they read it as a constant. The paper
has windows of 16 segments of 2,048 tokens. Deviations: the sum that divides a reading is at least 1e-10 (the paper
divides by 0 if the memory is empty), and scores are divided by the root of the head's width, not of the model's.
The convolution of `memory.kernel` begins at zeros in every segment, as its attention does.

With `memory.over` queries, keys, values and attention are those of the memory there, as of a pretrained model: its
heads may share keys, and then a matrix, norms of heads count, and what is written and read is taken before a rotation;
GPT-2's rows contain their positions. `memory.gate: tanh` makes the share of a head tanh(beta), which is 0 at 0: the
model begins as without the memory, to the last bit, and beta has a gradient. The paper has the sigmoid.
Shape letters: B lanes, T segment, D model, H heads, G heads of keys, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config.keys import key
from dist_mem.memory.base import LayerSpec, Memory, MemoryOutput, Opened, OverMemory, Places, StepOutput, evict_all
from dist_mem.memory.none import EmptyState, NoMemory, attention_below
from dist_mem.memory.parts import fused_matrix
from dist_mem.memory.parts.fused_rows import mix_rows
from dist_mem.memory.parts.inspection import Inspection, of_tokens, segment_rows, summary_rows, tokens_read
from dist_mem.memory.parts.kernel_choice import by_kernels, choose
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.attention_inputs import Inputs
from dist_mem.nn.convolution import short_convolution
from dist_mem.nn.layers import AttentionLayer, Dropout, HeadRows, Projection, split_heads, visible_keys
from dist_mem.nn.norms import input_norm
from dist_mem.nn.stepping import KeptPairs, attend, keep_pairs, lane_heads


class InfiniState(NamedTuple):
    matrix: Tensor  # (B, G, K, K) float32 at least: sigma(k)^T v, summed over all written tokens
    norm: Tensor  # (B, G, K) float32 at least: sigma(k), summed; 0 only in an empty memory


class InfiniOpenLanes(NamedTuple):
    segment: Any  # `KeptPairs`, of its own attention or that below
    state: InfiniState


class ProjectedSegment(NamedTuple):
    """What a segment projects to, all heads side by side."""

    query: Tensor  # (B, T, H K)
    key: Tensor  # (B, T, H K)
    value: Tensor  # (B, T, H K)


class SegmentAttention(AttentionLayer):
    """The projections, and causal attention within the segment with rotary positions, which begin at 0 in each."""

    def __init__(self, spec: LayerSpec, *, kernel: int | None = None) -> None:
        super().__init__(attention_dropout=spec.attention_dropout, back_end=spec.back_end)
        width = spec.num_heads * spec.d_head
        self.num_heads = spec.num_heads
        self.query, self.key_value = Projection(spec.d_model, width), Projection(spec.d_model, 2 * width)
        self.output = Projection(width, spec.d_model)
        self.convolution = short_convolution([width, 2 * width], kernel)
        self.dropout = Dropout(spec.dropout)

    def project(self, rows: Tensor) -> ProjectedSegment:
        """Project rows (B, T, D) of a segment, from its first."""
        query, pairs, _ = self.after_tail(rows, self.empty_tail(len(rows), rows.device, rows.dtype))
        return ProjectedSegment(query, *pairs.chunk(2, dim=-1))

    def attend(self, rows: ProjectedSegment, *, weights: bool) -> HeadRows:
        """Attend to the segment; if asked for, with the probabilities."""
        query, keys, value = (split_heads(part, self.num_heads) for part in rows)
        by = turns(query.shape[2], query)
        scaled = rotate(query, by) / math.sqrt(query.shape[-1])
        read, shares = self.attend_turned(scaled, rotate(keys, by), value, weights=weights)
        return HeadRows(read, query, keys, value, shares)

    def attend_turned(
        self, query: Tensor, key: Tensor, value: Tensor, *, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `attend`, from turned and scaled queries, (H, B, T, K), to turned keys."""
        nothing = torch.empty(query.shape[1], 0, dtype=torch.bool, device=query.device)
        visible = visible_keys(nothing, query.shape[2], same_length=False)
        return self.read(Inputs(query, key, value, visible), weights=weights)

    def step_rows(
        self, rows: ProjectedSegment, segment: KeptPairs, by: tuple[Tensor, Tensor], places: Places
    ) -> Tensor:
        """Return what further rows read of the segment, (H, B, R, K); `by`: the turns of all its places."""
        query, keys, value = (lane_heads(part, self.num_heads) for part in rows)
        own = by[0][places.row][:, None], by[1][places.row][:, None]
        pairs = torch.cat([rotate(keys, own), value], dim=1)
        return split_heads(attend(rotate(query, own), pairs, segment, places), self.num_heads)


class Infini(OverMemory):
    """Attention within the segment, mixed with a reading of all earlier segments by a gate per head."""

    title = "Infini-attention"
    carries_gradient = True
    takes_short_first = True
    min_seg_len = 1
    can_step = True

    computes = "matrix memory"
    over: NoMemory | None
    no_forget: ClassVar[str] = "its matrix is a sum over all tokens, in which a passage has no rows of its own"

    @dataclass
    class Options:
        rule: str = key("delta", choices=("delta", "linear"))  # write what the memory lacks (eq. 9), or all (eq. 8)
        # the memory whose attention it reads beside, none or causal; null: an attention of its own
        over: Any = None
        gate_init: float = key(0.0)  # beta
        # the share of the memory in a head's output: sigmoid(beta), as in the paper | tanh(beta), which is 0 at 0
        gate: str = key("sigmoid", choices=("sigmoid", "tanh"))
        # mix in the reading of an empty memory, 0, as in the paper; false: the first segment has no gate
        gate_empty: bool = True
        # tokens that a convolution of queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options, over: Memory | None = None) -> None:
        super().__init__(spec, options, attention_below(over, options, spec, kind="infini"))
        self.key_heads = spec.num_heads
        if self.over is None:
            self.norm = input_norm(spec)
            self.attention = SegmentAttention(spec, kernel=options.kernel)
        else:
            self.key_heads = spec.kv_width // spec.d_head
        self.beta = nn.Parameter(torch.zeros(spec.num_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.beta.is_meta:
            self.beta.fill_(self.options.gate_init)

    @classmethod
    def title_of(cls, options: Options) -> str:
        return f"{cls.title} over attention" if options.over else cls.title

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> InfiniState:
        shape = (len(document_ids), self.key_heads, self.spec.d_head, self.spec.d_head)
        exact = torch.promote_types(dtype, torch.float32)  # growing sums: half precision would lose small terms
        matrix = torch.zeros(shape, device=device, dtype=exact)
        return InfiniState(matrix, torch.zeros(shape[:-1], device=device, dtype=exact))

    def forward(self, x: Tensor, state: InfiniState, valid_len: Tensor) -> MemoryOutput:
        if self.over is None and by_kernels(self, x, x.shape[1]):
            rows = self.attention.project(self.norm(x))
            y, new_state = self.forward_by_kernels(rows, state, valid_len)
            query = split_heads(rows.query, self.spec.num_heads)
        else:
            heads = self.attend(x, weights=False)
            y, new_state = self.mix_output(heads.rows, heads.query, state), self.write_rows(state, heads, valid_len)
            query = heads.query
        logs = {"share": self.share(self.beta.detach().float()).mean()}
        return MemoryOutput(y, new_state, {}, query, evict_all(x, valid_len), logs)

    def attend(self, x: Tensor, *, weights: bool) -> HeadRows:
        """Attend to the segment."""
        if self.over is not None:
            return self.over.attend_heads(x, weights=weights)
        return self.attention.attend(self.attention.project(self.norm(x)), weights=weights)

    def forward_by_kernels(
        self, rows: ProjectedSegment, state: InfiniState, valid_len: Tensor
    ) -> tuple[Tensor, InfiniState]:
        """Return the output and the memory after the segment as `forward`, without rows in float32 in memory."""
        query, key, value = (split_heads(part, self.spec.num_heads) for part in rows)
        asking = fused_matrix.turn(query, scale=query.shape[-1] ** -0.5)
        local, _ = self.attention.attend_turned(asking, fused_matrix.turn(key), value)
        remembered = fused_matrix.recall(query, *state)
        share = self.gate(state)[:, :, 0, 0].float().expand(query.shape[:2])
        y = self.attention.merge_output(mix_rows(remembered, local, share))
        return y, InfiniState(*fused_matrix.write(key, value, *state, valid_len, rule=self.options.rule))

    def choose_kernels(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return whether our kernels read and write the memory, or torch's operators."""
        return choose(
            self.spec.back_end,
            device_type,
            num_queries,
            width=self.spec.d_head,
            refused=None if self.over is None else "memory.over has another attention",
            reason="our kernels keep features and sums in registers",
        )

    def mix_output(self, local: Tensor, query: Tensor, state: InfiniState) -> Tensor:
        """Return the output of rows, (B, T, D), from what they read of the segment, (H, B, T, K), and of the memory."""
        features = sigma(self.lane_first(query, state))
        shared = len(query) // self.key_heads
        if shared > 1:  # the heads that share a matrix are further rows of it
            features = features.unflatten(1, (-1, shared)).flatten(2, 3)
        remembered = recall(features, state)
        if shared > 1:
            remembered = remembered.unflatten(2, (shared, -1)).flatten(1, 2)
        remembered = remembered.transpose(0, 1).to(local.dtype)
        share = self.gate(state).to(local.dtype)
        attention = self.attention if self.over is None else self.over.attention
        y: Tensor = attention.merge_output(share * remembered + (1.0 - share) * local)
        return y

    def open_segment(self, state: InfiniState, rows: Tensor) -> Opened:
        if self.over is not None:
            below = self.over.open_segment(EmptyState(), rows)
            return Opened(InfiniOpenLanes(below.lanes, state), below.shared)
        num_heads, seg_len, d_head = self.spec.num_heads, self.spec.seg_len, self.spec.d_head
        nothing = rows.new_empty(len(rows), 2 * num_heads, 0, d_head)
        no_row, tail = nothing.new_empty(len(rows), 0, dtype=torch.bool), self.attention.empty_tail
        segment = keep_pairs(nothing, no_row, seg_len=seg_len, tail=tail(len(rows), rows.device, rows.dtype))
        return Opened(InfiniOpenLanes(segment, state), turns(seg_len, nothing))

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        lanes = opened.lanes
        if self.over is None:
            query, pairs = self.attention.further(self.norm(x), lanes.segment, places)
            rows = ProjectedSegment(query, *pairs.chunk(2, dim=-1))
            local = self.attention.step_rows(rows, lanes.segment, opened.shared, places)
            query = split_heads(query, self.spec.num_heads)
        else:
            local, query = self.over.step_heads(x, Opened(lanes.segment, opened.shared), places)
            local = split_heads(local, self.spec.num_heads)
        return StepOutput(self.mix_output(local, query, lanes.state), query, opened)

    def write_rows(self, state: InfiniState, rows: HeadRows, valid_len: Tensor) -> InfiniState:
        """Return the memory after the segment (eqs. 8 and 9); all tokens read the memory before it."""
        is_real = torch.arange(rows.key.shape[2], device=valid_len.device) < valid_len[:, None]
        features = sigma(self.lane_first(rows.key, state)) * is_real[:, None, :, None]
        new = self.lane_first(rows.value, state)
        if self.options.rule == "delta":
            new = new - recall(features, state)
        return InfiniState(state.matrix + features.mT @ new, state.norm + features.sum(dim=2))

    def lane_first(self, rows: Tensor, state: InfiniState) -> Tensor:
        """Return rows of heads in the precision of the state: (H, B, T, K) -> (B, H, T, K)."""
        return (
            rows.to(state.norm.dtype).transpose(0, 1).contiguous()
        )  # torch.compile is wrong about the strides of ELU's gradient otherwise

    def gate(self, state: InfiniState) -> Tensor:
        """Return the memory's share in the output of every head, (H, 1, 1, 1), or of every head and lane."""
        share = self.share(self.beta)[:, None, None, None]
        if self.options.gate_empty:
            return share
        is_written = (state.norm.detach() > 0).flatten(1).any(dim=1)
        return torch.where(is_written[:, None, None], share, 0.0)

    def share(self, beta: Tensor) -> Tensor:
        """Return the share of the memory in the output of a head with this beta."""
        return beta.tanh() if self.options.gate == "tanh" else beta.sigmoid()

    @torch.no_grad()
    def inspect(self, x: Tensor, state: InfiniState, valid_len: Tensor, trace: Tensor | None = None) -> Inspection:
        """Return the attention to the segment, and the gate's share as the weight of one row for all the past.

        A negative share, of `gate: tanh`, counts by its size.
        """
        weights = self.attend(x, weights=True).weights
        assert weights is not None
        share = self.gate(state).to(weights.dtype)
        num_tokens = tokens_read(trace, valid_len)
        rows = {
            "summary": summary_rows(share.abs().expand(*weights.shape[:3], 1), num_tokens),
            "segment": segment_rows((1.0 - share) * weights, valid_len),
        }
        return Inspection(of_tokens(rows), trace=num_tokens + valid_len)


def turns(seg_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of t 10000^(-2 j / K) for row t and pair j, (T, K // 2) float32 or wider.

    Args:
        like: (..., K), the rows that are to turn.
    """
    width, exact = like.shape[-1], torch.promote_types(like.dtype, torch.float32)
    rates = 10000.0 ** (-torch.arange(0, width - 1, 2, device=like.device, dtype=exact) / width)
    angles = torch.arange(seg_len, device=like.device, dtype=exact)[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(rows: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (2 j, 2 j + 1) of rows (..., K) by `turns`, and cast at the end; of an odd K the last entry stays.

    Source: Su et al. 2021, "RoFormer", sec. 3.2.2.
    """
    cos, sin = by
    end = 2 * cos.shape[-1]
    even, odd = rows[..., 0:end:2], rows[..., 1:end:2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([turned, rows[..., end:]], dim=-1).to(rows.dtype)


def sigma(rows: Tensor) -> Tensor:
    """Return the positive features of queries or keys: ELU + 1."""
    return F.elu(rows) + 1.0


def recall(features: Tensor, state: InfiniState) -> Tensor:
    """Read the memory with features of queries or keys (eq. 7): (B, H, T, K)."""
    total = (features * state.norm[:, :, None]).sum(-1, keepdim=True)
    return features @ state.matrix / total.clamp(min=1e-10)
