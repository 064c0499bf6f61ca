"""Linear memories: a matrix per head that every token decays, writes to and reads, without attention.

RetNet (Sun et al. 2023), Mamba-2 (Dao & Gu 2024), Gated Linear Attention, DeltaNet and Gated DeltaNet (Yang et al.
2024a, 2024b, 2025) and Kimi Delta Attention (2025) differ in the options; configs/memory/ has a preset of each, with
its source and what differs from it. The defaults are Gated DeltaNet: arXiv 2412.06464, eqs. 8 to 10 (10 is printed with
a minus where its derivation has a plus), and the layer of Hugging Face's `qwen3_next`; flash-linear-attention and the
paper's code have `memory.norm_eps` 1e-5.

The published models read whole sequences; here the matrix and the last rows before the convolution go on from segment
to segment, with gradients inside a window (`train.bptt_segments`). Any cut of a text into segments gives the same
outputs. Shape letters: B lanes, T segment, D model, H heads of values, G heads of keys, K and V widths of a key and of
a value.

With `memory.over` the layer stands beside the attention of another memory (dist_mem/memory/parts/beside.py): a
pretrained model gets a linear memory, and computes at first what it computed without. No paper has that; Hymba (Dong et
al. 2024) adds normed outputs of both, which would not begin as the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, WIDTH, key
from dist_mem.memory.base import (
    LayerSpec,
    Memory,
    MemoryOutput,
    MemoryState,
    Opened,
    Places,
    StepOutput,
    can_step_rows,
    evict_all,
)
from dist_mem.memory.parts.beside import Beside
from dist_mem.memory.parts.linear_check import KERNELS, back_end, choose
from dist_mem.memory.parts.linear_kernels import (
    WIDEST_KERNEL,
    LinearRows,
    gated_norm,
    kernel_convolution,
    kernel_rule,
    unit_rows,
)
from dist_mem.memory.parts.linear_rule import RuleTokens, chunked_rule, recurrent_rule
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.convolution import convolve, draw_taps, newest_of_both
from dist_mem.nn.kernel_shapes import device_type_of
from dist_mem.nn.layers import Dropout, Projection, split_heads
from dist_mem.nn.norms import ExactNorm, input_norm
from dist_mem.nn.unit_attention import unit


class LinearState(NamedTuple):
    matrix: Tensor  # (B, H, K, V) float32 at least
    tail: Tensor  # (B, kernel - 1, 2 G K + H V), the newest rows before the convolution, newest last; 0: none yet
    over: MemoryState = ()


_TITLES = {  # by `decay` and `delta`
    ("fixed", False): "RetNet",
    ("scalar", False): "Mamba-2",
    ("vector", False): "Gated Linear Attention",
    ("none", True): "DeltaNet",
    ("scalar", True): "Gated DeltaNet",
    ("vector", True): "Kimi Delta Attention",
}


class ValueNorm(ExactNorm):
    """The norm of what is read; given its gate, by a kernel that multiplies by silu or sigmoid of it."""

    def forward(self, x: Tensor, gate: Tensor | None = None, *, silu: bool = False) -> Tensor:
        if gate is None:
            return super().forward(x)
        assert self.eps is not None
        return gated_norm(x, gate, self.weight, eps=self.eps, silu=silu)


class LinearMemory(Beside):
    """S <- alpha S, then S <- S + beta k (v - S^T k)^T or S + beta k v^T, for every token, which reads S^T q."""

    title = "linear memory"
    carries_gradient = True
    takes_short_first = True

    no_forget: ClassVar[str] = "every token rewrites its matrix, in which a passage has no rows of its own"

    @dataclass
    class Options:
        # the memory whose attention it stands beside; null: there is no attention
        over: Any = None
        over_gate_init: float = key(0.0)  # of the gate of what is added to `over`; 0: a model begins as without
        # alpha: 1 | a constant per head, 1 - 2^(-5 - head) | a number per head and token | one per row of the matrix
        decay: str = key("scalar", choices=("none", "fixed", "scalar", "vector"))
        # its log for scalar and vector: -A softplus(a + bias), A per head | log sigmoid(a + bias) / temperature
        decay_map: str = key("step", choices=("step", "sigmoid"))
        temperature: float = key(16.0, above=0)  # of `decay_map: sigmoid`
        delta: bool = True  # write what the matrix lacks of a value: the delta rule; false: the value
        # beta: sigmoid, per head | the step softplus(a + bias) of a scalar decay | 1
        write: str = key("sigmoid", choices=("sigmoid", "step", "one"))
        negative_eigenvalues: bool = False  # beta up to 2 instead of 1, so that a value can change its sign
        num_key_heads: int | None = key(None, at_least=1, at_most=WIDTH)  # G, divides H; None: model.num_heads, H
        d_key: int | None = key(None, at_least=1, at_most=WIDTH)  # K; None: the width of a head
        d_value: int | None = key(None, at_least=1, at_most=WIDTH)  # V; None: K times value_expand
        value_expand: int = key(2, at_least=1, at_most=WIDTH)  # V / K, unless d_value is given
        # tokens that the convolution of queries, keys and values sees; None: there is no convolution
        kernel: int | None = key(4, at_least=1, at_most=64)
        activation: str = key("silu", choices=("silu", "none"))  # of queries, keys and values, after the convolution
        unit_keys: bool = True  # queries and keys are divided by their lengths
        scale_queries: bool = True  # queries are divided by sqrt(K)
        skip: bool = False  # values times a number per head are added to what is read
        gate: str = key("swish", choices=("swish", "sigmoid", "none"))  # of what is read
        norm: str = key("head", choices=("head", "after_gate"))  # of each head, before the gate | of all, after it
        norm_eps: float = key(1e-6, above=0)  # added to the mean square in the norm of what a token reads
        low_rank_gate: bool = False  # the gate is computed by two maps, as vector decays are
        rank: int | None = key(None, at_least=1, at_most=WIDTH)  # of these pairs of maps; None: V
        chunk_len: int = key(64, at_least=1, at_most=TOKENS)  # C, tokens computed at once; changes no result
        # what computes segments: PyTorch | flash-linear-attention's kernels; auto: these on GPUs, where they can run
        kernels: str = key("auto", choices=KERNELS)

    def __init__(self, spec: LayerSpec, options: Options, over: Memory | None = None) -> None:
        super().__init__(spec, options, over)
        self.num_heads, self.key_heads = spec.num_heads, options.num_key_heads or spec.num_heads
        self.d_key = options.d_key or spec.d_head
        self.d_value = options.d_value or options.value_expand * self.d_key
        self.check()
        key_width, value_width = self.key_heads * self.d_key, self.num_heads * self.d_value
        self.widths = [key_width, key_width, value_width]
        self.tail_len = (options.kernel or 1) - 1
        self.norm = input_norm(spec)
        self.rows = Projection(spec.d_model, sum(self.widths))
        if options.gate != "none":
            self.gate = self.map_to(value_width, low_rank=options.low_rank_gate)
        if num_rates := self.num_heads * ((options.write == "sigmoid") + (options.decay == "scalar")):
            self.rates = Projection(spec.d_model, num_rates)  # beta and decay of every head, before their maps
        if options.kernel:
            self.taps = nn.Parameter(torch.zeros(sum(self.widths), options.kernel))  # the last: the present token
        if options.decay == "vector":
            self.row_rates = self.map_to(self.num_heads * self.d_key, low_rank=True)
        if options.decay in ("scalar", "vector"):
            if options.decay_map == "step":
                self.log_decay = nn.Parameter(torch.zeros(self.num_heads))  # A_log
            per_head = self.d_key if options.decay == "vector" else 1
            self.decay_bias = nn.Parameter(torch.zeros(self.num_heads * per_head))  # dt_bias
        if options.skip:
            self.skip = nn.Parameter(torch.zeros(self.num_heads))
        self.value_norm = ValueNorm(self.d_value if options.norm == "head" else value_width, eps=options.norm_eps)
        self.output = Projection(value_width, spec.d_model)
        self.dropout = Dropout(spec.dropout)

    def check(self) -> None:
        """Raise ValueError for options that do not go together."""
        options = self.options
        if self.num_heads % self.key_heads:
            raise ValueError(
                f"memory.num_key_heads is {self.key_heads}, which does not divide model.num_heads = {self.num_heads}"
            )
        if options.write == "step" and (options.decay, options.decay_map, options.delta) != ("scalar", "step", False):
            raise ValueError(
                "memory.write is step, the step of a decay per head: set memory.decay to scalar, memory.decay_map to "
                "step and memory.delta to false (a step above 2 would let a matrix grow without end), or memory.write "
                "to sigmoid or one"
            )
        if options.negative_eigenvalues and (options.write != "sigmoid" or not options.delta):
            raise ValueError(
                "memory.negative_eigenvalues is true, which doubles the sigmoid of the delta rule: set memory.write to "
                "sigmoid and memory.delta to true, or leave it out"
            )

    def map_to(self, width: int, *, low_rank: bool) -> nn.Module:
        """Return a map from D to `width`, or two by way of `memory.rank`."""
        if not low_rank:
            return Projection(self.spec.d_model, width)
        rank = self.options.rank or self.d_value
        return nn.Sequential(Projection(self.spec.d_model, rank), Projection(rank, width))

    @classmethod
    def title_of(cls, options: Options) -> str:
        title = _TITLES.get((options.decay, options.delta), cls.title)
        return f"{title} beside attention" if options.over else title

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"d_key": 4, "d_value": 3, "kernel": 3, "chunk_len": max(1, seg_len - 1)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw decays as Gated DeltaNet in transformers: A from U(0.01, 16), softplus(dt) log-uniform, 0.001 to 0.1.

        Deviation: Mamba-2 and Kimi Delta Attention draw A from U(1, 16).
        """
        super().reset_parameters()
        if self.value_norm.weight.is_meta:
            return
        if self.options.kernel:
            draw_taps(self.taps)
        if self.options.decay in ("scalar", "vector") and self.options.decay_map == "step":
            self.log_decay.uniform_(0.01, 16).log_()
            steps = self.decay_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.decay_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        if self.options.skip:
            self.skip.fill_(1.0)

    @property
    def can_step(self) -> bool:
        return self.over is None or can_step_rows(self.over)

    @property
    def evicted_len(self) -> int:
        if self.over is None and (self.key_heads, self.d_key) != (self.spec.num_heads, self.spec.d_head):
            raise ValueError(
                "memory.kind is linear with other heads of keys than the model's: a memory over it cannot read with "
                "them; leave out memory.num_key_heads and memory.d_key"
            )
        return super().evicted_len

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> LinearState:
        num_lanes, exact = len(document_ids), torch.promote_types(dtype, torch.float32)
        matrix = torch.zeros(num_lanes, self.num_heads, self.d_key, self.d_value, device=device, dtype=exact)
        tail = torch.zeros(num_lanes, self.tail_len, sum(self.widths), device=device, dtype=dtype)
        return LinearState(matrix, tail, self.empty_over(document_ids, device, dtype))

    def read_own(self, x: Tensor, state: LinearState, valid_len: Tensor) -> MemoryOutput:
        y, state, query, decay = self.run(x, state, valid_len)
        return MemoryOutput(y, state, {}, query, evict_all(x, valid_len), {"kept": self.kept_share(decay, valid_len)})

    def open_own(self, state: LinearState, rows: Tensor) -> Opened:
        return Opened(state)

    def step_own(self, x: Tensor, opened: Opened, places: Places) -> StepOutput:
        y, state, query, _ = self.run(x, opened.lanes, places.num_real)
        return StepOutput(y, query, Opened(state))

    def run(self, x: Tensor, state: LinearState, valid_len: Tensor) -> tuple[Tensor, LinearState, Tensor, Tensor]:
        """Return y, the new state, the queries (G, B, T, K), and the log of alpha, as in `RuleTokens`."""
        if x.shape[1] > 1 and self.uses_kernels(x):
            return self.run_kernels(x, state, valid_len)
        normed = self.norm(x)
        before = torch.cat([state.tail.to(x.dtype), self.rows(normed)], dim=1)
        rows = convolve(before, self.taps) if self.options.kernel else before
        if self.options.activation == "silu":
            rows = F.silu(rows)
        query, keys, value = rows.split(self.widths, dim=-1)
        tokens = self.tokens(query, keys, value, normed, valid_len, state.matrix.dtype)
        if x.shape[1] == 1:
            read, matrix = recurrent_rule(tokens, state.matrix, delta=self.options.delta)
        else:
            chunk_len = self.options.chunk_len
            read, matrix = chunked_rule(tokens, state.matrix, delta=self.options.delta, chunk_len=chunk_len)
        if self.options.skip:
            read = read + self.skip.to(read.dtype)[:, None, None] * tokens.value
        y = self.dropout(self.output(self.gate_output(read.transpose(1, 2), normed).to(x.dtype)))
        tail = newest_of_both(before, valid_len, num_rows=self.tail_len).to(state.tail.dtype)
        return y, LinearState(matrix, tail), split_heads(query, self.key_heads), tokens.decay

    def back_end(self, device_type: str, dtype: torch.dtype) -> BackEndChoice:
        """Return what computes segments of activations of a dtype, and why.

        Raises:
            ValueError: `memory.kernels` is fla, which cannot run there.
        """
        return choose(self.options.kernels, device_type, dtype, **self.kernel_sizes())

    def kernel_sizes(self) -> dict[str, Any]:
        """Return what a kernel depends on."""
        by_row = self.options.decay == "vector"
        return {"d_key": self.d_key, "d_value": self.d_value, "delta": self.options.delta, "by_row": by_row}

    def uses_kernels(self, x: Tensor) -> bool:
        """Return whether flash-linear-attention's kernels compute this segment."""
        return back_end(self.options.kernels, device_type_of(x), x.dtype, *self.kernel_sizes().values()) == "fla"

    def run_kernels(
        self, x: Tensor, state: LinearState, valid_len: Tensor
    ) -> tuple[Tensor, LinearState, Tensor, Tensor]:
        """Do as `run`, by kernels that take the order of projections, (B, T, H, K), and the dtype of activations."""
        options, exact, seg_len = self.options, state.matrix.dtype, x.shape[1]
        normed = self.norm(x)
        projected, tail = self.rows(normed), state.tail.to(x.dtype)
        query, keys, value = self.convolve_by_kernel(projected, tail)
        asking, keys = (self.share_heads(rows) for rows in (query, keys))
        values = value.unflatten(-1, (self.num_heads, -1))
        positions = torch.arange(max(seg_len, self.tail_len), device=x.device)
        is_real = positions[:seg_len] < valid_len[:, None]
        beta, decay = self.beta_and_decay(normed, exact)
        decay, beta = decay * is_real[:, None, :, None], (beta * is_real[:, None]).transpose(1, 2)
        by_token = decay.transpose(1, 2)
        if options.delta:
            written, writes = values, beta
        else:
            written, writes = values * (is_real[..., None, None] if options.write == "one" else beta[..., None]), None
        by_token = by_token if options.decay == "vector" else by_token.squeeze(-1)
        rows = LinearRows(asking, keys, written.to(x.dtype), by_token, writes)
        scale = 1.0 / math.sqrt(self.d_key) if options.scale_queries else 1.0
        read, matrix = kernel_rule(rows, state.matrix.float(), scale=scale)
        if options.skip:
            read = read + self.skip.to(read.dtype)[:, None] * values
        y = self.dropout(self.output(self.gate_output(read, normed, by_kernel=True)))
        places = valid_len[:, None] + positions[: self.tail_len]
        new = LinearState(matrix.to(exact), self.newest(projected, tail, places).to(state.tail.dtype))
        return y, new, split_heads(query, self.key_heads), decay

    def convolve_by_kernel(self, rows: Tensor, tail: Tensor) -> Iterable[Tensor]:
        """Return queries, keys and values after convolution and activation."""
        silu, kernel = self.options.activation == "silu", self.options.kernel
        if kernel and kernel <= WIDEST_KERNEL:
            return kernel_convolution(rows, tail, self.taps, self.widths, silu=silu)
        found = convolve(torch.cat([tail, rows], dim=1), self.taps) if kernel else rows
        return (F.silu(found) if silu else found).split(self.widths, dim=-1)

    def share_heads(self, rows: Tensor) -> Tensor:
        """Return queries or keys (B, T, G K) for the heads that share them, (B, T, H, K)."""
        heads = rows.unflatten(-1, (self.key_heads, -1))
        heads = unit_rows(heads) if self.options.unit_keys else heads
        number = self.num_heads // self.key_heads
        return heads if number == 1 else heads.repeat_interleave(number, dim=2)

    def newest(self, rows: Tensor, tail: Tensor, places: Tensor) -> Tensor:
        """Return the rows at places (B, kernel - 1) of a tail with rows (B, T, W) behind it, which costs a copy."""
        inside = (places - self.tail_len).clamp(min=0)[..., None].expand(-1, -1, rows.shape[-1])
        older = places.clamp(max=max(self.tail_len - 1, 0))[..., None].expand_as(inside)
        return torch.where(places[..., None] < self.tail_len, tail.gather(1, older), rows.gather(1, inside))

    def gate_output(self, read: Tensor, normed: Tensor, *, by_kernel: bool = False) -> Tensor:
        """Return what is read (B, T, H, V) with norm and gate, (B, T, H V)."""
        if by_kernel and self.options.norm == "head" and self.options.gate != "none":
            gate = self.gate(normed).unflatten(-1, (self.num_heads, -1))
            return self.value_norm(read, gate, silu=self.options.gate == "swish").flatten(-2)
        if self.options.norm == "head":
            read = self.value_norm(read)
        if self.options.gate != "none":
            gate = self.gate(normed).unflatten(-1, (self.num_heads, -1))
            read = read * (gate.sigmoid() if self.options.gate == "sigmoid" else F.silu(gate))
        return self.value_norm(read.flatten(-2)) if self.options.norm == "after_gate" else read.flatten(-2)

    def tokens(
        self, query: Tensor, keys: Tensor, value: Tensor, normed: Tensor, valid_len: Tensor, dtype: torch.dtype
    ) -> RuleTokens:
        """Return what the rule reads; padding neither decays the matrix nor writes to it."""
        is_real = torch.arange(normed.shape[1], device=valid_len.device) < valid_len[:, None, None]
        beta, decay = self.beta_and_decay(normed, dtype)
        query, keys = (self.keys_of(rows, dtype) for rows in (query, keys))
        if self.options.scale_queries:
            query = query / math.sqrt(self.d_key)
        values = value.to(dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return RuleTokens(query, keys, values, decay * is_real[..., None], beta * is_real)

    def beta_and_decay(self, normed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return beta (B, H, T) and the log of alpha, (B, H, T, 1) or (B, H, T, K), of rows (B, T, D)."""
        options = self.options
        if options.write == "sigmoid" or options.decay == "scalar":
            rates = self.rates(normed).to(dtype).transpose(1, 2)  # (B, H or 2 H, T)
        if options.write == "sigmoid":
            beta, rates = rates.split([self.num_heads, rates.shape[1] - self.num_heads], dim=1)
            beta = 2.0 * beta.sigmoid() if options.negative_eigenvalues else beta.sigmoid()
        else:
            beta = torch.ones(len(normed), self.num_heads, normed.shape[1], device=normed.device, dtype=dtype)
        if options.decay == "none":
            return beta, torch.zeros_like(beta[..., None])
        if options.decay == "fixed":
            heads = torch.arange(self.num_heads, device=normed.device, dtype=dtype)
            return beta, torch.log1p(-(2.0 ** (-5 - heads)))[:, None, None].expand(*beta.shape, 1)
        if options.decay == "vector":
            rates = self.row_rates(normed).to(dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        else:
            rates = rates[..., None]
        if options.decay == "vector" or options.write == "step":
            # torch 2.13 compiles a wrong layout for the gradient of a transposed tensor's softplus in these two.
            rates = rates.contiguous()
        rates = rates + self.decay_bias.to(dtype).unflatten(0, (self.num_heads, 1, -1))
        if options.decay_map == "sigmoid":
            return beta, F.logsigmoid(rates) / options.temperature
        steps = F.softplus(rates)
        decay = -self.log_decay.to(dtype).exp()[:, None, None] * steps
        return steps.squeeze(-1) if options.write == "step" else beta, decay

    def keys_of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return queries or keys (B, T, G K) for the heads that share them, (B, H, T, K)."""
        heads = rows.to(dtype).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        if self.options.unit_keys:
            heads = unit(heads)
        return heads.repeat_interleave(self.num_heads // self.key_heads, dim=1)

    @staticmethod
    @torch.no_grad()
    def kept_share(decay: Tensor, valid_len: Tensor) -> Tensor:
        """Return the share of the matrix that a token leaves, mean over heads, rows and real tokens, (B,)."""
        num_heads = decay.shape[1]
        total = decay.float().exp().sum((1, 2, 3)) / decay.shape[3]
        return torch.sub(total, decay.shape[2] - valid_len, alpha=num_heads) / (valid_len.clamp(min=1) * num_heads)
