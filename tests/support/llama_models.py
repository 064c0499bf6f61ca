"""Small Llamas for tests: configurations, contract cases, and folders in Hugging Face's layout."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_mem.config import RopeConfig
from dist_mem.contract.subject import CheckedMemory
from dist_mem.hf.folder import read_published_config
from dist_mem.hf.names import LAYOUTS
from tests.support.configs import config_from
from tests.support.contract_cases import SIZE, small_block

VOCAB, SEG_LEN = 67, 12
SIZES: dict[str, Any] = {
    **{"num_layers": 3, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_inner": 40, "num_positions": 64},
    **{"tie_embeddings": False, "norm_eps": 1e-6},
}
LTM = {"kind": "infinite", "num_basis": 8, "basis_widths": [0.1, 0.2], "num_samples": 16}
CACHE = {"kind": "transformer_xl", "mem_len": 2 * SEG_LEN}

# Of the memory contract, with one head of keys for two of queries: biases, or norms of heads.
CASES: dict[str, dict[str, Any]] = {
    "transformer_xl": small_block("transformer_xl"),
    "transformer_xl in Qwen3": small_block("transformer_xl"),
    "compressive in Qwen3": small_block("compressive"),
    "rmt_rows in Qwen3": small_block("rmt_rows"),
    "infinite, normed over compressive": small_block("infinite", over=small_block("compressive"), store="normed"),
    "infini over none in Qwen3": small_block("infini", over={"kind": "none"}, gate="tanh", gate_init=0.5),
    "memorizing over none in Qwen3": small_block("memorizing", over={"kind": "none"}, gate="tanh", gate_init=0.5),
    "linear over none in Qwen3": small_block("linear", over={"kind": "none"}, over_gate_init=0.5),
}
KEYS: dict[str, Any] = {"kind": "llama", "d_head": 6, "num_kv_heads": 1}
DYNAMIC = {**KEYS, "qkv_bias": True, "num_positions": SIZE.seg_len, "rope": RopeConfig(kind="dynamic", factor=4.0)}
QWEN3 = {**KEYS, "qk_norm": True, "rope": RopeConfig(kind="yarn", factor=4.0, original_positions=16)}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    """Return rotary positions of a kind, as config.json has them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **keys}}


# Models of transformers: the beginning of the names of their classes, and what differs from SIZES.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {}),
    "Llama 3.2": (
        "Llama",
        {
            "tie_word_embeddings": True,
            **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "Llama, linear": ("Llama", rope("linear")),
    "Llama, dynamic": ("Llama", {**rope("dynamic"), "max_position_embeddings": 24}),
    "Llama, yarn": ("Llama", rope("yarn", original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2)),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "Qwen3": ("Qwen3", {"head_dim": 10, **rope("yarn", original_max_position_embeddings=16, truncate=False)}),
    "Mistral": ("Mistral", {"sliding_window": 5}),
    "Mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 10}),
}


def llama_subject(case: str) -> CheckedMemory:
    """Return the subject of the contract's rules for a case."""
    keys = QWEN3 if case.endswith("Qwen3") else DYNAMIC
    window = {"sliding_window": SIZE.seg_len + 2} if CASES[case]["kind"] == "transformer_xl" else {}
    return CheckedMemory(lambda _: CASES[case], SIZE, keys={**keys, **window})


def llama_config(memory: dict[str, Any] | None = None, **blocks: dict[str, Any]) -> Any:
    """Return the configuration of a small Llama, without memory unless one is given."""
    base = {
        "model": {"kind": "llama", **SIZES, "dropout": 0.0},
        "memory": memory or {"kind": "none"},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "steps": 8, "precision": "fp32"},
    }
    return config_from(base, blocks)


class ExactRotary(torch.nn.Module):
    """The table of angles of transformers' Llama in float64; its own is in float32 in every precision."""

    def __init__(self, d_head: int, theta: float) -> None:
        super().__init__()
        self.exponents = torch.arange(0, d_head, 2, dtype=torch.float64) / d_head
        self.theta = theta

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.theta**-self.exponents
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


def model_keys(folder: Path) -> dict[str, Any]:
    """Return the block `model` of a configuration that fits a folder."""
    layout = LAYOUTS["llama"]
    keys: dict[str, Any] = {"pretrained": str(folder)}
    for key, value in layout.sizes(read_published_config(folder, layout)).items():
        block, _, name = key.rpartition(".")
        (keys.setdefault(block, {}) if block else keys)[name] = value
    return keys


def save_random_llama(
    folder: Path, kind: str = "Llama 2", *, shard: str = "1GB", std: float = 0.3, vocab_size: int = VOCAB
) -> Any:
    """Save a model of PUBLISHED with random weights, norms and biases by `save_pretrained`; return it."""
    import transformers

    sizes = {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64, "vocab_size": vocab_size}
    torch.manual_seed(1)
    name, changes = PUBLISHED[kind]
    settings = {**sizes, "attn_implementation": "sdpa", **copy.deepcopy(changes)}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    model.eval().save_pretrained(folder, max_shard_size=shard)
    return model
