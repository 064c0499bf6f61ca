"""Small GPT-2s for tests: configurations, models, and folders in Hugging Face's layout."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.model import LMState, MemoryLM
from tests.support.configs import config_from

VOCAB, SEG_LEN = 67, 12
SIZES = {"num_layers": 3, "d_model": 24, "num_heads": 3, "d_inner": 96, "num_positions": 16}
LTM = {"kind": "infinite", "num_basis": 8, "basis_widths": [0.1, 0.2], "num_samples": 16, "over": {"kind": "causal"}}


def gpt2_config(memory: dict[str, Any] | None = None, **blocks: dict[str, Any]) -> Any:
    """Return the configuration of a small GPT-2, without memory unless one is given."""
    base = {
        "model": {"kind": "gpt2", **SIZES, "dropout": 0.0},
        "memory": memory or {"kind": "causal"},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "steps": 8, "precision": "fp32"},
    }
    return config_from(base, blocks)


def build(config: Any, vocab_size: int = VOCAB) -> MemoryLM:
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, vocab_size)).eval()


def fresh(model: MemoryLM, lanes: int, dtype: torch.dtype = torch.float32) -> LMState:
    return model.init_state(torch.arange(lanes), "cpu", dtype)


def log_probs(model: MemoryLM, segments: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Read segments of two lanes, one after the other; return the log-probabilities of all, (2, T, V)."""
    state, found = fresh(model, 2, dtype), list[Tensor]()
    for tokens in segments:
        rows, state = model.log_probs(tokens, torch.full((2,), tokens.shape[1]), state=state)
        found.append(rows)
    return torch.cat(found, dim=1)


def save_random_gpt2(folder: Path, *, vocab_size: int = VOCAB, std: float = 0.3, **changes: Any) -> Any:
    """Save a GPT2LMHeadModel with random weights and biases by `save_pretrained`; return it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_embd": 24, "n_head": 3, "n_positions": 16, "vocab_size": vocab_size}
    ids = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **ids, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model
