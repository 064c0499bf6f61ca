"""Associative Recurrent Memory Transformer (Rodkin et al. 2024): a matrix per block, written by rows after the segment.

Source: arXiv 2407.04841v2, sec. 2, eqs. 1 to 4, and the authors' code (RodkinIvan/associative-recurrent-memory-
transformer). M learned rows, the same in every segment, follow its tokens through all blocks. What a block makes of
them is written into its matrix once a segment; in later segments every row of the block's input, memory rows too, reads
it first, and the reading is added. Nothing else is carried. The attention is that of the memory below
(`over`), and tokens do not see the rows after them, so that a model whose matrices are empty computes what it computes
without: W_v begins at 0, and a pretrained model starts as itself. Gradients flow through the matrices in a window
(`train.bptt_segments`); with one segment a window, nothing teaches the blocks what the memory rows should hold. What a
segment writes is kept as rows, and the next forward writes it before it reads: the same numbers, but W_k and W_v learn
from every loss.

`variant` has the three forms: "published" (the code since October 2024: features of length 1), "first_release" (not
normed, and 1e-5 in the denominator of gamma), "paper" (eqs. 1 to 4 to the letter: no epsilon, gamma neither clipped nor
a constant; where a row shares no feature with what was written it reads 0, the paper 0/0).

Deviations: memory rows have no learned position of GPT-2's, so what the code adds there is part of the row itself. In a
GPT-2 or Llama in training, one dropout mask lies over the reading and the attention's output.
Shape letters: B lanes, T segment, M memory rows, R = T + M, D model, H memory heads, W width of a head's keys, F = 2 nu
W features, V = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, WIDTH, key
from dist_mem.memory.base import (
    LayerSpec,
    MemoryOutput,
    MemoryState,
    Opened,
    OverMemory,
    Places,
    Stem,
    StepOutput,
    evict_all,
)
from dist_mem.memory.none import EmptyState, NoMemory
from dist_mem.memory.parts.inspection import Inspection
from dist_mem.nn.layers import Projection
from dist_mem.nn.plain_attention import BiasedProjection

_EPSILON = 1e-5  # of the published denominators


class Matrix(NamedTuple):
    sums: Tensor  # (B, H, F, V) float32 at least: A
    norm: Tensor  # (B, H, F) float32 at least: z; 0 only in an empty memory


class ArmtState(NamedTuple):
    matrix: Matrix  # before `pending`
    pending: Tensor  # (B, M, D), what the block made of the memory rows of the last segment
    has_pending: Tensor  # (B,) bool


class ArmtOpenLanes(NamedTuple):
    over: Any  # of the attention below
    matrix: Matrix


class RowsAfter(Stem):
    """Puts the memory rows after the segment."""

    def __init__(self, *, num_tokens: int, d_model: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(num_tokens, d_model))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows from N(0, 0.02), as published."""
        if not self.rows.is_meta:
            self.rows.normal_(std=0.02)

    def forward(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        return torch.cat([x, self.rows.to(x.dtype).expand(len(x), -1, -1)], dim=1), state

    def read_top(self, rows: Tensor, state: MemoryState, *, seg_len: int) -> tuple[Tensor, MemoryState]:
        return rows[:, :seg_len], state


class AssociativeMemory(OverMemory):
    """A matrix that all rows read, and that the rows after the segment are written into."""

    title = "Associative Recurrent Memory Transformer"
    carries_gradient = True
    over: NoMemory
    no_forget: ClassVar[str] = "its matrix is a sum over memory rows, in which a passage has no rows of its own"

    @dataclass
    class Options:
        # the attention within the segment: none, or causal, which is GPT-2's
        over: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
        num_tokens: int = key(16, at_least=1, at_most=TOKENS)  # M, memory rows after the segment
        d_key: int = key(64, at_least=1, at_most=WIDTH)  # width of queries and keys, all heads together
        num_heads: int = key(1, at_least=1, at_most=WIDTH)  # H, of the memory
        nu: int = key(3, at_least=1, at_most=64)  # shifts of DPFP; a key has 2 nu d_key / H features
        value_init: float = 0.0  # factor of the initial W_v; 0, as published: the model starts without memory
        gating: bool = False  # how much is written is a number for each channel; false: one for each head
        # published | first_release | paper: see dist_mem/memory/armt.py
        variant: str = key("published", choices=("published", "first_release", "paper"))

    def __init__(self, spec: LayerSpec, options: Options, over: NoMemory) -> None:
        super().__init__(spec, options, over)
        if not isinstance(over, NoMemory):
            raise ValueError(
                f"memory.over is {type(over).__module__.rpartition('.')[2]}, but beside the matrix of armt nothing is "
                "carried: set memory.over.kind to none, or causal, which is GPT-2's attention"
            )
        for name, value in (("d_key", options.d_key), ("d_model", spec.d_model)):
            if value % options.num_heads:
                of = "model" if name == "d_model" else "memory"
                raise ValueError(
                    f"memory.num_heads is {options.num_heads}, which does not divide {of}.{name} = {value}: set "
                    "memory.num_heads to a divisor"
                )
        if options.nu >= (most := 2 * options.d_key // options.num_heads):
            raise ValueError(f"memory.nu is {options.nu}, but must be less than 2 d_key / num_heads = {most}")
        self.num_after = options.num_tokens
        self.query, self.key = Projection(spec.d_model, options.d_key), Projection(spec.d_model, options.d_key)
        self.value = Projection(spec.d_model, spec.d_model)
        self.strength = BiasedProjection(spec.d_model, spec.d_model if options.gating else options.num_heads)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_tokens": 2, "d_key": 16, "value_init": 1.0}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.value.weight.is_meta:
            self.value.weight.mul_(self.options.value_init)

    @property
    def norm(self) -> nn.Module:
        """The layer norm of the memory below, as a memory over this one finds it."""
        return self.over.norm

    @property
    def min_seg_len(self) -> int:
        return self.over.min_seg_len

    @property
    def can_step(self) -> bool:
        return self.over.can_step

    @property
    def num_rows(self) -> int:
        return self.spec.seg_len + self.options.num_tokens

    def stem(self) -> RowsAfter:
        return RowsAfter(num_tokens=self.options.num_tokens, d_model=self.spec.d_model)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> ArmtState:
        num_lanes, num_heads, d_model = len(document_ids), self.options.num_heads, self.spec.d_model
        shape = (num_lanes, num_heads, 2 * self.options.nu * self.options.d_key // num_heads)
        exact = torch.promote_types(dtype, torch.float32)  # growing sums: half precision would lose small terms
        sums = torch.zeros(*shape, d_model // num_heads, device=device, dtype=exact)
        return ArmtState(
            Matrix(sums, torch.zeros(shape, device=device, dtype=exact)),
            torch.zeros(num_lanes, self.options.num_tokens, d_model, device=device, dtype=dtype),
            torch.zeros(num_lanes, device=device, dtype=torch.bool),
        )

    def forward(self, x: Tensor, state: ArmtState, valid_len: Tensor) -> MemoryOutput:
        matrix = self.write_pending(state, x.dtype)
        found = self.read(x, matrix)
        below = self.over(x + found, EmptyState(), valid_len)
        segment = x[:, : x.shape[1] - self.num_after].detach()
        query = below.query[:, :, : segment.shape[1]]
        read = found[:, : segment.shape[1]].detach()
        share = read.float().norm(dim=-1) / segment.float().norm(dim=-1).clamp(min=1e-12)
        is_real = torch.arange(segment.shape[1], device=x.device) < valid_len[:, None]
        logs = {"read": (share * is_real).sum(dim=1) / valid_len.clamp(min=1)}
        new = ArmtState(matrix, state.pending, state.has_pending)
        return MemoryOutput(found + below.y, new, {}, query, evict_all(segment, valid_len), logs)

    def after_block(self, rows: Tensor, state: ArmtState) -> ArmtState:
        pending = rows[:, -self.num_after :].to(state.pending.dtype).contiguous()  # no view, which would keep all rows
        return ArmtState(state.matrix, pending, torch.ones_like(state.has_pending))

    def read(self, rows: Tensor, matrix: Matrix) -> Tensor:
        """Return what rows of the block's input, (B, R, D), read (eq. 4); 0 where nothing is written."""
        features = self.features(self.query(rows), matrix)
        return recall(features, matrix, self.epsilon).transpose(1, 2).flatten(2).to(rows.dtype)

    def write_pending(self, state: ArmtState, dtype: torch.dtype) -> Matrix:
        """Return the matrix after the pending rows, each against the matrix before them (eqs. 1 to 3)."""
        rows, matrix = state.pending.to(dtype), state.matrix
        features = self.features(self.key(rows), matrix) * state.has_pending[:, None, None, None]
        value = by_head(self.value(rows), matrix)
        strength = self.strength(rows).to(matrix.norm.dtype).sigmoid()
        strength = strength.unflatten(-1, (self.options.num_heads, -1)).transpose(1, 2)  # (B, H, M, 1 or V)
        change = strength * (value - recall(features, matrix, self.epsilon))
        share = self.new_share(features, matrix)[..., None]
        return Matrix(matrix.sums + features.mT @ change, matrix.norm + (share * features).sum(dim=2))

    def new_share(self, features: Tensor, matrix: Matrix) -> Tensor:
        """Return gamma, the share of keys that the memory does not have yet (eq. 3): (B, H, M)."""
        length = features.square().sum(-1) + (_EPSILON if self.options.variant == "first_release" else 0.0)
        known = (features * matrix.norm[:, :, None]).sum(-1) + self.epsilon
        share = 1.0 - known / torch.where(length == 0, 1.0, length)
        if self.options.variant != "paper":
            share = share.clamp(0.0, 1.0).detach()
        is_empty = (matrix.norm.detach() == 0).flatten(1).all(dim=1)
        return torch.where(is_empty[:, None, None], 1.0, share)

    @property
    def epsilon(self) -> float:
        """What is added to the sum that divides a reading."""
        return 0.0 if self.options.variant == "paper" else _EPSILON

    def features(self, rows: Tensor, matrix: Matrix) -> Tensor:
        """Return DPFP of queries or keys, (B, R, d_key) -> (B, H, R, F), in the precision of the matrix."""
        heads = by_head(rows, matrix)
        parts = torch.cat([heads, -heads], dim=-1).relu()
        found = torch.cat([parts * parts.roll(shift, dims=-1) for shift in range(1, self.options.nu + 1)], dim=-1)
        return F.normalize(found, dim=-1) if self.options.variant == "published" else found

    def open_segment(self, state: ArmtState, rows: Tensor) -> Opened:
        below = self.over.open_segment(EmptyState(), rows)
        return Opened(ArmtOpenLanes(below.lanes, self.write_pending(state, rows.dtype)), below.shared)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        lanes, matrix = opened.lanes
        found = self.read(x, matrix)
        below = self.over.step_rows(x + found, Opened(lanes, opened.shared), places)
        return StepOutput(
            found + below.y, below.query, Opened(ArmtOpenLanes(below.opened.lanes, matrix), below.opened.shared)
        )

    @torch.no_grad()
    def inspect(self, x: Tensor, state: ArmtState, valid_len: Tensor, trace: None = None) -> Inspection:
        """Return the attention to the segment; what is read of the matrix is added to the rows, and has no weights."""
        tokens = x[:, : x.shape[1] - self.num_after]
        return self.over.inspect(
            tokens + self.read(tokens, self.write_pending(state, x.dtype)), EmptyState(), valid_len
        )


def by_head(rows: Tensor, matrix: Matrix) -> Tensor:
    """Split rows into heads, in the precision of the matrix: (B, R, H W) -> (B, H, R, W)."""
    return rows.to(matrix.norm.dtype).unflatten(-1, (matrix.norm.shape[1], -1)).transpose(1, 2)


def recall(features: Tensor, matrix: Matrix, epsilon: float) -> Tensor:
    """Read the matrix with features of queries or keys (eqs. 2 and 4): (B, H, R, F) -> (B, H, R, V)."""
    total = (features * matrix.norm[:, :, None]).sum(-1, keepdim=True) + epsilon
    return features @ matrix.sums / torch.where(total == 0, 1.0, total)
