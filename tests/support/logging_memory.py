"""A memory that logs, for tests/memory/test_memory_logs.py; otherwise it is Transformer-XL."""

import torch
from torch import Tensor

from dist_mem.memory.base import MemoryOutput
from dist_mem.memory.transformer_xl import TransformerXL, TransformerXLState


class Logging(TransformerXL):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        logs = {
            "tokens": torch.where(valid_len > 0, valid_len, torch.nan),  # an idle lane has no value
            "layer": x.new_full((), self.spec.layer_index),
            "size": x.square().mean((1, 2)),
        }
        return super().forward(x, state, valid_len)._replace(logs=logs)


class BadName(Logging):
    def forward(self, x: Tensor, state: TransformerXLState, valid_len: Tensor) -> MemoryOutput:
        return super().forward(x, state, valid_len)._replace(logs={"size of x?": x.mean()})
