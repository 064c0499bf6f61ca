"""Recurrent Memory Transformer over a pretrained model: memory rows are ordinary rows of its attention.

Source: Bulatov et al. 2023 (arXiv 2304.11062), Kuratov et al. 2024 (2402.10790), and the authors' code (booydar/
recurrent-memory-transformer), where RMT wraps a published GPT-2 or Llama. A segment is read as [rows; tokens; rows]
with the same M rows before and after, places 0 to T + 2M - 1, memory rows counted, and a causal mask and nothing else:
tokens see the rows before them, the rows after them see everything. What the final norm makes of the rows after is what
the next segment begins with, and the first rows are learned. rmt.py is RMT with Transformer-XL's attention as published
with it, whose memory rows have another mask and other scores; here, in a model with distances, they count as any rows.

A pretrained model does not start as itself: tokens stand M places later, and see the rows before them. For a memory
that does, see armt.py. A model needs T + 2M places (`model.num_positions` of a GPT-2). Gradients flow through the rows
in a window (`train.bptt_segments`).

Deviations: the last segment of a text is padded to T tokens, where the rows after would see the padding; it is never
carried on (rule 3), so no row that is read has seen any. The first rows are drawn from N(0, `memory.init_std`), the
published ones from N(0, s) with s of the embedding matrix.
Shape letters: B lanes, T segment, M memory rows, R = T + 2M, D model, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, key
from dist_mem.memory.base import LayerSpec, MemoryOutput, Opened, OverMemory, Places, StepOutput, evict_all
from dist_mem.memory.none import EmptyState, NoMemory
from dist_mem.memory.parts.inspection import Inspection, of_tokens, segment_rows, summary_rows, tokens_read
from dist_mem.memory.rmt import MemoryTokens, TokensState


class PlacedTokens(MemoryTokens):
    """Puts the memory rows before the segment and after it; in a GPT-2 they have learned positions as tokens have."""

    def __init__(self, *, num_tokens: int, d_model: int, dropout: float, init_std: float) -> None:
        super().__init__(num_tokens=num_tokens, d_model=d_model, dropout=dropout, at_end=True)
        self.init_std, self.first_place = init_std, num_tokens

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the first rows."""
        if not (start := self.first.start).is_meta:
            start.normal_(std=self.init_std)

    def forward(self, x: Tensor, state: TokensState, positions: Tensor | None = None) -> tuple[Tensor, TokensState]:
        rows = self.first(state.rows, state.is_fresh).to(x.dtype)
        both = [rows, rows] if positions is None else [rows + part.to(x.dtype) for part in positions.chunk(2)]
        before, after = map(self.dropout, both)
        return torch.cat([before, x, after], dim=1), state


class RecurrentRows(OverMemory):
    """The model's own attention over the segment and the memory rows around it."""

    title = "RMT over pretrained models"
    carries_gradient = True
    over: NoMemory
    no_forget: ClassVar[str] = "its memory rows summarise all earlier segments, and none of them is a passage's own"

    @dataclass
    class Options:
        # the attention: none, or causal, which is GPT-2's
        over: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
        num_tokens: int = key(16, at_least=1, at_most=TOKENS)  # M, memory rows
        init_std: float = key(0.02, above=0)  # of the first rows; published: that of the embedding, 0.14 in GPT-2

    def __init__(self, spec: LayerSpec, options: Options, over: NoMemory) -> None:
        super().__init__(spec, options, over)
        if not isinstance(over, NoMemory):
            raise ValueError(
                f"memory.over is {type(over).__module__.rpartition('.')[2]}, but memory rows are rows of attention "
                "without memory: set memory.over.kind to none, or causal, which is GPT-2's"
            )
        if spec.llama is not None and spec.llama.rope is not None and spec.llama.rope.kind == "dynamic":
            raise ValueError(
                "model.rope.kind is dynamic, whose angles depend on the number of rows, and memory.kind rmt_rows adds "
                "some: set memory.kind to armt"
            )
        self.num_after = options.num_tokens

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_tokens": 3, "init_std": 1.0}

    @property
    def norm(self) -> nn.Module:
        """The layer norm of the attention, as a memory over this one finds it."""
        return self.over.norm

    @property
    def min_seg_len(self) -> int:
        return self.over.min_seg_len

    @property
    def can_step(self) -> bool:
        return self.over.can_step

    @property
    def num_rows(self) -> int:
        return self.spec.seg_len + 2 * self.options.num_tokens

    def stem(self) -> PlacedTokens:
        sizes = {"num_tokens": self.options.num_tokens, "d_model": self.spec.d_model}
        return PlacedTokens(**sizes, dropout=self.spec.dropout, init_std=self.options.init_std)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> EmptyState:
        return EmptyState()

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return the rows of tokens, (..., R, D) -> (..., T, D)."""
        return rows[..., self.options.num_tokens : rows.shape[-2] - self.options.num_tokens, :]

    def forward(self, x: Tensor, state: EmptyState, valid_len: Tensor) -> MemoryOutput:
        below = self.over(x, state, valid_len)
        return MemoryOutput(below.y, state, {}, self.tokens_of(below.query), evict_all(self.tokens_of(x), valid_len))

    def open_segment(self, state: EmptyState, rows: Tensor) -> Opened:
        return self.over.open_segment(state, rows)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        return self.over.step_rows(x, opened, places)

    @torch.no_grad()
    def inspect(self, x: Tensor, state: EmptyState, valid_len: Tensor, trace: Tensor | None = None) -> Inspection:
        """Return what the segment's tokens read; what they read of the learned first rows is left out."""
        weights = self.tokens_of(self.over.attend(x, weights=True).shares())
        num_tokens, num_rows = tokens_read(trace, valid_len), self.options.num_tokens
        read, segment, _ = weights.tensor_split([num_rows, weights.shape[-1] - num_rows], dim=-1)
        rows = {"summary": summary_rows(read, num_tokens), "segment": segment_rows(segment, valid_len)}
        return Inspection(of_tokens(rows), trace=num_tokens + valid_len)
