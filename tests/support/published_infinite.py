"""The infinity-former's memory with the weights and inputs of the authors' code (tests/golden/infinite)."""

from typing import Any

import torch
from torch import Tensor

from dist_mem.memory.base import Evicted, LayerSpec, Memory, MemoryOutput
from tests.support import parity, published

WEIGHTS = {
    "mask_net_weight": "gate.weight",
    "mask_net_bias": "gate.bias",
    "proj_key_weight": "key.weight",
    "proj_value_weight": "value.weight",
    "attn_out_weight": "output.weight",
}


def theirs(values: Tensor, dim: int) -> Tensor:
    """Basis functions from our order to the published one; two widths."""
    halves = values.movedim(dim, -1).unflatten(-1, (2, -1))
    return halves.transpose(-1, -2).flatten(-2).movedim(-1, dim)


def ours(values: Tensor, dim: int) -> Tensor:
    """Basis functions from the published order to ours."""
    pairs = values.movedim(dim, -1).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2).movedim(-1, dim)


class GivenQueries(Memory):
    """Attends to nothing; its queries are set from outside."""

    query: Tensor  # (H, B, T, K)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> tuple[()]:
        return ()

    def forward(self, x: Tensor, state: Any, valid_len: Tensor) -> MemoryOutput:
        rows = x.new_zeros(x.shape[0], self.spec.seg_len, x.shape[2])
        return MemoryOutput(torch.zeros_like(x), state, {}, self.query, Evicted(rows, valid_len >= 0))


def layer_spec(**sizes: Any) -> LayerSpec:
    return published.layer_spec(norm="pre", **sizes)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, kind: str = "outputs") -> None:
    """Relative to the largest entry."""
    parity.assert_close(found, expected, kind, tolerance=tolerance, floor=1e-30)
