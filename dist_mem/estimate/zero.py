"""How DeepSpeed divides weights, gradients and optimizer state among the ranks, in bytes of one rank.

The formulas follow DeepSpeed 0.19.8: its buffers are its own code, which cannot be run without processes. The tests
compare them with trainings. Letters: s bytes of a number in `train.precision`, W ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dist_mem.block import ModelSpec, model_spec
from dist_mem.config import Config, OptimizerConfig, deepspeed_block
from dist_mem.data.batch_plan import BatchPlan, batch_plan
from dist_mem.engine.defaults import deepspeed_config
from dist_mem.engine.muon import MUON, muon_settings, orthogonal_bytes
from dist_mem.engine.optimizer import num_moments, parameter_groups
from dist_mem.memory.base import named_tensors
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES

# DeepSpeed's defaults, in numbers; one bucket is allocated whole, however small the model.
BUCKET, _LIVE, _PREFETCH = 500_000_000, 1_000_000_000, 50_000_000


class TrainingJob(NamedTuple):
    """A training on a number of ranks, as far as its memory and its time depend on it."""

    spec: ModelSpec
    optimizer: OptimizerConfig
    deepspeed: dict[str, Any]  # the block as given
    world_size: int
    on_gpu: bool

    @property
    def batch(self) -> BatchPlan:
        """The division of an update among ranks and micro-batches."""
        return batch_plan(self.spec.train, self.world_size)

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 without it."""
        return int((self.deepspeed.get("zero_optimization") or {}).get("stage", 0))


def job_of(config: Config, vocab_size: int, *, world_size: int, on_gpu: bool) -> TrainingJob:
    """Return the training of a configuration on so many ranks."""
    return TrainingJob(
        model_spec(config, vocab_size), config.optimizer, deepspeed_block(config), world_size, on_gpu=on_gpu
    )


class ModelSizes(NamedTuple):
    """Sizes of a model as it would be built."""

    parameters: int  # number of values
    trained: int  # number of values that the optimizer updates
    largest_group: int  # number of values of the largest parameter group, which is updated in one piece
    moments: int  # number of values that the optimizer keeps of all trained ones
    matrices: tuple[tuple[int, int], ...]  # shapes of those that Muon orthogonalises
    lane_bytes: int  # bytes of the memories of one lane
    open_bytes: int  # bytes of what generation keeps of the open segment of one lane


class Shares(NamedTuple):
    """Bytes on one rank."""

    weights: int  # in `train.precision`, with those that stage 3 has gathered
    optimizer: int  # fp32 weights and moments
    gradients: int  # at the end of a backward
    buckets: int  # of communication, during a backward
    update: int  # allocated only while the optimizer updates, when activations and buckets are free


def sizes_of(spec: ModelSpec, dtype: torch.dtype, optimizer: OptimizerConfig | None = None) -> ModelSizes:
    """Return the sizes of a model without allocating it; `optimizer`: with these parameter groups."""
    with torch.device("meta"):
        model = MemoryLM(spec)
        first = torch.zeros(1, dtype=torch.int64)
        state = model.init_state(first, "meta", dtype)
        opened = model.open(state, first).blocks if model.can_step else ()
    optimizer = optimizer or OptimizerConfig()
    groups = parameter_groups(model, optimizer)
    numbers = [sum(parameter.numel() for parameter in group["params"]) for group in groups]
    moments = sum(num * num_moments(optimizer, group) for num, group in zip(numbers, groups, strict=True))
    of_muon = [parameter for group in groups if group.get("rule") == MUON for parameter in group["params"]]
    matrices = tuple((parameter.shape[0], parameter.shape[1]) for parameter in of_muon)
    lane_bytes, open_bytes = (
        sum(part.numel() * part.element_size() for part in named_tensors(parts).values())
        for parts in (state, tuple(block.lanes for block in opened))
    )
    num_values = sum(parameter.numel() for parameter in model.parameters())
    return ModelSizes(num_values, sum(numbers), max(numbers), moments, matrices, lane_bytes, open_bytes)


def effective_block(job: TrainingJob, sizes: ModelSizes) -> dict[str, Any]:
    """Return the whole `deepspeed:` block with the defaults of dist_mem, as the engine gets it."""
    return deepspeed_config(
        job.deepspeed,
        job.spec.train,
        world_size=job.world_size,
        accumulation=job.batch.backwards,
        num_parameters=sizes.trained,
        on_gpu=job.on_gpu,
    )


def sums_in_half(job: TrainingJob, sizes: ModelSizes) -> bool:
    """Return whether gradients of several backwards are added up in the 16 bits of `train.precision`."""
    if job.spec.train.precision == "fp32" or job.batch.backwards == 1:
        return False
    return not _sums_in_fp32(effective_block(job, sizes))


def _sums_in_fp32(block: dict[str, Any]) -> bool:
    """Return whether a whole block keeps gradients in fp32; stages 0 and 1 cannot."""
    stage = (block.get("zero_optimization") or {}).get("stage", 0)
    return stage >= 2 and (block.get("data_types") or {}).get("grad_accum_dtype") == "fp32"


def overlaps(zero: dict[str, Any]) -> bool:
    """Return whether DeepSpeed communicates while it computes; by default only stage 3 does."""
    return bool(zero.get("overlap_comm", zero.get("stage", 0) == 3))


def shares(job: TrainingJob, sizes: ModelSizes) -> Shares:
    """Return what a rank holds."""
    world_size, on_gpu = job.world_size, job.on_gpu
    block = effective_block(job, sizes)
    zero = block.get("zero_optimization") or {}
    stage, size = zero.get("stage", 0), DTYPES[job.spec.train.precision].itemsize
    share = sizes.trained if stage == 0 else -(-sizes.trained // world_size)
    masters = 4 * share if stage > 0 or size < 4 else 0
    optimizer = masters + 4 * (sizes.moments if stage == 0 else -(-sizes.moments // world_size))
    gradients = (4 if _sums_in_fp32(block) else size) * (sizes.trained if stage < 2 else share)
    weights = size * sizes.parameters
    if stage == 3:
        # Weights that will be used again soon stay whole, beside the bucket in which the next ones arrive.
        live = min(sizes.parameters, zero.get("stage3_max_live_parameters", _LIVE))
        live += min(sizes.parameters, zero.get("stage3_prefetch_bucket_size", _PREFETCH))
        offloads = on_gpu and _offloads(zero, "offload_param")  # DeepSpeed reads it at this stage only
        weights = size * (live + (0 if offloads else -(-sizes.parameters // world_size)))
    muon = muon_settings(job.optimizer)
    of_muon = orthogonal_bytes(sizes.matrices, muon.precision) if muon else 0
    if on_gpu and stage > 0 and _offloads(zero, "offload_optimizer"):
        optimizer, update = 0, of_muon
    else:
        update = _update_work(stage, size, sizes, world_size, of_muon=of_muon)
        if not on_gpu and stage in (1, 2) and job.optimizer.kind in ("adam", "adamw", MUON):
            # Adam's separate operations: the gradient in fp32, and two arrays of its size at one time.
            update = max(update, 3 * 4 * _group_share(sizes, world_size))
    return Shares(weights, optimizer, gradients, _buckets(zero, size, None if on_gpu else sizes.trained), update)


def _buckets(zero: dict[str, Any], size: int, most_filled: int | None) -> int:
    """Return the bytes of the buckets; of numbers beyond `most_filled` a CPU never touches the pages."""
    stage = zero.get("stage", 0)
    if stage == 0 or not zero.get("contiguous_gradients", True):
        return 0
    copies = 2 if overlaps(zero) and stage < 3 else 1
    numbers = int(zero.get("reduce_bucket_size", BUCKET))
    return copies * size * (numbers if most_filled is None else min(numbers, most_filled))


def _group_share(sizes: ModelSizes, world_size: int) -> int:
    """Return how many numbers of the largest parameter group a rank updates."""
    return -(-sizes.largest_group // world_size)


def _update_work(stage: int, size: int, sizes: ModelSizes, world_size: int, *, of_muon: int) -> int:
    """Return the bytes of one parameter group's gradients as the optimizer takes them: one piece, in fp32.

    Args:
        of_muon: bytes of matrices that Muon works on, before the new weights are copied to 16 bits.
    """
    if stage == 0:
        return of_muon if size == 4 else 4 * sizes.trained + max(size * sizes.trained, of_muon)
    group = _group_share(sizes, world_size)
    return 4 * group + max(size * group if size < 4 else 0, of_muon)


def _offloads(zero: dict[str, Any], key: str) -> bool:
    return (zero.get(key) or {}).get("device", "none") != "none"
