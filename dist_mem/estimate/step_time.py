"""Bound the time of an update by the roofline: every kernel takes as long as its operations or its bytes need.

Source: Williams et al. 2009, "Roofline"; volumes of ZeRO: Rajbhandari et al. 2020, sec. 7. The shares of the data
sheets' rates that programs reach are assumptions, stated below. Updates take longer: likely_time.py has by how much.
Letters: s bytes of a number in `train.precision`, W ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dist_mem.config import ModelConfig, TrainConfig
from dist_mem.data.batch_plan import BatchPlan, batch_plan
from dist_mem.engine.muon import muon_settings, orthogonal_flops
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import MicroBatchCost
from dist_mem.estimate.zero import BUCKET, ModelSizes, TrainingJob, effective_block, overlaps
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.devices import Device

# The best products of matrices reach 0.80 of an H100's data sheet and 0.86 of an A100's (ml-engineering, "maximum
# achievable matmul FLOPS"); those of a model are smaller. Streaming kernels reach 0.8 to 0.9 of the bandwidth.
_PRODUCTS, _STREAMS, _LINKS = 0.7, 0.85, 0.8
_PRODUCT, _STREAM = "products", "streams"  # names of two groups of kernels
_ISSUE = 5e-6  # seconds in which the host issues one operation without torch.compile; no kernel is faster
_LATENCY = 30e-6  # seconds of a collective that sends nothing
_HIDDEN = 0.7  # share of forward and backward behind which communication can hide, where DeepSpeed overlaps it
_HOST_COPY = 10e9  # bytes/s from a GPU to pageable host memory


class StepTime(NamedTuple):
    """Seconds that one update of one rank takes at least."""

    products: float  # matrix products
    fused: dict[str, float]  # kernels that attend, by `Work.operator`
    streams: float  # all other kernels: their bytes, or their issue
    update: float  # the optimizer
    communication: float  # all of it
    exposed: float  # the part of it that nothing hides

    @property
    def total(self) -> float:
        return self.compute_seconds + self.update + self.exposed

    @property
    def compute_seconds(self) -> float:
        """Forward and backward."""
        return self.products + sum(self.fused.values()) + self.streams


class UpdateTraffic(NamedTuple):
    """What one rank sends in one update."""

    num_bytes: int
    num_collectives: int


def step_time(
    job: TrainingJob, sizes: ModelSizes, counted: MicroBatchCost, device: Device, *, gpus_per_node: int
) -> StepTime:
    """Predict one update.

    Raises:
        UnusableError: the device does not compute in `train.precision`.
    """
    train, world_size, batch = job.spec.train, job.world_size, job.batch
    zero = effective_block(job, sizes).get("zero_optimization") or {}
    peak_flops(train, device)  # or refuse the device
    by_group = {group: batch.windows * seconds for group, seconds in seconds_by_group(counted, train, device).items()}
    products, streams = by_group.pop(_PRODUCT, 0.0), by_group.pop(_STREAM, 0.0)
    update = _update_bytes(job, sizes) / (_STREAMS * device.bandwidth)
    if muon := muon_settings(job.optimizer):
        rate = device.peak_flops(muon.precision, tf32=False) or device.flops["fp32"]
        update += orthogonal_flops(sizes.matrices, muon.steps) / world_size / (_PRODUCTS * rate)
    sent = transfer(train, job.spec.model, sizes, zero, batch)
    link = device.link if world_size <= gpus_per_node else min(device.link, device.network * gpus_per_node)
    communication = sent.num_bytes / (_LINKS * link) + _LATENCY * sent.num_collectives
    found = StepTime(products, by_group, streams, update, communication, communication)
    return (
        found._replace(exposed=max(0.0, communication - _HIDDEN * found.compute_seconds)) if overlaps(zero) else found
    )


def peak_flops(train: TrainConfig, device: Device) -> float:
    """Return the dense operations per second of the data sheet in `train.precision`, as the training's MFU has them."""
    peak = device.peak_flops(train.precision, tf32=train.tf32)
    if peak is None:
        known = ", ".join(name for name in device.flops if name in DTYPES)
        raise UnusableError(f"train.precision is {train.precision!r}, but {device.name} computes only in {known}")
    return peak


def seconds_by_group(counted: MicroBatchCost, train: TrainConfig, device: Device) -> dict[str, float]:
    """Return the seconds of these kernels: of products, streams, and each operator that attends."""
    issue = _ISSUE if device.name != "cpu" else 0.0
    bandwidth = _STREAMS * device.bandwidth
    wide = device.peak_flops("fp32", tf32=train.tf32) or device.flops["fp32"]
    rates = device.flops | {"fp32": wide}
    seconds: dict[str, list[float]] = {}
    for number, work in counted.kernels:
        group = work.operator or (_PRODUCT if work.flops else _STREAM)
        products = work.flops / (_PRODUCTS * rates.get(work.dtype, wide))
        seconds.setdefault(group, []).append(number * max(products, work.num_bytes / bandwidth, issue))
    return {group: math.fsum(each) for group, each in seconds.items()}


def _update_bytes(job: TrainingJob, sizes: ModelSizes) -> int:
    """Return what the optimizer reads and writes: fp32 weights and moments both, gradients and weights once."""
    size = DTYPES[job.spec.train.precision].itemsize
    numbers = 8 * (sizes.trained + sizes.moments) + (4 + 2 * size) * sizes.trained
    return numbers if job.stage == 0 else -(-numbers // job.world_size)


def transfer(
    train: TrainConfig, model: ModelConfig, sizes: ModelSizes, zero: dict[str, Any], batch: BatchPlan
) -> UpdateTraffic:
    """Return what a rank sends in one update by rings: gradients and, with ZeRO, weights; `zero`: its options."""
    world_size = batch.world_size
    if world_size == 1:
        return UpdateTraffic(0, 0)
    size = DTYPES[train.precision].itemsize
    stage = zero.get("stage", 0)
    ring = (world_size - 1) / world_size
    reductions = 1 if stage < 2 else batch.backwards
    # A window whose segments are computed again has a second forward.
    gathers = 2 * batch.windows if batch.backwards == batch.windows else 3 * batch.backwards
    # Stage 0 reduces and shares gradients; 1 and 2 share the new weights; 3 gathers weights for forward and backward.
    gathered = {0: sizes.trained, 1: sizes.trained, 2: sizes.trained, 3: gathers * sizes.parameters}[stage]
    reduced = sizes.trained * (2 if stage == 1 else reductions)  # stage 1 all-reduces each bucket, as DeepSpeed does
    bucket = int(zero.get("reduce_bucket_size", BUCKET))
    num_gathers = gathers * model.num_layers if stage == 3 else math.ceil(gathered / bucket)
    # Muon gathers each matrix on one rank, in fp32, unless all have it (stage 0), and sends back the result.
    moves = 1 if stage == 0 else 2
    of_muon = moves * 4 * sum(rows * columns for rows, columns in sizes.matrices)
    num_bytes = int(ring * (size * (reduced + gathered) + of_muon))
    return UpdateTraffic(num_bytes, math.ceil(reduced / bucket) + num_gathers + moves * len(sizes.matrices))


class CheckpointCost(NamedTuple):
    """Bytes and seconds of one checkpoint."""

    num_bytes: int  # of the whole job
    stall: float  # seconds in which training waits for the copy to host memory
    seconds: float  # until all is written


def checkpoint_cost(train: TrainConfig, sizes: ModelSizes, *, world_size: int, disk_rate: float) -> CheckpointCost:
    """Predict a checkpoint.

    Args:
        disk_rate: bytes/s of all ranks together.
    """
    num_bytes = checkpoint_bytes(train, sizes, world_size=world_size)
    stall = num_bytes / world_size / _HOST_COPY
    return CheckpointCost(num_bytes, stall, stall + num_bytes / disk_rate)


def checkpoint_bytes(train: TrainConfig, sizes: ModelSizes, *, world_size: int) -> int:
    """Return the size of a checkpoint: fp32 weights, moments, memories, and frozen weights as they are."""
    frozen = DTYPES[train.precision].itemsize * (sizes.parameters - sizes.trained)
    lanes = sizes.lane_bytes * batch_plan(train, world_size).lanes_per_rank * world_size
    return 4 * (sizes.trained + sizes.moments) + frozen + lanes
