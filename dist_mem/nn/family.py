"""What `model.kind` decides about the layers around the memories, in one place.

The keys that a kind fixes or refuses are in config/constraints.py; the names of its weights in hf/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from dist_mem.config import ModelConfig
from dist_mem.nn import published_layers
from dist_mem.nn.layer_spec import LlamaSpec
from dist_mem.nn.layers import FeedForward
from dist_mem.nn.vocabulary import Bin, Embedding, Softmax


class Family(NamedTuple):
    embedding: Callable[[list[Bin], ModelConfig], Embedding]
    feed_forward: type[nn.Module]
    softmax: type[Softmax] = published_layers.UnbiasedSoftmax
    # As in GPT-2: initial residual weights divided by sqrt(2 L), dropout of the sum of attention and long-term memory
    # instead of each, and no dropout after the last block. Llama, published without dropout, has it so here.
    is_published: bool = True
    has_rotary_attention: bool = False  # and RMSNorm, see `llama_spec`


def _scaled_embedding(bins: list[Bin], model: ModelConfig) -> Embedding:
    return Embedding(bins, d_model=model.d_model)


def _with_positions(bins: list[Bin], model: ModelConfig) -> Embedding:
    return published_layers.GPT2Embedding(bins, d_model=model.d_model, num_positions=model.num_positions)


def _plain_embedding(bins: list[Bin], model: ModelConfig) -> Embedding:
    return published_layers.UnscaledEmbedding(bins, d_model=model.d_model)


FAMILIES = {
    "transformer": Family(_scaled_embedding, FeedForward, Softmax, is_published=False),
    "gpt2": Family(_with_positions, published_layers.GPT2FeedForward),
    "llama": Family(_plain_embedding, published_layers.SwiGLU, has_rotary_attention=True),
}


def family_of(model: ModelConfig) -> Family:
    """Return what `model.kind` decides."""
    return FAMILIES[model.kind]


def llama_spec(model: ModelConfig) -> LlamaSpec | None:
    """Return what only the blocks of a Llama have; None for another kind."""
    if not family_of(model).has_rotary_attention:
        return None
    rope = model.rope and replace(model.rope, original_positions=model.rope.original_positions or model.num_positions)
    return LlamaSpec(
        num_kv_heads=model.num_kv_heads or model.num_heads,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        rope=rope,
        sliding_window=model.sliding_window,
    )
