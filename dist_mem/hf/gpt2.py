"""GPT-2 in Hugging Face's layout.

Its linear layers store their matrices transposed, and one layer makes queries, keys and values; ours has two for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_mem.config import ModelConfig
from dist_mem.hf.layout import SIZE, Layout, Pair, UnsupportedKey
from dist_mem.model import MemoryLM
from dist_mem.nn.plain_attention import PlainAttention
from dist_mem.runtime.file_schema import optional

# Keys of config.json that change the computation, and the values supported here.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def sizes_of(published: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": published["n_layer"],
        "d_model": published["n_embd"],
        "num_heads": published["n_head"],
        "d_inner": published.get("n_inner") or 4 * published["n_embd"],
        "num_positions": published["n_positions"],
    }


def find_unsupported(published: dict[str, Any]) -> Iterator[UnsupportedKey]:
    for key, values in COMPUTED.items():
        if (value := published.get(key, values[0])) not in values:
            yield UnsupportedKey(key, value, " or ".join(map(str, values)))


def pairs(model: MemoryLM, hosts: list[str]) -> Iterator[Pair]:
    yield Pair(("embedding.bins.0.weight",), ("transformer.wte.weight",))
    yield Pair(("embedding.positions",), ("transformer.wpe.weight",))
    layers = {"final_norm": "ln_f"}
    for index, host in enumerate(hosts):
        block = f"blocks.{index}"
        layers[f"{host}.norm"] = f"h.{index}.ln_1"
        layers[f"{host}.attention.output"] = f"h.{index}.attn.c_proj"
        layers[f"{block}.feed_forward_norm"] = f"h.{index}.ln_2"
        layers[f"{block}.feed_forward.expand"] = f"h.{index}.mlp.c_fc"
        layers[f"{block}.feed_forward.contract"] = f"h.{index}.mlp.c_proj"
    for kind in ("weight", "bias"):
        for ours, theirs in layers.items():
            is_linear = kind == "weight" and ".c_" in theirs
            yield Pair((f"{ours}.{kind}",), (f"transformer.{theirs}.{kind}",), is_linear)
        for index, host in enumerate(hosts):
            parts = (f"{host}.attention.query.{kind}", f"{host}.attention.key_value.{kind}")
            yield Pair(parts, (f"transformer.h.{index}.attn.c_attn.{kind}",), kind == "weight")


def content(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.d_inner,
        "n_positions": model.num_positions,
        "n_ctx": model.num_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": True,
    }


GPT2 = Layout(
    name="a GPT-2",
    prefix="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",  # masks
    attention=PlainAttention,
    plain=("causal",),
    fix="relative positions or an attention of its own, which no GPT-2 has weights for: set {key}.kind=causal, or "
    "compressive with {key}.positions=alibi",
    types={
        **dict.fromkeys(("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"), SIZE),
        "n_inner": optional(SIZE),
    },
    optional=frozenset({"n_inner"}),
    sizes=sizes_of,
    unsupported=find_unsupported,
    pairs=pairs,
    content=content,
)
