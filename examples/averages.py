"""An example of a memory outside the package: the means of evicted segments, and the last segment.

    dist-mem check-memory examples/averages.py:Averages
    dist-mem train configs/demo.yaml memory.kind=examples/averages.py:Averages

Every block attends to the means of the last `num_means` segments, to the previous segment, and to the current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.memory.base import Evicted, LayerSpec, Memory, MemoryOutput, select_lanes
from dist_mem.nn.layers import RelativeAttention, newest_rows, visible_keys


class State(NamedTuple):
    means: Tensor  # (B, num_means, D), one row per segment, newest last
    num_means: Tensor  # (B,) int64, how many of the newest rows are valid
    last: Tensor  # (B, T, D), block inputs of the last segment
    has_last: Tensor  # (B,) bool


class Averages(Memory):
    model_keys = ("clamp_len",)

    @dataclass
    class Options:
        num_means: int = 64  # segments

    def __init__(self, spec: LayerSpec, options: Any) -> None:
        super().__init__(spec, options)
        if options.num_means < 1:
            raise ValueError(f"memory.num_means is {options.num_means}, but must be at least 1")
        self.norm = nn.LayerNorm(spec.d_model) if spec.norm == "pre" else nn.Identity()
        self.attention = RelativeAttention(**spec.attention)

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_means": 2}

    @property
    def kept_len(self) -> int:
        return self.spec.seg_len

    def tie_parameters(self, first: Any) -> None:
        self.attention.share_biases(first.attention)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        lanes, spec = len(document_ids), self.spec
        means = torch.zeros(lanes, self.options.num_means, spec.d_model, device=device, dtype=dtype)
        last = torch.zeros(lanes, spec.seg_len, spec.d_model, device=device, dtype=dtype)
        count = torch.zeros(lanes, device=device, dtype=torch.int64)
        return State(means, count, last, count > 0)

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        num_means, seg_len = self.options.num_means, x.shape[1]
        context = torch.cat([state.means, state.last], dim=1).to(x.dtype)
        valid = [newest_rows(state.num_means, num_means), state.has_last[:, None].expand(-1, seg_len)]
        visible = visible_keys(torch.cat(valid, dim=1), seg_len, same_length=False)
        y, query, _ = self.attention(self.norm(x), self.norm(context), visible)

        new_mean = state.last.mean(dim=1, keepdim=True)
        pushed = State(
            torch.cat([state.means[:, 1:], new_mean], dim=1), (state.num_means + 1).clamp(max=num_means), *state[2:]
        )
        means = select_lanes(state.has_last, pushed, state)
        new_state = means._replace(last=x.detach().to(state.last.dtype, copy=True), has_last=state.has_last | True)
        return MemoryOutput(y, new_state, {}, query, Evicted(state.last.to(x.dtype), state.has_last))
