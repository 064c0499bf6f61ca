"""Predict the memory that a rank needs, and refuse a job that cannot fit, before anything is allocated.

The model's own code is run on tensors without values (counting.py); DeepSpeed's buffers come from formulas (zero.py).
Libraries, the C or CUDA allocator's rest and fragmentation come on top. Shape letters: B lanes of a micro-batch, T
segment, M memory, D model, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dist_mem.block import ModelSpec
from dist_mem.config import EvalConfig, as_tree
from dist_mem.config.blocks import value_at
from dist_mem.data.shard import Index
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import MicroBatchCost, count_micro_batch, with_micro_lanes
from dist_mem.estimate.zero import ModelSizes, TrainingJob, shares, sizes_of
from dist_mem.model import describe
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.distributed import World
from dist_mem.runtime.machine_memory import Limit, memory_limits

_CERTAIN = 0.9  # the prediction is within 10 %; a job is refused only if it surely cannot fit
# Of the activations of a training in fp32, per token: for each weight that meets it, times the width of a head, and for
# each score of each head, and for each logit. Shipped configurations take less.
_BYTES_PER_WEIGHT, _BYTES_PER_SCORE, _BYTES_PER_LOGIT = 8.0, 24.0, 12.0
_SHOWN = 0.1  # share of the total; smaller parts are not listed
_WEIGHTS = ("model.num_layers", "model.d_model", "model.d_inner", "model.d_embed")
_LENGTHS = ("memory.mem_len", "memory.cmem_len", "memory.num_basis", "memory.over.mem_len", "memory.over.cmem_len")


class MemoryPart(NamedTuple):
    """Bytes that one rank needs at one time, and the keys that determine them."""

    what: str  # description of the part
    num_bytes: int
    values: dict[str, Any]  # key, or option of the command line -> value


def fits_without_counting(job: TrainingJob, world: World, *, num_lanes: int) -> bool:
    """Return whether a job fits by a wide bound from its sizes, which takes a tenth of the time of counting.

    Args:
        num_lanes: lanes whose memories a rank holds at one time.
    """
    model, train, vocab_size = job.spec.model, job.spec.train, job.spec.vocab_size
    sizes = sizes_of(job.spec, DTYPES["fp32"], job.optimizer)
    held = shares(job, sizes)
    d_head = model.d_head or model.d_model // model.num_heads
    # Every block projects the rows that its memory holds, and attends to them.
    num_rows = train.seg_len + sizes.lane_bytes / (4 * model.d_model * model.num_layers)
    vocabulary = describe(job.spec)["num_vocabulary_parameters"]
    weights = vocabulary * train.seg_len + (sizes.parameters - vocabulary) * num_rows
    scores = model.num_layers * model.num_heads * num_rows * train.seg_len
    logits = _BYTES_PER_LOGIT * vocab_size * train.seg_len
    of_lane = _BYTES_PER_WEIGHT / d_head * weights + _BYTES_PER_SCORE * scores + logits
    work = of_lane * train.micro_batch_size * train.bptt_segments
    fixed = (
        held.weights + held.optimizer + held.gradients + held.buckets + held.update + 8 * vocabulary
    )  # gradients twice
    bound = world.local_size * (fixed + sizes.lane_bytes * num_lanes + work)
    return all(bound <= limit.num_bytes for limit in memory_limits(world.device))


def training_parts(job: TrainingJob, eval_config: EvalConfig, *, eval_lanes: int = 0) -> list[MemoryPart]:
    """Return what a rank needs on its device for training, at the time when it needs most.

    Args:
        eval_lanes: lanes of the whole job that an evaluation during training reads at one time.
    """
    sizes = sizes_of(job.spec, DTYPES[job.spec.train.precision], job.optimizer)
    parts = update_parts(job, sizes, count_micro_batch(job.spec, on_gpu=job.on_gpu))
    return parts_at_peak(parts, evaluated_memories(job, sizes, eval_config, eval_lanes=eval_lanes))


def evaluated_memories(job: TrainingJob, sizes: ModelSizes, eval_config: EvalConfig, *, eval_lanes: int) -> MemoryPart:
    """Return the memories of an evaluation during training; `eval_lanes` as in `training_parts`."""
    num_bytes, values = sizes.lane_bytes * -(-eval_lanes // job.world_size), {"eval.batch_size": eval_config.batch_size}
    part = MemoryPart("memories of the evaluation's lanes", num_bytes, values)
    return _with_keys(part, job.spec, *_LENGTHS, *_WEIGHTS[:2])


def parts_at_peak(parts: list[MemoryPart], scored: MemoryPart) -> list[MemoryPart]:
    """Return the parts of an update, or those of an evaluation during training if it needs more.

    Args:
        scored: from `evaluated_memories`.
    """
    weights, optimizer, states, *others = parts
    if scored.num_bytes > sum(part.num_bytes for part in others):  # they are not allocated at the same time
        return [weights, optimizer, states._replace(num_bytes=states.num_bytes // 2), scored]
    return parts


def update_parts(job: TrainingJob, sizes: ModelSizes, freed: MicroBatchCost) -> list[MemoryPart]:
    """Return the parts of an update; `freed` as in `counted_parts`, and counted with gradients too where they grow."""
    kept = count_micro_batch(job.spec, on_gpu=job.on_gpu, keeps_gradients=True) if gradients_grow(job) else None
    return counted_parts(job, sizes, freed, kept)


def gradients_grow(job: TrainingJob) -> bool:
    """Return whether gradients are allocated while activations are freed: in updates of one micro-batch."""
    return job.batch.backwards == 1 and job.stage < 3


def counted_parts(
    job: TrainingJob, sizes: ModelSizes, freed: MicroBatchCost, kept: MicroBatchCost | None
) -> list[MemoryPart]:
    """Return the parts of `training_parts` from counts.

    Args:
        freed: of a micro-batch whose gradients are freed at once.
        kept: of one whose gradients stay, if `gradients_grow`; None: all gradients count at all times, a bound.
    """
    spec, train, held = job.spec, job.spec.train, shares(job, sizes)
    peak, before = freed.peak, held.gradients
    if kept is not None and gradients_grow(job):
        others = DTYPES[train.precision].itemsize * sizes.trained - held.gradients  # sent to other ranks, and freed
        peak, before = max(peak, kept.peak - others), 0
    new_states = sizes.lane_bytes * train.micro_batch_size  # of this micro-batch; they are counted with its activations
    lengths = (*_LENGTHS, *_WEIGHTS[:2])
    # At the end of an update, the memories from before it are still allocated.
    states = MemoryPart(
        "memories of the lanes",
        2 * sizes.lane_bytes * job.batch.lanes_per_rank,
        {"train.global_batch_size": train.global_batch_size},
    )
    parts = [
        _with_keys(MemoryPart("weights", held.weights, {}), spec, *_WEIGHTS),
        _with_keys(MemoryPart("optimizer, with weights in fp32", held.optimizer, {}), spec, *_WEIGHTS),
        _with_keys(states, spec, *lengths),
    ]
    if held.gradients + held.update > before + held.buckets + peak - new_states:
        return [
            *parts,
            MemoryPart("gradients", held.gradients, {}),
            MemoryPart("fp32 gradients of the update", held.update, {}),
        ]
    activations = MemoryPart("activations of one micro-batch", freed.kept - new_states, {})
    work = MemoryPart("backward and logits of one micro-batch", peak - freed.kept, {})
    rows = ("train.micro_batch_size", "train.seg_len")
    return [
        *parts,
        MemoryPart("gradients", before, {}),
        MemoryPart("communication buckets", held.buckets, {}),
        _with_keys(activations, spec, *rows, *_WEIGHTS[:3], "model.num_heads", *_LENGTHS),
        _with_keys(work, spec, *rows),
    ]


def scoring_parts(
    spec: ModelSpec, eval_config: EvalConfig, *, num_lanes: int, on_gpu: bool, world_size: int = 1
) -> list[MemoryPart]:
    """Return what a rank needs for an evaluation; `num_lanes`: lanes of the whole job that are read at one time."""
    held, precision = -(-num_lanes // world_size), eval_config.precision
    sizes = sizes_of(spec, DTYPES[precision])
    lanes = MemoryPart("memories of the lanes", sizes.lane_bytes * held, {"eval.batch_size": eval_config.batch_size})
    reading = with_micro_lanes(spec, max(1, min(spec.train.micro_batch_size, held)))
    counted = count_micro_batch(reading, on_gpu=on_gpu, forward_in=precision)
    forward = MemoryPart("one block and the logits of one micro-batch", counted.peak, {"vocabulary": spec.vocab_size})
    return [
        *_fixed_parts(spec, sizes, precision, lanes),
        _with_keys(forward, spec, "train.micro_batch_size", "train.seg_len", *_LENGTHS),
    ]


def evaluated_lanes(eval_config: EvalConfig, index: Index) -> int:
    """Return the number of lanes of the whole job that an evaluation of a split reads at one time."""
    if eval_config.layout == "stream":
        return eval_config.batch_size
    return min(eval_config.batch_size, int((index.documents.num_tokens > 0).sum()))


def writing_parts(spec: ModelSpec, precision: str, *, num_samples: int) -> list[MemoryPart]:
    """Return what generation of `num_samples` texts at one time needs."""
    sizes, key = sizes_of(spec, DTYPES[precision]), {"--samples": num_samples}
    lanes = MemoryPart("memories of the texts", num_samples * sizes.lane_bytes, key)
    opened = MemoryPart("keys and values of open segments", num_samples * sizes.open_bytes, key)
    columns = spec.vocab_size if spec.model.adaptive is None else int(spec.model.adaptive.cutoffs[0])
    logits = MemoryPart("logits of one token", 4 * num_samples * columns, {**key, "vocabulary": spec.vocab_size})
    fixed = _fixed_parts(spec, sizes, precision, lanes)
    return [*fixed, _with_keys(opened, spec, "train.seg_len", *_LENGTHS), logits]


def _fixed_parts(spec: ModelSpec, sizes: ModelSizes, precision: str, lanes: MemoryPart) -> list[MemoryPart]:
    """Return the weights, and the memories of all lanes."""
    weights = MemoryPart("weights", DTYPES[precision].itemsize * sizes.parameters, {})
    return [_with_keys(weights, spec, *_WEIGHTS), _with_keys(lanes, spec, *_LENGTHS, *_WEIGHTS[:2])]


def _with_keys(part: MemoryPart, spec: ModelSpec, *keys: str) -> MemoryPart:
    tree = {"model": as_tree(spec.model), "memory": spec.memory, "train": as_tree(spec.train)}
    found = {key: value_at(tree, key) for key in keys}
    return part._replace(values={**part.values, **{key: value for key, value in found.items() if value is not None}})


def refuse_what_cannot_fit(
    parts: Sequence[MemoryPart], device: torch.device, *, gather: Callable[[Any], list[Any]] = lambda value: [value]
) -> None:
    """Refuse the job if the ranks that share a memory limit together need more than it.

    Args:
        parts: what this rank needs.
        gather: returns every rank's value on every rank; if given, every rank must call this function.

    Raises:
        UnusableError: on every rank; a limit is exceeded.
    """
    gathered = gather((sum(part.num_bytes for part in parts), memory_limits(device)))
    needs: dict[str, list[int]] = {}
    limits: dict[str, Limit] = {}
    for num_bytes, rank_limits in gathered:
        for limit in rank_limits:
            needs.setdefault(limit.name, []).append(num_bytes)
            limits[limit.name] = limit
    for name, limit in limits.items():
        if _CERTAIN * sum(needs[name]) > limit.num_bytes:
            raise UnusableError(_refusal(parts, needs[name], limit))


def _refusal(parts: Sequence[MemoryPart], needs: Sequence[int], limit: Limit) -> str:
    """Return the message: what is needed, what is available, and the largest parts with their keys."""
    ranks = "" if len(needs) == 1 else f" for {len(needs)} ranks"
    first = f"this needs about {size(sum(needs))}{ranks}, but {limit.text} has {size(limit.num_bytes)}:"
    total, lines = sum(part.num_bytes for part in parts), []
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.num_bytes > _SHOWN * total:
            values = ", ".join(f"{key} = {value}" for key, value in part.values.items())
            lines.append(f"  {size(part.num_bytes)} per rank: {part.what} ({values})")
    return "\n".join([first, *lines])


def size(num_bytes: int) -> str:
    """Format a number of bytes in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
