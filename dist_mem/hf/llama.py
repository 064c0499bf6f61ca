"""Llama, Mistral, Qwen2 and Qwen3 in Hugging Face's layout.

Mistral differs from Llama by a sliding window, Qwen2 by biases of queries, keys and values, Qwen3 by norms of queries
and keys. One layer of ours makes keys and values, and one makes gates and rows of the feed-forward; a published model
has two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dist_mem.config import ModelConfig
from dist_mem.config.schema import ROPE_KINDS
from dist_mem.hf.layout import FLAG, NOT_NEGATIVE, POSITIVE, SIZE, Layout, Pair, UnsupportedKey
from dist_mem.model import MemoryLM
from dist_mem.nn.rotary_attention import RotaryAttention
from dist_mem.runtime.file_schema import Schema, integer, list_of, optional, record, text


class Kind(NamedTuple):
    """A `model_type`."""

    class_name: str
    defaults: dict[str, Any]  # of transformers, for keys that config.json may lack


KINDS = {
    "llama": Kind("LlamaForCausalLM", {}),
    "mistral": Kind("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Kind("Qwen2ForCausalLM", {"num_key_value_heads": 32, "sliding_window": 4096}),
    "qwen3": Kind("Qwen3ForCausalLM", {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128}),
}
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
# Keys of config.json that change the computation, and the only values supported here, which are also their defaults.
COMPUTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
# Our keys of `model.rope` and theirs.
ROPE_NAMES = {"original_positions": "original_max_position_embeddings"} | {
    name: name for names in ROPE_KINDS.values() for name in names if name != "original_positions"
}

_ROPE = optional(
    record(
        {},
        {
            **{"rope_type": text, "type": text, "rope_theta": POSITIVE, "truncate": FLAG},
            **dict.fromkeys(("low_freq_factor", "high_freq_factor"), POSITIVE),
            **dict.fromkeys(("factor", "attention_factor", "partial_rotary_factor"), optional(POSITIVE)),
            **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), optional(NOT_NEGATIVE)),
            "original_max_position_embeddings": optional(SIZE),
        },
        is_open=True,
    )
)
_SIZES: dict[str, Schema] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), SIZE),
    **dict.fromkeys(("max_position_embeddings", "vocab_size"), SIZE),
    "model_type": text,
}
_FURTHER: dict[str, Schema] = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), optional(SIZE)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), POSITIVE),
    "original_max_position_embeddings": optional(SIZE),
    "max_window_layers": integer(0, 2**31 - 1),
    "layer_types": optional(list_of(text)),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), FLAG),
}


def with_defaults(published: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with the defaults of its kind, if that is known."""
    kind = KINDS.get(published.get("model_type", ""))
    return {**(kind.defaults if kind else {}), **published}


def rope_of(published: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key of the rotary positions and its value: `rope_scaling` of transformers 4 or `rope_parameters`."""
    key = "rope_scaling" if published.get("rope_scaling") else "rope_parameters"  # as transformers, if it has both
    return key, published.get(key) or {}


def rope_kind(rope: dict[str, Any]) -> str:
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def rope_keys(published: dict[str, Any]) -> dict[str, Any]:
    """Return our keys of `model.rope`; that it is null if nothing is scaled."""
    rope = rope_of(published)[1]
    kind = rope_kind(rope)
    if kind == "default":
        return {"rope": None}
    longest = published["max_position_embeddings"]
    # Where the file has none, transformers takes the longest text, and says nothing.
    original = published.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    given = {
        "original_positions": original or longest,
        "low_freq_factor": rope.get("low_freq_factor"),
        "high_freq_factor": rope.get("high_freq_factor"),
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "truncate": rope.get("truncate", True),
        "attention_factor": rope.get("attention_factor"),
    }
    factor = rope.get("factor") or longest / given["original_positions"]  # only yarn may lack it
    one, other = rope.get("mscale"), rope.get("mscale_all_dim")
    if given["attention_factor"] is None and one and other:
        given["attention_factor"] = _mscale(factor, one) / _mscale(factor, other)
    return {"rope.kind": kind, "rope.factor": factor} | {f"rope.{name}": given[name] for name in ROPE_KINDS[kind]}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def layer_types(published: dict[str, Any]) -> set[str]:
    """Return which kinds of attention the layers have, FULL and SLIDING."""
    published = with_defaults(published)
    if published.get("sliding_window") is None:
        return {FULL}
    if published["model_type"] == "mistral":
        return {SLIDING}
    if not published["model_type"].startswith("qwen") or not published.get("use_sliding_window"):
        return {FULL}
    if layers := published.get("layer_types"):
        return set(layers)
    first, num_layers = published.get("max_window_layers", 28), published.get("num_hidden_layers", 0)
    return {SLIDING} if first == 0 else {FULL} if first >= num_layers else {FULL, SLIDING}


def sizes_of(published: dict[str, Any]) -> dict[str, Any]:
    published = with_defaults(published)
    num_heads, d_model = published["num_attention_heads"], published["hidden_size"]
    return {
        "num_layers": published["num_hidden_layers"],
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": published.get("num_key_value_heads") or num_heads,
        "d_head": published.get("head_dim") or d_model // num_heads,
        "d_inner": published["intermediate_size"],
        "num_positions": published["max_position_embeddings"],
        "rope_theta": float(rope_of(published)[1].get("rope_theta", published.get("rope_theta", 10_000.0))),
        **rope_keys(published),
        "norm_eps": published.get("rms_norm_eps", 1e-6),
        "qkv_bias": published["model_type"] == "qwen2",
        "qk_norm": published["model_type"] == "qwen3",
        "sliding_window": published["sliding_window"] if layer_types(published) == {SLIDING} else None,
        "tie_embeddings": published.get("tie_word_embeddings", False),
    }


def find_unsupported(published: dict[str, Any]) -> Iterator[UnsupportedKey]:
    if (kind := published.get("model_type")) not in KINDS:
        yield UnsupportedKey("model_type", kind, " or ".join(KINDS))
        return
    yield from _unsupported_rope(*rope_of(published))
    given, computed = published.get("layer_types"), layer_types(published)
    if given and set(given) != computed:
        yield UnsupportedKey("layer_types", given, f"{' or '.join(computed)} in every layer")
    if len(computed) > 1 or not computed <= {FULL, SLIDING}:
        key = "layer_types" if given else "max_window_layers"
        yield UnsupportedKey(key, published.get(key, 28), "the same sliding window, or none, in every layer")
    for key, wanted in COMPUTED.items():
        if (value := published.get(key, wanted)) != wanted:
            yield UnsupportedKey(key, value, str(wanted))


def _unsupported_rope(key: str, rope: dict[str, Any]) -> Iterator[UnsupportedKey]:
    kind = rope_kind(rope)
    if kind not in ("default", *ROPE_KINDS):
        yield UnsupportedKey(f"{key}.rope_type", kind, f"default, {', '.join(ROPE_KINDS)}")
        return
    if nested := next((name for name, value in rope.items() if isinstance(value, dict)), None):
        yield UnsupportedKey(f"{key}.{nested}", rope[nested], "left out: all layers have the same rotary positions")
    if (part := rope.get("partial_rotary_factor")) not in (None, 1):
        yield UnsupportedKey(f"{key}.partial_rotary_factor", part, "1.0")
    needed = {"linear": ["factor"], "dynamic": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for name in needed.get(kind, ()):
        if rope.get(name) is None:
            yield UnsupportedKey(f"{key}.{name}", None, f"a number, which rope_type {kind} needs")
    if kind == "llama3" and not rope.get("low_freq_factor", 0) < rope.get("high_freq_factor", 0):
        yield UnsupportedKey(f"{key}.high_freq_factor", rope.get("high_freq_factor"), "more than low_freq_factor")


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
        for name in ("query", "key") if has_head_norms(model) else ():
            yield Pair((f"{attention}.{name}_norm.weight",), (f"{theirs}.{name[0]}_norm.weight",))
        two = f"{feed}.gate_proj.weight", f"{feed}.up_proj.weight"
        yield Pair((f"{block}.feed_forward.expand.weight",), two)
        yield Pair((f"{block}.feed_forward.contract.weight",), (f"{feed}.down_proj.weight",))


def has_biases(model: MemoryLM) -> bool:
    llama = model.memories()[0].spec.llama
    return llama is not None and llama.qkv_bias


def has_head_norms(model: MemoryLM) -> bool:
    llama = model.memories()[0].spec.llama
    return llama is not None and llama.qk_norm


def content(model: ModelConfig) -> dict[str, Any]:
    kind, window = "llama", {}
    if model.qkv_bias or model.qk_norm:
        kind = "qwen2" if model.qkv_bias else "qwen3"
        layers = [FULL if model.sliding_window is None else SLIDING] * model.num_layers
        window = {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0, "layer_types": layers}
    elif model.sliding_window is not None or model.d_model % model.num_heads:  # a width that LlamaConfig refuses
        kind = "mistral"
    return {
        "architectures": [KINDS[kind].class_name],
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
        **rope_content(model),
        "sliding_window": model.sliding_window,
        **window,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
    }


def rope_content(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary positions as transformers 5 reads them, and as transformers 4 does."""
    scaled: dict[str, Any] = {}
    if model.rope is not None and model.rope.kind is not None:
        scaled = {"rope_type": model.rope.kind, "factor": model.rope.factor}
        for name in ROPE_KINDS[model.rope.kind]:
            value = getattr(model.rope, name)
            scaled[ROPE_NAMES[name]] = model.num_positions if name == "original_positions" and value is None else value
        scaled = {name: value for name, value in scaled.items() if value is not None}
    parameters = {"rope_type": "default", **scaled, "rope_theta": model.rope_theta}
    return {
        "rope_theta": model.rope_theta,
        **({"rope_scaling": scaled} if scaled else {}),
        "rope_parameters": parameters,
    }


LLAMA = Layout(
    name="a Llama, Mistral, Qwen2 or Qwen3",
    prefix="model.",
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    attention=RotaryAttention,
    plain=("none", "causal"),
    fix="an attention of its own, which no Llama has weights for: set {key}.kind=none or transformer_xl",
    types=_SIZES | _FURTHER,
    optional=frozenset(_FURTHER),
    sizes=sizes_of,
    unsupported=find_unsupported,
    pairs=pairs,
    content=content,
)
