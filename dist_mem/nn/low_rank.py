"""LoRA: a product of two narrow matrices beside a projection, so that pretrained weights can stay as they are.

y = W x + alpha / r (B A x), with A (r, in) drawn and B (out, r) zero, so a model starts as the one without. Source: Hu
et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685), eq. 3, with A drawn as by the
library peft. Keys and values, which are one projection here, share an A, as do the two inputs of SwiGLU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.config import LoraConfig
from dist_mem.nn.layers import Dropout
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.nn.rotary_attention import RotaryAttention

NAME = "low_rank"  # of the part of a projection
_ATTENTION = ("query", "key_value", "output")
_FEED_FORWARD = ("expand", "contract")


class LowRank(nn.Module):
    """B A x, scaled: (..., in) -> (..., out)."""

    def __init__(self, in_features: int, out_features: int, config: LoraConfig) -> None:
        super().__init__()
        self.scale = config.alpha / config.rank
        self.down = nn.Parameter(torch.empty(config.rank, in_features))  # A
        self.up = nn.Parameter(torch.empty(out_features, config.rank))  # B
        self.dropout = Dropout(config.dropout)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw A; B is 0."""
        if not self.down.is_meta:
            nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
            self.up.zero_()

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        """Return what is added; with `frozen` the input gets a gradient and the matrices do not."""
        down, up = (self.down.detach(), self.up.detach()) if frozen else (self.down, self.up)
        return F.linear(F.linear(self.dropout(x), down), up) * self.scale

    def product(self) -> Tensor:
        """Return what it adds to the weight, (out, in), at least in float32."""
        exact = torch.promote_types(self.down.dtype, torch.float32)
        return self.up.to(exact) @ self.down.to(exact) * self.scale


def add_low_rank(attention: nn.Module, feed_forward: nn.Module, config: LoraConfig) -> None:
    """Put a LowRank beside the projections of a block that the configuration names.

    Raises:
        ValueError: the attention is not that of a published model.
    """
    if not isinstance(attention, PlainAttention | RotaryAttention):
        raise ValueError(
            "model.lora stands beside the attention of a GPT-2 or Llama, which this memory does not have: leave "
            "model.lora out, or give the memory one (memory.over)"
        )
    parts: list[tuple[nn.Module, tuple[str, ...]]] = [(attention, _ATTENTION)] if config.attention else []
    parts += [(feed_forward, _FEED_FORWARD)] if config.feed_forward else []
    for layer, names in parts:
        for name in names:
            projection: Any = getattr(layer, name)
            projection.add_module(NAME, LowRank(projection.in_features, projection.out_features, config))
            projection.register_forward_hook(_add)


def _add(projection: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = output + projection.low_rank(*inputs)
    return added


def low_ranks(model: nn.Module) -> dict[str, LowRank]:
    """Return the LowRank of every projection that has one, by the name of the projection."""
    return {
        name.removesuffix(f".{NAME}"): module for name, module in model.named_modules() if isinstance(module, LowRank)
    }
