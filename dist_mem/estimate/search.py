"""Search settings that fit a device and are fast: ZeRO stage, activation checkpointing, lanes of a micro-batch.

None of these keys changes what is learnt: all may differ on resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dist_mem.block import num_recomputed
from dist_mem.config.schema import BY_SEGMENTS
from dist_mem.estimate.counting import Counts, MicroBatchCost, mix_costs
from dist_mem.estimate.memory import MemoryPart, counted_parts, parts_at_peak
from dist_mem.estimate.step_time import StepTime, step_time
from dist_mem.estimate.zero import ModelSizes, TrainingJob, sums_in_half
from dist_mem.runtime.devices import Device

_STAGE, _CHECKPOINTING, _SHARE, _LANES = (
    "deepspeed.zero_optimization.stage",
    "train.activation_checkpointing",
    "train.activation_checkpointing_share",
    "train.micro_batch_size",
)
# What is checkpointed, in which share of the blocks; of windows of several segments also these.
_CHOICES = (("none", 1.0), ("feed_forward", 1.0), ("attention", 1.0), ("blocks", 0.5), ("blocks", 1.0))
_OF_WINDOWS = (("segments", 1.0), ("segments_and_blocks", 1.0))
_SIMILAR = 1.03  # update times in this ratio count as equal; then fewer changes are better
_FRAGMENTS = 0.05  # share of a GPU's memory that its allocator cannot use
_LIBRARIES = 3 * 2**29  # bytes of the CUDA context, cuBLAS and NCCL


class Cluster(NamedTuple):
    """The machines of a job."""

    device: Device
    world_size: int
    gpus_per_node: int

    @property
    def capacity(self) -> int:
        """Bytes that tensors of one rank can take."""
        if self.device.name == "cpu":
            return self.device.memory // min(self.world_size, self.gpus_per_node)
        return int((1 - _FRAGMENTS) * self.device.memory) - _LIBRARIES


class Candidate(NamedTuple):
    """One choice of settings."""

    settings: dict[str, Any]  # key -> value
    changes: dict[str, Any]  # those that differ from the configuration
    parts: list[MemoryPart]
    time: StepTime

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def candidates(
    job: TrainingJob, sizes: ModelSizes, cluster: Cluster, scored: MemoryPart, report: Callable[[str], None]
) -> list[Candidate]:
    """Return every combination of stage, checkpointing and lanes, with bounds of `counted_parts`.

    Those that a start refuses, and those that lose the fp32 sums of gradients, are left out.

    Args:
        scored: memories of an evaluation during training.
        report: is called with what is counted next.
    """
    found = []
    train, num_layers = job.spec.train, job.spec.model.num_layers
    own = (train.activation_checkpointing, train.activation_checkpointing_share)
    choices = [*_CHOICES, *(_OF_WINDOWS if train.bptt_segments > 1 else ())]
    choices += [own] if own[0] != "none" and own not in choices else []
    counts = {}
    for recomputed in dict.fromkeys(recomputed for recomputed, _ in choices):
        report(f"{_CHECKPOINTING}={recomputed}")
        changed = _with_settings(job, {_CHECKPOINTING: recomputed, _SHARE: 1.0})
        counts[recomputed] = Counts(changed.spec, on_gpu=job.on_gpu)
    for lanes in _lanes_to_try(job):
        counted = {recomputed: count.at(lanes) for recomputed, count in counts.items()}
        for recomputed, share in choices:
            part = num_recomputed(num_layers, share) / num_layers
            base = counted["segments" if recomputed in BY_SEGMENTS else "none"]
            count = counted[recomputed] if part == 1.0 else mix_costs(base, counted[recomputed], part)
            settings = {_CHECKPOINTING: recomputed, _SHARE: own[1] if recomputed == "none" else share, _LANES: lanes}
            for stage in range(4):
                other = {_STAGE: stage, **settings}
                if _is_as_exact(_with_settings(job, other), job, sizes):
                    found.append(_candidate(job, other, sizes, count, cluster, scored))
    return found


def _is_as_exact(other: TrainingJob, job: TrainingJob, sizes: ModelSizes) -> bool:
    """Return whether a job can start, and adds up gradients in fp32 if the present one does."""
    precision = other.spec.train.precision
    if other.stage == 0 and precision == "fp16":
        return False
    sums = (other.deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    if other.stage == 1 and precision == "bf16" and sums == "fp32":  # an optimizer of DeepSpeed that is not saved here
        return False
    return sums_in_half(job, sizes) or not sums_in_half(other, sizes)


def _candidate(
    job: TrainingJob,
    settings: dict[str, Any],
    sizes: ModelSizes,
    counted: MicroBatchCost,
    cluster: Cluster,
    scored: MemoryPart,
) -> Candidate:
    other, train = _with_settings(job, settings), job.spec.train
    parts = parts_at_peak(counted_parts(other, sizes, counted, None), scored)
    time = step_time(other, sizes, counted, cluster.device, gpus_per_node=cluster.gpus_per_node)
    before = {
        _STAGE: job.stage,
        _CHECKPOINTING: train.activation_checkpointing,
        _SHARE: train.activation_checkpointing_share,
        _LANES: train.micro_batch_size,
    }
    changes = {key: value for key, value in settings.items() if value != before[key]}
    return Candidate(settings, changes, parts, time)


def _with_settings(job: TrainingJob, settings: dict[str, Any]) -> TrainingJob:
    zero, of_train = job.deepspeed.get("zero_optimization") or {}, dict(settings)
    if _STAGE in settings:
        zero = {**zero, "stage": of_train.pop(_STAGE)}
    train = replace(job.spec.train, **{key.removeprefix("train."): value for key, value in of_train.items()})
    block = {**job.deepspeed, "zero_optimization": zero}
    return job._replace(spec=job.spec._replace(train=train), deepspeed=block)


def _lanes_to_try(job: TrainingJob) -> list[int]:
    """Return powers of two, and all lanes of a rank, without settings that make more lanes idle than today's."""
    train, world_size = job.spec.train, job.world_size
    most = -(-train.global_batch_size // world_size)
    powers = {2**power for power in range(most.bit_length()) if 2**power <= most}
    today = job.batch.idle_lanes
    tried = {*powers, most, train.micro_batch_size}
    return sorted(
        lanes
        for lanes in tried
        if lanes == train.micro_batch_size or _with_settings(job, {_LANES: lanes}).batch.idle_lanes <= today
    )


def best(found: list[Candidate], cluster: Cluster) -> Candidate | None:
    """Return the candidate that fits and is as fast as any, with the fewest changes; None if none fits."""
    fitting = [candidate for candidate in found if candidate.num_bytes <= cluster.capacity]
    fastest = min((candidate.time.total for candidate in fitting), default=0.0)
    return nearest([candidate for candidate in fitting if candidate.time.total <= _SIMILAR * fastest], cluster)


def nearest(found: list[Candidate], cluster: Cluster) -> Candidate | None:
    """Return the candidate that fits with the fewest changes, of those the fastest; None if none fits."""
    fitting = [candidate for candidate in found if candidate.num_bytes <= cluster.capacity]
    return min(fitting, key=lambda candidate: (len(candidate.changes), candidate.time.total), default=None)
