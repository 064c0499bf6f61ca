"""Shapes and options that the model passes to every layer of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerSpec:
    """The block that a memory layer belongs to: its index, widths, lengths and dropout."""

    layer_index: int  # 0 is the block nearest the embedding
    num_layers: int
    d_model: int  # D
    num_heads: int  # H
    d_head: int  # K
    seg_len: int  # T, tokens
    dropout: float
    attention_dropout: float
    norm: str  # pre | post
    clamp_len: int | None
    same_length: bool
    seed: int  # train.seed, for the random draws of a memory (rule 8)
    short_first: bool = False  # data.cut is end: a document's first segment may be short and is committed nevertheless

    @property
    def attention(self) -> dict[str, Any]:
        """Return the keyword arguments of `layers.RelativeAttention`."""
        names = ("d_model", "num_heads", "d_head", "dropout", "attention_dropout", "clamp_len")
        return {name: getattr(self, name) for name in names}
