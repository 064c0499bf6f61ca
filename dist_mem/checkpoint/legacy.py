"""Weights out of checkpoints of formats 1 and 2: their engine files are DeepSpeed's own, and nobody writes them now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_mem.engine import TAG, consolidated_partitions

_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"  # written by stages 0 to 2
_MASTERS = "names_of_fp32_masters"  # our key in it: group by group, all names of each fp32 copy


def consolidated_state_dict(directory: Path) -> dict[str, Tensor]:
    """fp32 weights of a checkpoint of format 1 or 2, written by any ZeRO stage on any number of ranks.

    DeepSpeed's files are pickles: load only checkpoints you trust.
    """
    whole_model = directory / TAG / _WHOLE_MODEL_FILE
    saved = torch.load(whole_model, map_location="cpu", weights_only=False) if whole_model.exists() else {"module": {}}
    weights = dict(saved["module"])
    if any((directory / TAG).glob("*zero_pp_rank_*_optim_states.pt")):
        weights |= consolidated_partitions(directory)
    else:
        weights |= _stage0_masters(saved)
    return {name: tensor.float() for name, tensor in weights.items()}


def _stage0_masters(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The fp32 copies that an optimizer of half precision trains without ZeRO; none in fp32."""
    if "fp32_groups" not in saved["optimizer"]:
        return {}
    masters: dict[str, Tensor] = {}
    for names_of_group, group in zip(saved[_MASTERS], saved["optimizer"]["fp32_groups"], strict=True):
        for names, master in zip(names_of_group, group, strict=True):
            masters.update(dict.fromkeys(names, master.detach()))
    return masters
