"""Gated DeltaNet (Yang et al. 2025): a matrix per head that decays and is corrected by every token, and no attention.

Source: arXiv 2412.06464, eqs. 8 to 10 (10 is printed with a minus where its derivation has a plus), and the layer of
Hugging Face's `qwen3_next`; flash-linear-attention and the paper's code have `memory.norm_eps` 1e-5. The published
models read whole sequences of 4,096 tokens; here the matrix and the last rows before the convolution go on from segment
to segment, with gradients inside a window (`train.bptt_segments`). Any cut of a text into segments gives the same
outputs. Shape letters: B lanes, T segment, C chunk, D model, H heads of values, G heads of keys, K and V widths of a
key and of a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config.keys import TOKENS, WIDTH, key
from dist_mem.memory.base import Evicted, Inspectable, LayerSpec, MemoryOutput
from dist_mem.memory.parts.convolution import convolved
from dist_mem.nn.layers import Dropout, Projection
from dist_mem.nn.norms import input_norm


class State(NamedTuple):
    matrix: Tensor  # (B, H, K, V) float32 at least
    tail: Tensor  # (B, kernel - 1, 2 G K + H V), the newest rows before the convolution, newest last; 0: none yet


class Tokens(NamedTuple):
    """What the rule reads of every token, float32 at least."""

    query: Tensor  # (B, H, T, K), of length 1 / sqrt(K)
    key: Tensor  # (B, H, T, K), of length 1
    value: Tensor  # (B, H, T, V)
    decay: Tensor  # (B, H, T), log of alpha, at most 0
    beta: Tensor  # (B, H, T), how much of a key's old value is replaced


class ExactNorm(nn.RMSNorm):
    """Root-mean-square norm in the precision of its input, which is at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedDeltaNet(Inspectable):
    """S <- alpha S (I - beta k k^T) + beta v k^T for every token, which reads S q."""

    carries_gradient = True
    takes_short_first = True
    min_seg_len = 1

    no_forget: ClassVar[str] = "every token rewrites its matrix, in which a passage has no rows of its own"

    @dataclass
    class Options:
        num_key_heads: int | None = key(None, at_least=1, at_most=WIDTH)  # G, divides H; None: model.num_heads, H
        d_key: int | None = key(None, at_least=1, at_most=WIDTH)  # K; None: the width of a head
        d_value: int | None = key(None, at_least=1, at_most=WIDTH)  # V; None: 2 K
        kernel: int = key(4, at_least=1, at_most=64)  # tokens that the convolution of queries, keys and values sees
        chunk_len: int = key(64, at_least=1, at_most=TOKENS)  # C, tokens computed at once; changes no result
        negative_eigenvalues: bool = False  # beta up to 2 instead of 1, so that a value can change its sign
        norm_eps: float = key(1e-6, above=0)  # added to the mean square in the norm of what a token reads

    def __init__(self, spec: LayerSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.num_heads, self.key_heads = spec.num_heads, options.num_key_heads or spec.num_heads
        if self.num_heads % self.key_heads:
            raise ValueError(
                f"memory.num_key_heads is {self.key_heads}, which does not divide model.num_heads = {self.num_heads}"
            )
        self.d_key = options.d_key or spec.d_head
        self.d_value = options.d_value or 2 * self.d_key
        key_width, value_width = self.key_heads * self.d_key, self.num_heads * self.d_value
        self.widths = [key_width, key_width, value_width]
        self.norm = input_norm(spec)
        self.rows = Projection(spec.d_model, sum(self.widths))
        self.gate = Projection(spec.d_model, value_width)
        self.rates = Projection(spec.d_model, 2 * self.num_heads)  # beta and decay of every head, before their maps
        self.taps = nn.Parameter(torch.zeros(sum(self.widths), options.kernel))  # the last one meets the present token
        self.log_decay = nn.Parameter(torch.zeros(self.num_heads))  # A_log
        self.decay_bias = nn.Parameter(torch.zeros(self.num_heads))  # dt_bias
        self.value_norm = ExactNorm(self.d_value, eps=options.norm_eps)
        self.output = Projection(value_width, spec.d_model)
        self.dropout = Dropout(spec.dropout)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"d_key": 4, "d_value": 3, "kernel": 3, "chunk_len": max(1, seg_len - 1)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw decays as the published code does: A from U(0, 16), softplus(dt) log-uniform from 0.001 to 0.1."""
        if self.taps.is_meta:
            return
        bound = 1 / math.sqrt(self.options.kernel)
        self.taps.uniform_(-bound, bound)
        self.log_decay.uniform_(0.01, 16).log_()
        steps = self.decay_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.decay_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    @property
    def evicted_len(self) -> int:
        if (self.key_heads, self.d_key) != (self.spec.num_heads, self.spec.d_head):
            raise ValueError(
                "memory.kind is gated_deltanet with other heads of keys than the model's: a memory over it cannot read "
                "with them; leave out memory.num_key_heads and memory.d_key"
            )
        return super().evicted_len

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        num_lanes, exact = len(document_ids), torch.promote_types(dtype, torch.float32)
        matrix = torch.zeros(num_lanes, self.num_heads, self.d_key, self.d_value, device=device, dtype=exact)
        tail = torch.zeros(num_lanes, self.options.kernel - 1, sum(self.widths), device=device, dtype=dtype)
        return State(matrix, tail)

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        normed = self.norm(x)
        before = torch.cat([state.tail.to(x.dtype), self.rows(normed)], dim=1)
        query, keys, value = F.silu(convolved(before, self.taps)).split(self.widths, dim=-1)
        tokens = self.tokens(query, keys, value, normed, valid_len, state.matrix.dtype)
        read, matrix = delta_rule(tokens, state.matrix, chunk_len=self.options.chunk_len)
        gated = self.value_norm(read.transpose(1, 2)) * F.silu(self.gate(normed).unflatten(-1, (self.num_heads, -1)))
        y = self.dropout(self.output(gated.to(x.dtype).flatten(-2)))
        places = valid_len[:, None] + torch.arange(self.options.kernel - 1, device=x.device)
        tail = before.gather(1, places[..., None].expand(-1, -1, before.shape[-1])).to(state.tail.dtype)
        everything = Evicted(x.detach(), torch.ones_like(valid_len, dtype=torch.bool))
        content = query.unflatten(-1, (self.key_heads, -1)).permute(2, 0, 1, 3)
        logs = {"kept": self.kept(tokens.decay, valid_len)}
        return MemoryOutput(y, State(matrix, tail), {}, content, everything, logs)

    def tokens(
        self, query: Tensor, keys: Tensor, value: Tensor, normed: Tensor, valid_len: Tensor, dtype: torch.dtype
    ) -> Tokens:
        """Return what the rule reads; padding neither decays the matrix nor writes to it."""
        is_real = torch.arange(normed.shape[1], device=valid_len.device) < valid_len[:, None, None]
        beta, decay = self.rates(normed).to(dtype).transpose(1, 2).chunk(2, dim=1)  # (B, H, T) each
        beta = beta.sigmoid() * (2.0 if self.options.negative_eigenvalues else 1.0)
        decay = -self.log_decay.to(dtype).exp()[:, None] * F.softplus(decay + self.decay_bias.to(dtype)[:, None])
        query, keys = (self.unit(rows, dtype) for rows in (query, keys))
        values = value.to(dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return Tokens(query / math.sqrt(self.d_key), keys, values, decay * is_real, beta * is_real)

    def unit(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide rows (B, T, G K) by their length, and repeat each for the heads that share it: (B, H, T, K)."""
        heads = rows.to(dtype).unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        return heads.repeat_interleave(self.num_heads // self.key_heads, dim=1)

    @staticmethod
    @torch.no_grad()
    def kept(decay: Tensor, valid_len: Tensor) -> Tensor:
        """Return the share of the matrix that a token leaves, mean over heads and real tokens, (B,)."""
        num_real = valid_len.clamp(min=1) * decay.shape[1]
        padding = decay.shape[1] * (decay.shape[2] - valid_len)
        return (decay.float().exp().sum((1, 2)) - padding) / num_real


def chunks(seg_len: int, chunk_len: int) -> tuple[int, int]:
    """Return the size and the number of chunks of a segment; the last is filled up with padding."""
    size = min(seg_len, chunk_len)
    return size, -(-seg_len // size)


def delta_rule(tokens: Tokens, matrix: Tensor, *, chunk_len: int) -> tuple[Tensor, Tensor]:
    """Apply the rule to a segment in chunks (sec. 3.3 of the paper): what tokens read (B, H, T, V), the new matrix.

    Inside a chunk the corrections R of all tokens follow from one triangular system, (I + L) R = beta (V - e^c K S).
    """
    seg_len = tokens.beta.shape[2]
    size, num_chunks = chunks(seg_len, chunk_len)
    missing = size * num_chunks - seg_len
    query, keys, value = (F.pad(rows, (0, 0, 0, missing)) for rows in tokens[:3])
    decay, beta = (F.pad(rates, (0, missing)) for rates in tokens[3:])
    upper = torch.ones(size, size, dtype=torch.bool, device=beta.device).triu(1)
    one = torch.eye(size, device=beta.device, dtype=beta.dtype)
    read = []
    for chunk in zip(*(part.split(size, dim=2) for part in (query, keys, value, decay, beta)), strict=True):
        q, k, v, g, b = chunk
        total = g.cumsum(-1)  # log of what is left at a token of the matrix before the chunk
        # Never e^(c_i - c_j) for i < j, which overflows.
        between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
        scaled = b[..., None] * k
        lower = one + (scaled @ k.mT * between).tril(-1)
        targets = b[..., None] * v - (scaled * total.exp()[..., None]) @ matrix
        new = torch.linalg.solve_triangular(lower, targets, upper=False, unitriangular=True)
        read.append((q * total.exp()[..., None]) @ matrix + (q @ k.mT * between) @ new)
        left = total[..., -1:]
        matrix = left.exp()[..., None] * matrix + (k * (left - total).exp()[..., None]).mT @ new
    return torch.cat(read, dim=2)[:, :, :seg_len], matrix
