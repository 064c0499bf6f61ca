"""Small tensors of known values, made once for each device: their copy to a GPU makes the host wait."""

from __future__ import annotations

import torch
from torch import Tensor

_MADE: dict[tuple[tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def constant(values: tuple[float, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor (N,), made at the first call; do not modify it."""
    key = (values, device, dtype)
    if key in _MADE:
        return _MADE[key]
    with torch.inference_mode(False), torch.no_grad():  # training cannot use tensors made in inference mode
        made = torch.tensor(values, device=device, dtype=dtype)
    if type(made) is Tensor:  # a fake tensor, which has no values, must not be kept
        _MADE[key] = made
    return made
