"""Model FLOPs utilisation: the model's FLOP/s as a share of the peak of all devices (Chowdhery et al. 2022, app. B).

The model's FLOPs are those of its products (estimate/counting.py), without recomputation, for the tokens read. So
padding, lanes without work, and all other operations make the metric smaller.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import NamedTuple

import torch

from dist_mem.config import TrainConfig
from dist_mem.estimate.counting import Flops
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.devices import gpu_of
from dist_mem.runtime.distributed import World, sum_over_ranks

_MEASURED_SECONDS = 0.1
_SIZE = 768  # of the measured products: 1 GFLOP, large enough for a few threads


class Utilisation(NamedTuple):
    """What the FLOPs of a run are computed from, and compared with."""

    of_token: Flops
    peak: float  # FLOP/s of all ranks

    def share(self, *, num_tokens: float, num_learned: float, seconds: float) -> float:
        """Return the share of the peak.

        Args:
            num_tokens: read by all ranks.
            num_learned: of them, in forwards with a backward.
        """
        scoring, training = self.of_token
        flops = num_tokens * scoring + num_learned * (training - scoring)
        return flops / (seconds * self.peak)


def find_utilisation(train: TrainConfig, flops: Flops | None, world: World) -> tuple[Utilisation | None, list[str]]:
    """Return what MFU needs, or None and a message that says why there is no metric; collective."""
    (peak,) = sum_over_ranks([peak_flops(train, world) or math.nan], world.device)
    if math.isnan(peak):
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "a rank's device"
        fix = "set train.peak_tflops to the TFLOP/s of one device to log mfu"
        return None, [f"the peak of {name} in {train.precision} is not known: {fix}"]
    return (None if flops is None else Utilisation(flops, peak)), []


def peak_flops(train: TrainConfig, world: World) -> float | None:
    """Return the peak FLOP/s of this rank's device in the run's precision; None if it is not known."""
    precision = train.precision
    if train.peak_tflops is not None:
        return train.peak_tflops * 1e12
    if world.device.type == "cpu":
        return measured_flops(DTYPES[precision], torch.get_num_threads())
    gpu = gpu_of(torch.cuda.get_device_name(world.device))
    return gpu and gpu.peak_flops(precision, tf32=torch.get_float32_matmul_precision() != "highest")


@cache
def measured_flops(dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of the fastest of the matrix products that this processor makes in a tenth of a second."""
    matrix = torch.full((_SIZE, _SIZE), 0.5, dtype=dtype)  # no random numbers: those of the run must not change
    matrix @ matrix  # loads the library
    fastest, began = math.inf, time.perf_counter()
    while (now := time.perf_counter()) < began + _MEASURED_SECONDS:
        matrix @ matrix
        fastest = min(fastest, time.perf_counter() - now)
    return 2 * _SIZE**3 / fastest
