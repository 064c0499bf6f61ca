"""Infini-attention, a recurrent memory: one matrix per head, updated once per segment, for documents of any length.

    dist-mem check-memory examples/infini_attention.py:InfiniAttention
    dist-mem train configs/demo.yaml memory.kind=examples/infini_attention.py:InfiniAttention

Source: Munkhdalai et al. 2024, arXiv 2404.07143v2, eqs. 5 to 11. `memory.kind: infini` is the paper's, which learns
only with `train.bptt_segments` over 1. This one needs no such window: each segment waits in the state, and the next one
writes it to the memory, reads it, and trains its keys and values. Deviations: the paper backpropagates through all
segments of an input; here, through one segment. Local attention has ALiBi's bias for distances. 1e-10 prevents 0 / 0
in an empty memory. Shape letters: B lanes, T segment, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.memory.base import Evicted, LayerSpec, Memory, MemoryOutput
from dist_mem.nn.layers import Dropout, Projection, masked_softmax, merge_heads, split_heads, visible_keys
from dist_mem.nn.plain_attention import alibi_bias


class State(NamedTuple):
    matrix: Tensor  # (B, H, K, K) float32 at least: sigma(k)^T v, summed over all written tokens
    norm: Tensor  # (B, H, K) float32 at least: sigma(k), summed
    waiting: Tensor  # (B, T, D), block inputs of the last segment, not written yet
    has_waiting: Tensor  # (B,) bool


class InfiniAttention(Memory):
    model_keys = ()

    @dataclass
    class Options:
        delta: bool = True  # write only what the memory does not contain yet (eq. 9), not everything (eq. 8)
        first_beta: float = 0.0  # sigmoid(beta) is the memory's share in a head's output

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        width = spec.num_heads * spec.d_head
        self.input_norm = nn.LayerNorm(spec.d_model) if spec.norm == "pre" else nn.Identity()
        self.query, self.key_value = Projection(spec.d_model, width), Projection(spec.d_model, 2 * width)
        self.output = Projection(width, spec.d_model)
        self.beta = nn.Parameter(torch.zeros(spec.num_heads))
        self.dropout, self.attention_dropout = Dropout(spec.dropout), Dropout(spec.attention_dropout)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.beta.fill_(self.options.first_beta)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        lanes, heads, width = len(document_ids), self.spec.num_heads, self.spec.d_head
        exact = torch.promote_types(dtype, torch.float32)  # growing sums: half precision would lose small terms
        return State(
            torch.zeros(lanes, heads, width, width, device=device, dtype=exact),
            torch.zeros(lanes, heads, width, device=device, dtype=exact),
            torch.zeros(lanes, self.spec.seg_len, self.spec.d_model, device=device, dtype=dtype),
            torch.zeros(lanes, device=device, dtype=torch.bool),
        )

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        rows, seg_len = self.input_norm(x), x.shape[1]
        query = split_heads(self.query(rows), self.spec.num_heads)  # (H, B, T, K)
        key, value = split_heads(self.key_value(rows), 2 * self.spec.num_heads).chunk(2)
        distances = alibi_bias(len(query), num_queries=seg_len, context_len=0, bias="alibi", device=x.device)
        scores = (query @ key.mT / math.sqrt(self.spec.d_head)).to(state.matrix.dtype) + distances
        visible = visible_keys(state.has_waiting[:, None][:, :0], seg_len, same_length=False)
        local = self.attention_dropout(masked_softmax(scores, visible).to(x.dtype)) @ value

        matrix, norm = self.written(state, x.dtype)
        remembered = recall(sigma(query.transpose(0, 1), norm.dtype), matrix, norm).transpose(0, 1).to(x.dtype)
        share = self.beta.sigmoid()[:, None, None, None].to(x.dtype)
        y = self.dropout(self.output(merge_heads(share * remembered + (1.0 - share) * local)))
        waiting = x.detach().to(state.waiting.dtype, copy=True)
        new_state = State(matrix.detach(), norm.detach(), waiting, state.has_waiting | True)
        evicted = Evicted(state.waiting.to(x.dtype), state.has_waiting)
        return MemoryOutput(y, new_state, {}, query, evicted, logs={"share": share.mean()})

    def written(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return matrix and norm after writing the waiting segment, with gradients for its keys and values."""
        pair = split_heads(self.key_value(self.input_norm(state.waiting.to(dtype))), 2 * self.spec.num_heads)
        key, value = pair.transpose(0, 1).chunk(2, dim=1)  # (B, H, T, K)
        key, value = sigma(key, state.norm.dtype), value.to(state.matrix.dtype)
        new = value - recall(key, state.matrix, state.norm) if self.options.delta else value
        is_new = state.has_waiting[:, None, None]
        matrix = torch.where(is_new[..., None], state.matrix + key.mT @ new, state.matrix)
        return matrix, torch.where(is_new, state.norm + key.sum(dim=2), state.norm)


def sigma(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return positive features of queries or keys: ELU + 1."""
    return F.elu(rows.to(dtype)) + 1.0


def recall(features: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
    """Read the memory with features (B, H, T, K) of queries or keys (eq. 7): (B, H, T, K)."""
    return features @ matrix / (features @ norm[..., None]).clamp(min=1e-10)
