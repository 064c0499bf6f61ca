"""LoRA's matrices of a model (`model.lora`) in the format of the library peft.

    DIR/adapter_config.json, adapter_model.safetensors     what PeftModel.from_pretrained(base, DIR) reads

Where a projection here is several published ones (keys with values), those share A; where several are one published
(GPT-2's c_attn), its rank is the sum of theirs, and B has their blocks on its diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_mem.config import LoraConfig
from dist_mem.hf.names import published_pairs
from dist_mem.model import MemoryLM
from dist_mem.nn.low_rank import LowRank, low_ranks

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT = ".weight"


def adapter_of(model: MemoryLM, lora: LoraConfig, base: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of adapter_config.json, and the weights by peft's names.

    Args:
        base: folder or name of the published model.
    """
    parts, weights, ranks = low_ranks(model), dict[str, Tensor](), dict[str, int]()
    for ours, theirs, _ in published_pairs(model):
        names = [name.removesuffix(_WEIGHT) for name in ours]
        found = [parts.get(name) for name in names] if ours[0].endswith(_WEIGHT) else []
        if not any(found):
            continue
        sizes = [len(model.get_parameter(name)) for name in ours]
        down, up = _stack(found, sizes)
        for name, rows in zip(theirs, up.chunk(len(theirs)), strict=True):
            module = name.removesuffix(_WEIGHT)
            ranks[module] = len(down)
            weights[f"base_model.model.{module}.lora_A.weight"] = down.contiguous().clone()
            weights[f"base_model.model.{module}.lora_B.weight"] = rows.contiguous().clone()
    wider = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": wider,
        "alpha_pattern": {module: lora.alpha * rank / lora.rank for module, rank in wider.items()},
        "fan_in_fan_out": any(transposed for _, _, transposed in published_pairs(model)),
        "bias": "none",
        "inference_mode": True,
    }, weights


def _stack(parts: list[LowRank | None], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return A and B of projections that are one: A (R, in) of all, B (out, R) with each one's block."""
    known = [(part, begin) for part, begin in zip(parts, _begins(sizes), strict=True) if part is not None]
    down = torch.cat([part.down.detach() for part, _ in known])
    up, column = down.new_zeros(sum(sizes), len(down)), 0
    for part, begin in known:
        rows, rank = part.up.shape
        up[begin : begin + rows, column : column + rank] = part.up.detach()
        column += rank
    return down, up


def _begins(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]
