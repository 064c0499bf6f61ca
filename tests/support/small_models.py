"""A small model, and a segment that it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_mem.config import Config, ModelConfig, TrainConfig

VOCAB, LANES, SEG_LEN = 23, 3, 5
XL = {"kind": "transformer_xl", "mem_len": 7}


def small_config(memory: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 24, "dropout": 0.0, "init_std": 0.3}
    return Config(
        model=ModelConfig(**{**sizes, **model}),
        memory=XL if memory is None else memory,
        train=TrainConfig(seg_len=SEG_LEN),
    )


def one_segment(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, LANES, SEG_LEN), generator=generator)
    return tokens, targets, torch.full((LANES,), SEG_LEN)
