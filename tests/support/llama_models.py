"""Small Llamas for tests: configurations, contract cases, and folders in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_mem.config import config_from
from dist_mem.contract.subject import Subject
from tests.support.contract_cases import SIZE, small_block

VOCAB, SEG_LEN = 67, 12
SIZES: dict[str, Any] = {
    **{"num_layers": 3, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_inner": 40, "num_positions": 64},
    **{"tie_embeddings": False, "norm_eps": 1e-6},
}
LTM = {"kind": "infinite", "num_basis": 8, "basis_widths": [0.1, 0.2], "num_samples": 16}
CACHE = {"kind": "transformer_xl", "mem_len": 2 * SEG_LEN}

# Of the memory contract, with one head of keys for two of queries.
CASES: dict[str, dict[str, Any]] = {
    "transformer_xl": small_block("transformer_xl"),
    "compressive": small_block("compressive"),
    "infinite, normed over compressive": small_block("infinite", over=small_block("compressive"), store="normed"),
}
KEYS = {"kind": "llama", "d_head": 6, "num_kv_heads": 1, "qkv_bias": True}


def llama_subject(case: str) -> Subject:
    """Return the subject of the contract's rules for a case."""
    return Subject(lambda _: CASES[case], SIZE, keys=KEYS)


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


def save_random_llama(folder: Path, *, qwen: bool = False, shard: str = "1GB", std: float = 0.3, **changes: Any) -> Any:
    """Save a model of transformers with random weights, norms and biases by `save_pretrained`; return it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64, "vocab_size": VOCAB}
    torch.manual_seed(1)
    settings: dict[str, Any] = {**sizes, "attn_implementation": "sdpa", **changes}
    model: Any
    if qwen:
        model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    model.eval().save_pretrained(folder, max_shard_size=shard)
    return model
