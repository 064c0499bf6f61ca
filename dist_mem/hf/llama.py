"""Llama, and Qwen2, which differs by biases of queries, keys and values, in Hugging Face's layout.

One layer of ours makes keys and values, and one makes gates and rows of the feed-forward; a published model has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dist_mem.config import ModelConfig
from dist_mem.hf.layout import FLAG, POSITIVE, SIZE, Layout, Pair, Unsupported
from dist_mem.model import MemoryLM
from dist_mem.nn.rotary_attention import RotaryAttention
from dist_mem.runtime.file_schema import Schema, optional, record, rows, text

_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Keys of config.json that change the computation, and the only values supported here, which are also their defaults.
COMPUTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "quantization_config": None,
}

_ROPE = optional(record({}, {"rope_type": text, "type": text, "rope_theta": POSITIVE}, is_open=True))
_SIZES: dict[str, Schema] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), SIZE),
    **dict.fromkeys(("max_position_embeddings", "vocab_size"), SIZE),
    "model_type": text,
}
_FURTHER: dict[str, Schema] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim"), optional(SIZE)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), POSITIVE),
    "layer_types": optional(rows(text)),
    "tie_word_embeddings": FLAG,
}


def rotary_of(published: dict[str, Any]) -> tuple[str, float]:
    """Return type and theta of the rotary positions: `rope_parameters`, or two keys in files of transformers 4."""
    parameters = published.get("rope_parameters") or published.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return kind, float(parameters.get("rope_theta", published.get("rope_theta", 10_000.0)))


def sizes_of(published: dict[str, Any]) -> dict[str, Any]:
    num_heads, d_model = published["num_attention_heads"], published["hidden_size"]
    return {
        "num_layers": published["num_hidden_layers"],
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": published.get("num_key_value_heads") or num_heads,
        "d_head": published.get("head_dim") or d_model // num_heads,
        "d_inner": published["intermediate_size"],
        "num_positions": published["max_position_embeddings"],
        "rope_theta": rotary_of(published)[1],
        "norm_eps": published.get("rms_norm_eps", 1e-6),
        "qkv_bias": published["model_type"] == "qwen2",
        "tie_embeddings": published.get("tie_word_embeddings", False),
    }


def unsupported(published: dict[str, Any]) -> Iterator[Unsupported]:
    if (kind := published.get("model_type")) not in _TYPES:
        yield Unsupported("model_type", kind, " or ".join(_TYPES))
    if (rope := rotary_of(published)[0]) != "default":
        key = "rope_parameters" if published.get("rope_parameters") else "rope_scaling"
        yield Unsupported(key, rope, "default: no scaling of rotary positions")
    layers = published.get("layer_types") or []
    if any(layer != "full_attention" for layer in layers):
        yield Unsupported("layer_types", layers, "full_attention in every layer")
    for key, wanted in COMPUTED.items():
        if (value := published.get(key, wanted)) != wanted:
            yield Unsupported(key, value, str(wanted))


def pairs(model: MemoryLM, hosts: list[str]) -> Iterator[Pair]:
    yield Pair(("embedding.bins.0.weight",), ("model.embed_tokens.weight",))
    yield Pair(("final_norm.weight",), ("model.norm.weight",))
    if model.head.bins[0].weight is not model.embedding.bins[0].weight:
        yield Pair(("head.bins.0.weight",), ("lm_head.weight",))
    for index, host in enumerate(hosts):
        block, layer = f"blocks.{index}", f"model.layers.{index}"
        attention, theirs, feed = f"{host}.attention", f"{layer}.self_attn", f"{layer}.mlp"
        yield Pair((f"{host}.norm.weight",), (f"{layer}.input_layernorm.weight",))
        yield Pair((f"{block}.feed_forward_norm.weight",), (f"{layer}.post_attention_layernorm.weight",))
        for kind in ("weight", "bias") if has_biases(model) else ("weight",):
            yield Pair((f"{attention}.query.{kind}",), (f"{theirs}.q_proj.{kind}",))
            yield Pair((f"{attention}.key_value.{kind}",), (f"{theirs}.k_proj.{kind}", f"{theirs}.v_proj.{kind}"))
        yield Pair((f"{attention}.output.weight",), (f"{theirs}.o_proj.weight",))
        two = f"{feed}.gate_proj.weight", f"{feed}.up_proj.weight"
        yield Pair((f"{block}.feed_forward.expand.weight",), two)
        yield Pair((f"{block}.feed_forward.contract.weight",), (f"{feed}.down_proj.weight",))


def has_biases(model: MemoryLM) -> bool:
    llama = model.memories()[0].spec.llama
    return llama is not None and llama.qkv_bias


def content(model: ModelConfig) -> dict[str, Any]:
    kind = "qwen2" if model.qkv_bias else "llama"
    return {
        "architectures": [_TYPES[kind]],
        "model_type": kind,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.d_head or model.d_model // model.num_heads,
        "intermediate_size": model.d_inner,
        "max_position_embeddings": model.num_positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # as transformers 4 reads it
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
    }


LLAMA = Layout(
    name="a Llama or Qwen2",
    prefix="model.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    attention=RotaryAttention,
    plain=("none", "causal"),
    fix="an attention of its own, which no Llama has weights for: set {key}.kind=none or transformer_xl",
    types=_SIZES | _FURTHER,
    optional=frozenset(_FURTHER),
    sizes=sizes_of,
    unsupported=unsupported,
    pairs=pairs,
    content=content,
)
