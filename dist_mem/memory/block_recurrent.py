"""Block-Recurrent Transformer (Hutchins et al. 2022): tokens and a set of state vectors read each other in turn.

Source: arXiv 2203.07852, sec. 3, and the authors' code (google-research/meliad) for what the paper leaves open. A
segment is read in windows of W tokens. A token reads the W tokens before it, not itself, and the states as they were
before its window; then each state reads all states and the tokens of this window and the one before, and a gate mixes
in what it found. Gradients flow through the states and the kept keys and values inside a segment and a window of
segments (`train.bptt_segments`), and end there: such a window is what the paper calls a segment. So any cut of it into
segments has the same outputs and gradients. The paper has one such layer among layers of Transformer-XL.
`model.clamp_len` and `model.same_length` have no meaning here. Left out: block feedback, by which the other layers
read these states. Shape letters: B lanes, T segment, W window, S state vectors, D model, H heads, K head width.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.config.keys import TOKENS, WIDTH, key
from dist_mem.memory.base import (
    Count,
    Inspectable,
    LayerSpec,
    MemoryOutput,
    Opened,
    Places,
    StepOutput,
    evict_all,
    exactly,
)
from dist_mem.memory.parts.inspection import Inspection, of_tokens, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.learned_start import LearnedStart
from dist_mem.memory.parts.state_cell import (
    CellRows,
    StateHeads,
    StateUpdate,
    TokenHeads,
    by_key,
    in_window,
    merge_parts,
    read,
    shares_of,
)
from dist_mem.nn.convolution import Tail, newest_of_both
from dist_mem.nn.layers import Dropout, Projection, newest_rows
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import input_norm
from dist_mem.nn.stepping import DistanceQuery, KeptPairs, attend, keep_pairs


class BlockRecurrentState(NamedTuple):
    keys: Tensor  # (B, H, W, K), of the newest tokens, newest last; 0: none yet
    values: Tensor  # (B, H, W, K)
    length: Tensor  # (B,) int64, how many of them are valid; 0: the lane begins a document
    recurrent: Tensor  # (B, S, D) float32 at least, the state vectors; 0 where a document begins: they are learned
    tail: Tail = ()


class BlockRecurrentOpenLanes(NamedTuple):
    near: KeptPairs
    key: Tensor  # (B, H, S, K), of the state vectors
    value: Tensor  # (B, H, S, K)


class BlockRecurrent(Inspectable):
    """Attention to the last W tokens and to S state vectors, which in turn attend to the tokens."""

    title = "Block-Recurrent Transformer"
    carries_gradient = True
    takes_short_first = True
    min_seg_len = 1
    model_keys = ()

    # The window's rows could be taken out, but the states would still tell of them.
    no_forget: ClassVar[str] = "its states summarise all earlier tokens, and none of them is a passage's own"

    @dataclass
    class Options:
        num_states: int = key(512, at_least=1, at_most=TOKENS)  # S
        window: int | None = key(None, at_least=1, at_most=TOKENS)  # W, divides train.seg_len; None: train.seg_len
        gate: str = key("fixed", choices=("fixed", "lstm"))  # a learned constant for each entry, or computed
        cell: str = key("skip", choices=("skip", "dual", "single"))  # no feed-forward layer, one with a gate, only one
        d_inner: int | None = key(None, at_least=1, at_most=WIDTH)  # of the feed-forward layer; None: 4 D
        # a document's first window reads W rows of zeros too, as in the published code; false: only rows of tokens
        attend_empty: bool = False
        # tokens that a convolution of their queries, keys and values sees, with SiLU after it; None: there is none
        kernel: int | None = key(None, at_least=1, at_most=64)

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        if spec.llama is not None:
            raise ValueError(
                "memory.kind is block_recurrent, whose own attention has no grouped heads and no rotary positions: set "
                "memory.kind to transformer_xl, or model.kind to transformer"
            )
        self.window = options.window or spec.seg_len
        if spec.seg_len % self.window:
            raise ValueError(f"memory.window is {self.window}, but must divide train.seg_len = {spec.seg_len}")
        heads = {"num_heads": spec.num_heads, "d_head": spec.d_head}
        width, self.d_inner = 2 * spec.num_heads * spec.d_head, options.d_inner or 4 * spec.d_model
        self.norm = input_norm(spec)
        self.tokens = TokenHeads(spec.d_model, **heads, kernel=options.kernel)
        self.output = Projection(width, spec.d_model)
        self.start = LearnedStart(options.num_states, spec.d_model)
        self.states = StateHeads(options.num_states, spec.d_model, **heads)
        self.update = StateUpdate(spec.d_model, width=width, d_inner=self.d_inner, cell=options.cell, gate=options.gate)
        self.attention_dropout, self.dropout = Dropout(spec.attention_dropout), Dropout(spec.dropout)

    @classmethod
    def fix_lengths(cls, options: Options, seg_len: int) -> Options:
        return dataclasses.replace(options, window=options.window or seg_len)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_states": 3, "window": seg_len if seg_len % 2 else seg_len // 2, "d_inner": 7}

    @property
    def can_step(self) -> bool:
        """Only if the segment is one window: between two, lanes would change their states at different times."""
        return self.window == self.spec.seg_len

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw gates, first states and ids as published; scales begin at 1."""
        if self.start.start.is_meta:
            return
        for heads in (self.tokens, self.states):
            heads.scale.fill_(1.0)
            heads.cross_scale.fill_(1.0)
        self.start.start.normal_(std=0.1)
        self.states.ids.normal_()
        for gate in self.update.gates():
            gate.reset_parameters()

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> BlockRecurrentState:
        spec, num_lanes = self.spec, len(document_ids)
        rows = torch.zeros(num_lanes, spec.num_heads, self.window, spec.d_head, device=device, dtype=dtype)
        exact = torch.promote_types(dtype, torch.float32)  # a gate near 1 adds less than half precision resolves
        recurrent = torch.zeros(num_lanes, self.options.num_states, spec.d_model, device=device, dtype=exact)
        length = torch.zeros(num_lanes, device=device, dtype=torch.int64)
        convolution = self.tokens.convolution
        tail = () if convolution is None else convolution.empty_tail(num_lanes, device=device, dtype=dtype)
        return BlockRecurrentState(rows, rows.clone(), length, recurrent, tail)

    def counts(self, state: BlockRecurrentState, num_segments: int) -> dict[str, Count]:
        return {"length": exactly(state.length, num_segments * self.spec.seg_len, most=self.window)}

    def forward(self, x: Tensor, state: BlockRecurrentState, valid_len: Tensor) -> MemoryOutput:
        seg_len, window = x.shape[1], self.window
        tokens, bias, before = self.tokens(self.norm(x), window, state.tail)
        context = tuple(
            torch.cat([old.to(x.dtype), new], dim=2)
            for old, new in ((state.keys, tokens.key), (state.values, tokens.value))
        )
        visible = self.visible_rows(state, seg_len, valid_len)
        states = self.start(state.recurrent, state.length == 0)
        outputs, kept = [], []
        for begin in range(0, seg_len, window):
            end = min(begin + window, seg_len)
            near = slice(begin, window + end)
            part = CellRows(*(rows[:, :, begin:end] for rows in tokens))
            rows = self.states(states, x.dtype)
            keys, values = (both[:, :, near] for both in context)
            outputs.append(self.tokens_read(part, (keys, values), visible[:, near], bias, rows))
            own = read(rows.query, (rows.key, rows.value))
            found = read(rows.cross_query, (keys, values), visible=visible[:, None, near])
            new, share = self.update(states, merge_parts(own, found))
            is_read = (valid_len > begin)[:, None, None]
            states = torch.where(is_read, new, states)
            kept.append(torch.where(is_read, share.float(), 0.0).mean((1, 2)))
        y = self.dropout(self.output(torch.cat(outputs, dim=1)))
        if len(outputs) == 1:
            # No token reads the new states before the next segment, yet every parameter needs a gradient, if only 0.
            y = y + (0.0 * states.mean((1, 2)))[:, None, None].to(y.dtype)
        num_read = (valid_len + window - 1).div(window, rounding_mode="floor").clamp(min=1)
        logs = {"kept": torch.stack(kept).sum(0).detach() / num_read}
        query = tokens.content.transpose(0, 1)
        new = self.push_rows(state, context, states, valid_len)
        if isinstance(state.tail, Tensor):
            tail = newest_of_both(before, valid_len, num_rows=state.tail.shape[1]).to(state.tail.dtype)
            new = replace(new, tail=tail)
        return MemoryOutput(y, new, {}, query, evict_all(x, valid_len), logs)

    def visible_rows(self, state: BlockRecurrentState, seg_len: int, valid_len: Tensor) -> Tensor:
        """Return which of the kept rows and the segment's tokens are rows that may be read, (B, W + T) bool."""
        is_real = torch.arange(seg_len, device=valid_len.device) < valid_len[:, None]
        return torch.cat([self.visible_kept_rows(state), is_real], dim=1)

    def visible_kept_rows(self, state: BlockRecurrentState) -> Tensor:
        """Return which of the kept rows may be read, (B, W) bool."""
        newest = newest_rows(state.length, self.window)
        return torch.ones_like(newest) if self.options.attend_empty else newest

    def open_segment(self, state: BlockRecurrentState, rows: Tensor) -> Opened:
        states = self.states(self.start(state.recurrent, state.length == 0), rows.dtype)
        pairs = torch.cat([state.keys, state.values], dim=1)
        tail = state.tail.clone() if isinstance(state.tail, Tensor) else ()
        near = keep_pairs(pairs, self.visible_kept_rows(state), seg_len=self.spec.seg_len, tail=tail)
        _, bias, _ = self.tokens(rows, self.window, state.tail)  # at distances W, ..., 1; the others are not seen
        table = F.pad(bias, (self.spec.seg_len - 1, 2))[:, None]
        return Opened(BlockRecurrentOpenLanes(near, states.key, states.value), table)

    def step_rows(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        near, key, value = opened.lanes
        tokens, before = self.tokens.after_tail(self.norm(x), near.tail)
        if isinstance(near.tail, Tensor) and isinstance(before, Tensor):
            near.tail.copy_(newest_of_both(before, places.num_real, num_rows=near.tail.shape[1]))
        query = tokens.query * math.sqrt(tokens.query.shape[-1])  # by which `attend` divides
        by_distance = DistanceQuery(torch.ones_like(query[..., :1]), opened.shared)
        pairs = torch.cat([tokens.key, tokens.value], dim=1)
        found = attend(query, pairs, near, places, above=-1, sees_itself=False, by_distance=by_distance)
        far = merge_parts(read(tokens.cross_query, (key, value)))
        y = self.output(torch.cat([found, far], dim=-1))
        return StepOutput(y, tokens.content.transpose(0, 1), opened)

    def tokens_read(
        self, tokens: CellRows, context: tuple[Tensor, Tensor], visible: Tensor, bias: Tensor, states: CellRows
    ) -> Tensor:
        """Return what the tokens of a window read of the tokens before them, and of the states: (B, W, 2 H K)."""
        near = read(
            tokens.query, context, dropout=self.attention_dropout, **self.score_rows(tokens.query, visible, bias)
        )
        far = read(tokens.cross_query, (states.key, states.value), dropout=self.attention_dropout)
        return merge_parts(near, far)

    def score_rows(self, query: Tensor, visible: Tensor, bias: Tensor) -> dict[str, Tensor]:
        """Return what a window's tokens see of the rows of `visible`, (B, W + W), and the biases of their scores."""
        num_queries = query.shape[2]
        mask = visible[:, None] & in_window(num_queries, self.window, visible.device)
        return {"visible": mask, "bias": by_key(bias, num_queries)}

    @torch.no_grad()
    def inspect(self, x: Tensor, state: BlockRecurrentState, valid_len: Tensor, trace: Any = None) -> Inspection:
        """Return what tokens read of tokens. The states, which are read by a softmax of their own, are of no token."""
        seg_len = x.shape[1]
        tokens, bias, _ = self.tokens(self.norm(x), self.window, state.tail)
        keys = torch.cat([state.keys.to(x.dtype), tokens.key], dim=2)
        visible = self.visible_rows(state, seg_len, valid_len)
        parts = []
        for begin in range(0, seg_len, self.window):
            end = min(begin + self.window, seg_len)
            near, query = slice(begin, self.window + end), tokens.query[:, :, begin:end]
            shares = shares_of(query, keys[:, :, near], **self.score_rows(query, visible[:, near], bias))
            parts.append(F.pad(shares, (begin, seg_len - end)))
        memory, segment = torch.cat(parts, dim=2).transpose(0, 1).tensor_split([self.window], dim=-1)
        rows = {"memory": rows_of(memory, token_spans(state.length, self.window))}
        return Inspection(of_tokens({**rows, "segment": segment_rows(segment, valid_len)}))

    def push_rows(
        self, state: BlockRecurrentState, context: tuple[Tensor, ...], states: Tensor, valid_len: Tensor
    ) -> BlockRecurrentState:
        """Keep the keys and values of the newest W real tokens; the context is those kept before, then the segment."""
        places = valid_len[:, None] + torch.arange(self.window, device=valid_len.device)
        index = places[:, None, :, None].expand(-1, self.spec.num_heads, -1, self.spec.d_head)
        keys, values = (rows.gather(2, index).to(state.keys.dtype) for rows in context)
        return BlockRecurrentState(keys, values, (state.length + valid_len).clamp(max=self.window), states)
