"""Titans (Behrouz et al. 2024): the weights of a small network per layer, which every token trains while it is read.

Source: arXiv 2501.00663, eqs. 8 to 31. No code was published; the paper leaves open what is chosen here:
- `context` would see the future if taken literally, as every query would see what is recalled for all later tokens, and
  read a memory that all of the segment has been written to. Here a query sees what is recalled for the tokens up to
  itself, and reads the memory that has learned the tokens up to itself.
- The learned rows are seen by attention only: the memory would learn them again in every segment.
- theta = `step_max` sigmoid(.), eta and alpha = sigmoid(.), each of a linear map of the token. The inner loss is a sum
  over D entries (eq. 12) and momentum amplifies, so inner learning diverges if steps are large. `max_gradient` limits
  the norm of each token's gradient, so that the weights stay finite; null: none, as in the paper.
- `alone` may stand beside the attention of another memory (dist_mem/memory/parts/beside.py), as in a pretrained model.
- Attention has no positions. In `context` and `gate` attention and memory are multiplied after RMS norms, the memory
  after a sigmoid; else the memory is gated by SiLU(x W_g) before its output projection (sec. 4.4).

Gradients flow through the weights within a window (`train.bptt_segments`). Shape letters: B lanes, T segment, D model,
H heads, K head width, W window, P learned rows, I and O widths before and after a layer of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, WIDTH, key
from dist_mem.memory.base import (
    Count,
    LayerSpec,
    Memory,
    MemoryOutput,
    MemoryState,
    Opened,
    Places,
    StepOutput,
    can_step_rows,
    evict_all,
    exactly,
)
from dist_mem.memory.parts import neural_backward
from dist_mem.memory.parts.beside import Beside
from dist_mem.memory.parts.inspection import Inspection, rows_of, segment_rows, token_spans
from dist_mem.memory.parts.neural_memory import (
    LearningResult,
    NeuralMemory,
    NeuralTokens,
    Weights,
    learn,
    learn_on,
    recall,
)
from dist_mem.memory.parts.persistent_attention import PersistentAttention
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.attention_inputs import Visible
from dist_mem.nn.convolution import newest_of_both
from dist_mem.nn.distance_attention import why_not
from dist_mem.nn.kernel_shapes import device_type_of
from dist_mem.nn.layers import AttentionOutput, Dropout, Projection, newest_rows
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.norms import ExactNorm, input_norm
from dist_mem.nn.stepping import KeptPairs

VARIANTS = ("gate", "context", "layer", "alone")
GRADIENTS = ("auto", "kept", "recomputed")
PRODUCTS = ("auto", "exact", "tf32")


class TitansState(NamedTuple):
    weights: Weights  # (B, I, O) of every layer of the network, float32 at least; unused in fresh lanes
    momentum: Weights  # the same of eq. 14's S
    is_fresh: Tensor  # (B,) bool, whether the lane has learned nothing, so that its weights are the learned start
    tail: Tensor  # (B, kernel - 1, 3 D), newest queries, keys, values before the convolution; 0: none yet
    asked: Tensor  # (B, kernel - 1, D) in `context`: the same of what is recalled for; otherwise of width 0
    rows: Tensor  # (B, W - 1, D), newest rows of the window, newest last; none unless `gate` or `layer`
    length: Tensor  # (B,) int64, how many of `rows` are valid
    over: MemoryState = ()


class TitansOpenLanes(NamedTuple):
    near: KeptPairs | tuple[()]  # rows of the window; (): without attention
    weights: Weights  # after the rows read so far
    momentum: Weights
    first: Weights  # weights at the beginning of their chunk, at which its gradients are taken
    tail: Tensor  # as in the state


class TitansResult(NamedTuple):
    """What a forward computes."""

    y: Tensor  # (B, T, D), before dropout
    state: TitansState
    query: Tensor  # (H, B, T, K); in `alone` (1, B, T, D)
    weights: Tensor | None  # (H, B, T, W - 1 + T), shares of tokens in what attention reads of tokens, where asked for
    tokens: NeuralTokens
    error: Tensor  # (B, T), see `LearningResult`


class Product(nn.Module):
    """Attention times memory, both normed, the memory after a sigmoid (eqs. 25 and 28)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.attention_norm, self.memory_norm = ExactNorm(d_model, eps=1e-6), ExactNorm(d_model, eps=1e-6)

    def forward(self, attended: Tensor, read: Tensor) -> Tensor:
        product = self.attention_norm(attended.to(read.dtype)) * self.memory_norm(read).sigmoid()
        return product.to(attended.dtype)


class GatedOutput(nn.Module):
    """The memory, normed, gated and projected (sec. 4.4)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = ExactNorm(d_model, eps=1e-6)
        self.gate, self.output = Projection(d_model, d_model), Projection(d_model, d_model)

    def forward(self, rows: Tensor, read: Tensor) -> Tensor:
        gated: Tensor = self.output((self.norm(read) * F.silu(self.gate(rows))).to(rows.dtype))
        return gated


class Titans(Beside):
    """Attention and a network that learns keys and values: beside it, before it, as its context, or alone."""

    title = "Titans"
    computes = "learning"  # of which `choose_kernels` speaks
    carries_gradient = True
    takes_short_first = True

    no_forget: ClassVar[str] = "what its network has learned from a passage cannot be separated from the rest"

    @dataclass
    class Options:
        # of `alone`: the memory whose attention it stands beside; null: there is no attention
        over: Any = None
        over_gate_init: float = key(0.0)  # of the gate of what is added to `over`; 0: a model begins as without
        # memory and window attention side by side (eqs. 26 to 28) | the memory as context of attention within the
        # segment (21 to 25) | memory, then window attention (29 to 31) | no attention (LMM)
        variant: str = key("gate", choices=VARIANTS)
        depth: int = key(2, at_least=1, at_most=16)  # L_M, layers of the network; 1: a matrix
        d_hidden: int | None = key(None, at_least=1, at_most=WIDTH)  # width between them; None: model.d_model
        # tokens whose gradients are taken at the same weights, those at the chunk's start; 1: online, and slow
        chunk_len: int = key(32, at_least=1, at_most=TOKENS)
        step_max: float = key(0.1, above=0)  # theta's maximum
        # limit of the norm of a token's gradient; the paper has none, and without one the weights may overflow
        max_gradient: float | None = key(1.0, above=0)
        kernel: int = key(4, at_least=1, at_most=64)  # tokens that the convolution of queries, keys and values sees
        num_persistent: int = key(4, at_least=1, at_most=TOKENS)  # P, learned rows that attention sees; not in `alone`
        window: int = key(128, at_least=2, at_most=TOKENS)  # W, tokens that a query of `gate` or `layer` attends to
        # how learning is differentiated: kept: by autograd, which keeps the weights after every chunk | recomputed: by
        # a backward that keeps few and computes the others again, in few kernels; equal but for rounding | auto:
        # recomputed on GPUs, else kept
        gradients: str = key("auto", choices=GRADIENTS)
        # products of `recomputed` on GPUs: exact, unless train.tf32 | tf32: 10 of 23 bits, with sums, weights and
        # momentum in float32 | auto: tf32 with half precision, else exact
        products: str = key("auto", choices=PRODUCTS)

    def __init__(self, spec: LayerSpec, options: Options, over: Memory | None = None) -> None:
        variant, d_model = options.variant, spec.d_model
        attends = variant != "alone"
        if attends and over is not None:
            raise ValueError(
                f"memory.variant is {variant}, which has an attention of its own, and memory.over is another one: set "
                "memory.variant to alone, or memory.over to null"
            )
        super().__init__(spec, options, over)
        if attends and spec.llama is not None:
            raise ValueError(
                f"memory.kind is titans and memory.variant {variant}, whose own attention has no grouped heads and no "
                "positions, unlike a Llama's: set memory.variant to alone, or model.kind to transformer"
            )
        if options.gradients == "kept" and options.products != "auto":
            raise ValueError(
                f"memory.products is {options.products}, but memory.gradients is kept, whose products are those of "
                "train.tf32: set memory.products to auto, or memory.gradients to recomputed or auto"
            )
        self.norm = input_norm(spec)
        self.memory = NeuralMemory(
            d_model, depth=options.depth, d_hidden=options.d_hidden or d_model, kernel=options.kernel,
            step_max=options.step_max,
        )  # fmt: skip
        self.window = options.window if variant in ("gate", "layer") else 1
        self.attention = PersistentAttention(spec, num_rows=options.num_persistent) if attends else None
        self.combine = Product(d_model) if variant in ("gate", "context") else GatedOutput(d_model)
        self.dropout = Dropout(spec.dropout)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"d_hidden": 5, "chunk_len": max(1, seg_len - 1), "kernel": 3, "num_persistent": 2, "window": seg_len}

    @property
    def can_step(self) -> bool:
        """Not in `context`, where every token adds two keys: itself, and what is recalled for it."""
        return bool(self.options.variant != "context") and (self.over is None or can_step_rows(self.over))

    @classmethod
    def title_of(cls, options: Options) -> str:
        return f"{cls.title} beside attention" if options.over else cls.title

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.memory.reset_parameters()

    @property
    def evicted_len(self) -> int:
        if self.attention is None and self.over is None:
            raise ValueError(
                "memory.kind is titans and memory.variant alone, which has no queries that a memory over it could "
                "read with: set memory.variant to gate, context or layer"
            )
        return super().evicted_len

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> TitansState:
        num_lanes, d_model, kept = len(document_ids), self.spec.d_model, self.options.kernel - 1
        exact = torch.promote_types(dtype, torch.float32)  # growing sums: half precision would lose small terms

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_lanes, *shape, device=device, dtype=dtype)

        weights, momentum = (tuple(zeros(*shape, dtype=exact) for shape in self.memory.shapes) for _ in range(2))
        asked = zeros(kept, d_model if self.options.variant == "context" else 0)
        return TitansState(
            weights, momentum, torch.ones(num_lanes, device=device, dtype=torch.bool), zeros(kept, 3 * d_model), asked,
            zeros(self.window - 1, d_model), zeros(dtype=torch.int64), self.empty_over(document_ids, device, dtype),
        )  # fmt: skip

    def counts(self, state: TitansState, num_segments: int) -> dict[str, Count]:
        length = exactly(state.length, num_segments * self.spec.seg_len, most=state.rows.shape[1])
        return {"length": length, **super().counts(state, num_segments)}

    def read_own(self, x: Tensor, state: TitansState, valid_len: Tensor) -> MemoryOutput:
        step = self.compute(x, state, valid_len, shows=False)
        evicted = evict_all(x, valid_len)
        return MemoryOutput(self.dropout(step.y), step.state, {}, step.query, evicted, self.metrics(step))

    def compute(self, x: Tensor, state: TitansState, valid_len: Tensor, *, shows: bool) -> TitansResult:
        """Compute outputs and the new state; `shows`: with the weights of the attention."""
        variant, rows = self.options.variant, self.norm(x)
        begun = replace(state, weights=self.memory.start_weights(state.weights, state.is_fresh))
        if variant == "context":
            attended, before = self.recall(rows, begun, shows)
            step = self.learn(attended.y, begun, valid_len, attended)
            asked = newest_of_both(before, valid_len, num_rows=state.asked.shape[1]).to(state.asked.dtype)
            return replace(step, y=self.combine(attended.y, step.y), state=replace(step.state, asked=asked))
        if variant == "gate":
            attended = self.attend_window(rows, self.window_rows(state, x.dtype), state, shows)
            step = self.learn(rows, begun, valid_len, attended)
            return self.append_rows(replace(step, y=self.combine(attended.y, step.y)), x, valid_len)
        step = self.learn(rows, begun, valid_len, None)
        y = self.combine(rows, step.y)
        if variant == "alone":
            return replace(step, y=y)
        attended = self.attend_window(y, self.window_rows(state, x.dtype), state, shows)
        return self.append_rows(
            replace(step, y=attended.y, query=attended.query, weights=attended.weights), y, valid_len
        )

    def recall(self, rows: Tensor, state: TitansState, shows: bool) -> tuple[AttentionOutput, Tensor]:
        """Attend to the segment and to what the memory recalls for it (eqs. 21 to 23), and what it was asked."""
        assert self.attention is not None
        query, before = self.memory.queries(rows, state.asked, state.weights[0].dtype)
        num_shown = rows.shape[1] if shows else 0
        upto = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=rows.device).tril()
        visible = torch.cat([upto, upto], dim=1).expand(len(rows), -1, -1)
        return self.attention(rows, recall(query, state.weights).to(rows.dtype), visible, num_shown=num_shown), before

    def attend_window(self, rows: Tensor, context: Tensor, state: TitansState, shows: bool) -> AttentionOutput:
        """Attend to the newest W tokens."""
        assert self.attention is not None
        kept = self.window - 1
        num_shown = kept + rows.shape[1] if shows else 0
        window = Visible(newest_rows(state.length, kept), rows.shape[1], kept + rows.shape[1], above=-1, upto=kept)
        attended: AttentionOutput = self.attention(rows, context, window.mask(), num_shown=num_shown)
        return attended

    def window_rows(self, state: TitansState, dtype: torch.dtype) -> Tensor:
        """Return the rows before the segment as they are attended to, (B, W - 1, D)."""
        rows = state.rows.to(dtype)
        return self.norm(rows) if self.options.variant == "gate" else rows

    def open_own(self, state: TitansState, rows: Tensor) -> Opened:
        weights = self.memory.start_weights(state.weights, state.is_fresh)
        near: KeptPairs | tuple[()] = ()
        if self.attention is not None:
            context, valid = self.window_rows(state, rows.dtype), newest_rows(state.length, self.window - 1)
            near = self.attention.open(context, valid, seg_len=self.spec.seg_len).lanes
        return Opened(TitansOpenLanes(near, weights, state.momentum, weights, state.tail))

    def step_own(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        rows, near = self.norm(x), Opened(opened.lanes.near)
        read, query, lanes = self.read_on(rows, opened.lanes, places)
        if self.attention is None:
            return StepOutput(self.combine(rows, read), query[None], Opened(lanes))
        if self.options.variant == "gate":
            y, query, _ = self.attention.step_rows(rows, near, places)
            return StepOutput(self.combine(y, read), query, Opened(lanes))
        y, query, _ = self.attention.step_rows(self.combine(rows, read), near, places)
        return StepOutput(y, query, Opened(lanes))

    def read_on(self, rows: Tensor, lanes: TitansOpenLanes, places: Places) -> tuple[Tensor, Tensor, TitansOpenLanes]:
        """Let the network learn further rows; return what they read, their queries, and what is kept."""
        num_real, options = places.num_real, self.options
        tokens, before = self.memory.tokens(rows, lanes.tail, num_real, lanes.weights[0].dtype)
        learned, first = learn_on(
            tokens,
            places.row,
            lanes.weights,
            lanes.momentum,
            lanes.first,
            chunk_len=options.chunk_len,
            max_gradient=options.max_gradient,
        )
        tail = newest_of_both(before, num_real, num_rows=lanes.tail.shape[1]).to(lanes.tail.dtype)
        return learned.read, tokens.query, TitansOpenLanes(lanes.near, learned.weights, learned.momentum, first, tail)

    def append_rows(self, step: TitansResult, rows: Tensor, valid_len: Tensor) -> TitansResult:
        """Append the rows that were attended to."""
        old, kept = step.state.rows, self.window - 1
        new = newest_of_both(torch.cat([old.to(rows.dtype), rows], dim=1), valid_len, num_rows=kept).to(old.dtype)
        length = (step.state.length + valid_len).clamp(max=kept)
        return replace(step, state=replace(step.state, rows=new, length=length))

    def learn(
        self, rows: Tensor, state: TitansState, valid_len: Tensor, attended: AttentionOutput | None
    ) -> TitansResult:
        """Let the network learn the rows; `y` of the step is what they read."""
        tokens, before = self.memory.tokens(rows, state.tail, valid_len, state.weights[0].dtype)
        limit = self.options.max_gradient
        run: Callable[..., LearningResult] = learn
        if self.choose_kernels(device_type_of(rows), rows.shape[1]).back_end == "recomputed":
            run = partial(neural_backward.learn, tf32=self.takes_tf32(rows.dtype))
        learned = run(tokens, state.weights, state.momentum, chunk_len=self.options.chunk_len, max_gradient=limit)
        tail = newest_of_both(before, valid_len, num_rows=state.tail.shape[1]).to(state.tail.dtype)
        is_fresh = state.is_fresh & (valid_len == 0)
        new = replace(state, weights=learned.weights, momentum=learned.momentum, is_fresh=is_fresh, tail=tail)
        query, weights = (tokens.query[None], None) if attended is None else (attended.query, attended.weights)
        return TitansResult(learned.read, new, query, weights, tokens, learned.error)

    def choose_kernels(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return how learning is differentiated, one of GRADIENTS, and why."""
        gradients, products = self.options.gradients, self.options.products
        if gradients == "kept" or (gradients == "auto" and device_type != "cuda"):
            return BackEndChoice("kept", "memory.gradients" if gradients == "kept" else "autograd is faster on CPUs")
        if gradients == "auto" and (refused := why_not()):
            return BackEndChoice("kept", refused)
        kind = "tf32 with half precision" if products == "auto" else products
        return BackEndChoice("recomputed", f"few weights are kept; memory.products: {kind}")

    def takes_tf32(self, dtype: torch.dtype) -> bool:
        """Return whether products of `recomputed` may take TF32, of rows of this type."""
        return self.options.products == "tf32" or (self.options.products == "auto" and dtype.itemsize < 4)

    @staticmethod
    @torch.no_grad()
    def metrics(step: TitansResult) -> dict[str, Tensor]:
        """Return means over real tokens: what is kept of the weights, and what share of the values was a surprise."""
        tokens = step.tokens
        count = tokens.is_real.sum(1).clamp(min=1)
        values = (tokens.value.square().sum(-1) * tokens.is_real).sum(1)
        surprise = (step.error * tokens.is_real).sum(1) / values.clamp(min=1e-12)
        return {"kept": (tokens.kept.exp() * tokens.is_real).sum(1) / count, "surprise": surprise}

    @torch.no_grad()
    def inspect(self, x: Tensor, state: TitansState, valid_len: Tensor, trace: Any = None) -> Inspection:
        """Return the shares of tokens in what attention reads of tokens.

        What it reads of the learned rows and of what the memory recalls belongs to no token and is left out.
        """
        if self.attention is None:
            return super().inspect(x, state, valid_len, trace)
        weights = self.compute(x, state, valid_len, shows=True).weights
        assert weights is not None
        kept = self.window - 1
        memory, segment = weights.tensor_split([kept], dim=-1)
        of_segment = {"segment": segment_rows(segment, valid_len)}
        if not kept:
            return Inspection(of_segment)
        return Inspection({"memory": rows_of(memory, token_spans(state.length, kept)), **of_segment})
