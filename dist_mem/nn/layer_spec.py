"""Shapes and options that the model passes to every layer of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_mem.config import RopeConfig


@dataclass(frozen=True)
class LlamaSpec:
    """What only the blocks of a Llama have, see dist_mem/nn/rotary_attention.py."""

    num_kv_heads: int  # heads of keys and values; each serves H / num_kv_heads heads of queries
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool = False
    rope: RopeConfig | None = None  # with its `original_positions`
    sliding_window: int | None = None  # tokens


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
    back_end: str = "auto"  # of attention, see dist_mem/nn/attention.py
    short_first: bool = False  # data.cut is end: a document's first segment may be short and is committed nevertheless
    tf32: bool = False  # train.tf32: products of float32 are not exact
    llama: LlamaSpec | None = None  # None: the model is no Llama

    @property
    def attention(self) -> dict[str, Any]:
        """Return the keyword arguments of `layers.RelativeAttention`."""
        names = ("d_model", "num_heads", "d_head", "dropout", "attention_dropout", "clamp_len", "back_end")
        return {name: getattr(self, name) for name in names}

    @property
    def rms_eps(self) -> float | None:
        """Epsilon of the root-mean-square norms; None: the model has layer norms."""
        return None if self.llama is None else self.llama.norm_eps

    @property
    def kv_width(self) -> int:
        """Width of the keys of a row, and of its values."""
        return self.d_head * (self.num_heads if self.llama is None else self.llama.num_kv_heads)
