"""Place the weights of a new model part by part: on the GPU, in the precision of the training, divided at stage 3.

Otherwise every rank would hold the whole model in fp32 on the host: with 7 10^9 weights 28 GB per rank, 224 GB on a
node of eight. Every rank draws each part whole, on the CPU, so the weights are bit for bit those of any number of
ranks and of any stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dist_mem.config import TrainConfig
from dist_mem.engine.defaults import deepspeed_config
from dist_mem.engine.start import make_partitioner, partition
from dist_mem.nn.layers import DTYPES
from dist_mem.nn.placement import PartT, Placement

_OWN_LAYOUT = ("zero_quantized_weights", "zero_hpz_partition_size")  # DeepSpeed lays such weights out itself


class DevicePlacement(Placement):
    """Places parts on a device, and divides them among the ranks if it gets a partitioner."""

    def __init__(self, device: torch.device, dtype: torch.dtype, partitioner: Any = None) -> None:
        self._device, self._dtype, self._partitioner = device, dtype, partitioner
        self._shapes: dict[nn.Parameter, torch.Size] = {}  # of parameters without values

    def place_part(self, part: PartT) -> PartT:
        for parameter in part.parameters():
            self._shapes[parameter] = parameter.shape
            parameter.data = parameter.data.new_empty(0)
        return part

    @contextmanager
    def draw_weights(self, part: nn.Module) -> Iterator[None]:
        for parameter in part.parameters():
            if parameter in self._shapes:
                parameter.data = parameter.data.new_empty(self._shapes.pop(parameter))
        yield
        for parameter in part.parameters():
            parameter.data = parameter.data.to(self._device, self._dtype)  # nothing changes where it was placed before
        for buffer in part.buffers():
            buffer.data = buffer.data.to(self._device)
        if self._partitioner is not None:
            partition(list(part.parameters()), self._partitioner)


def place_parts(train: TrainConfig, block: dict[str, Any], device: torch.device, *, world_size: int) -> Placement:
    """Return the placement for a training; the one that changes nothing if DeepSpeed must lay out whole weights.

    Args:
        block: the `deepspeed:` block as the user wrote it.

    Raises:
        ValueError: DeepSpeed refuses the block.
    """
    dtype = DTYPES[train.precision]
    zero = block.get("zero_optimization") or {}
    if zero.get("stage", 0) < 3:
        return DevicePlacement(device, dtype)
    if any(zero.get(key, 0) not in (0, 1) for key in _OWN_LAYOUT) or zero.get("offload_param"):
        return Placement()
    # Accumulation and the number of parameters are of no account for a partition.
    settings = deepspeed_config(block, train, world_size=world_size, accumulation=1, num_parameters=1)
    return DevicePlacement(device, dtype, make_partitioner(settings, dtype))
