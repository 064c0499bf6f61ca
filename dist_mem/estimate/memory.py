"""Predict the memory that a rank needs, and refuse a job that cannot fit, before anything is allocated.

The model's own code is run on tensors without values (counting.py); DeepSpeed's buffers come from formulas (zero.py).
Libraries, the C or CUDA allocator's rest and fragmentation come on top. Shape letters: B lanes of a micro-batch, T
segment, M memory, D model, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dist_mem.block import model_spec
from dist_mem.config import Config, EvalConfig, as_tree, changed
from dist_mem.config.blocks import value_at
from dist_mem.data.batch_plan import batch_plan
from dist_mem.data.shard import Index
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import Counted, count_micro_batch
from dist_mem.estimate.zero import Sizes, shares, sizes_of, zero_block
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


class Part(NamedTuple):
    """Bytes that one rank needs at one time, and the keys that determine them."""

    what: str  # description of the part
    num_bytes: int
    values: dict[str, Any]  # key, or option of the command line -> value


def fits_without_counting(config: Config, vocab_size: int, world: World, *, num_lanes: int) -> bool:
    """Return whether a job fits by a wide bound from its sizes, which takes a tenth of the time of counting.

    Args:
        num_lanes: lanes whose memories a rank holds at one time.
    """
    train, model = config.train, config.model
    sizes = sizes_of(config, vocab_size, DTYPES["fp32"])
    held = shares(config, sizes, world_size=world.size, on_gpu=world.device.type == "cuda")
    d_head = model.d_head or model.d_model // model.num_heads
    # Every block projects the rows that its memory holds, and attends to them.
    num_rows = train.seg_len + sizes.lane_bytes / (4 * model.d_model * model.num_layers)
    vocabulary = describe(model_spec(config, vocab_size))["num_vocabulary_parameters"]
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


def training_parts(
    config: Config, vocab_size: int, *, world_size: int, on_gpu: bool, eval_lanes: int = 0
) -> list[Part]:
    """Return what a rank needs on its device for training, at the time when it needs most.

    Args:
        eval_lanes: lanes of the whole job that an evaluation during training reads at one time.
    """
    sizes = sizes_of(config, vocab_size, DTYPES[config.train.precision])
    freed = count_micro_batch(config, vocab_size, on_gpu=on_gpu)
    parts = update_parts(config, vocab_size, sizes, freed, world_size=world_size, on_gpu=on_gpu)
    scored = Part("memories of the evaluation's lanes", sizes.lane_bytes * (eval_lanes // world_size), {})
    weights, optimizer, states, *others = parts
    if scored.num_bytes > sum(part.num_bytes for part in others):  # they are not allocated at the same time
        scored = _with_keys(scored, config, "eval.batch_size", *_LENGTHS, *_WEIGHTS[:2])
        return [weights, optimizer, states._replace(num_bytes=states.num_bytes // 2), scored]
    return parts


def update_parts(
    config: Config, vocab_size: int, sizes: Sizes, freed: Counted, *, world_size: int, on_gpu: bool
) -> list[Part]:
    """Return the parts of an update; `freed` as in `counted_parts`, and counted with gradients too where they grow."""
    kept = None
    if gradients_grow(config, world_size):
        kept = count_micro_batch(config, vocab_size, on_gpu=on_gpu, keeps_gradients=True)
    return counted_parts(config, sizes, freed, kept, world_size=world_size, on_gpu=on_gpu)


def gradients_grow(config: Config, world_size: int) -> bool:
    """Return whether gradients are allocated while activations are freed: in updates of one micro-batch."""
    return batch_plan(config.train, world_size).accumulation == 1 and zero_block(config).get("stage", 0) < 3


def counted_parts(
    config: Config, sizes: Sizes, freed: Counted, kept: Counted | None, *, world_size: int, on_gpu: bool
) -> list[Part]:
    """Return the parts of `training_parts` from counts.

    Args:
        freed: of a micro-batch whose gradients are freed at once.
        kept: of one whose gradients stay, if `gradients_grow`; None: all gradients count at all times, a bound.
    """
    train, batch = config.train, batch_plan(config.train, world_size)
    held = shares(config, sizes, world_size=world_size, on_gpu=on_gpu)
    peak, before = freed.peak, held.gradients
    if kept is not None and gradients_grow(config, world_size):
        others = DTYPES[train.precision].itemsize * sizes.trained - held.gradients  # sent to other ranks, and freed
        peak, before = max(peak, kept.peak - others), 0
    new_states = sizes.lane_bytes * train.micro_batch_size  # of this micro-batch; they are counted with its activations
    lengths = (*_LENGTHS, *_WEIGHTS[:2])
    # At the end of an update, the memories from before it are still allocated.
    states = Part(
        "memories of the lanes",
        2 * sizes.lane_bytes * batch.lanes_per_rank,
        {"train.global_batch_size": train.global_batch_size},
    )
    parts = [
        _with_keys(Part("weights", held.weights, {}), config, *_WEIGHTS),
        _with_keys(Part("optimizer, with weights in fp32", held.optimizer, {}), config, *_WEIGHTS),
        _with_keys(states, config, *lengths),
    ]
    if held.gradients + held.update > before + held.buckets + peak - new_states:
        return [*parts, Part("gradients", held.gradients, {}), Part("fp32 gradients of the update", held.update, {})]
    activations = Part("activations of one micro-batch", freed.kept - new_states, {})
    work = Part("backward and logits of one micro-batch", peak - freed.kept, {})
    rows = ("train.micro_batch_size", "train.seg_len")
    return [
        *parts,
        Part("gradients", before, {}),
        Part("communication buckets", held.buckets, {}),
        _with_keys(activations, config, *rows, *_WEIGHTS[:3], "model.num_heads", *_LENGTHS),
        _with_keys(work, config, *rows),
    ]


def scoring_parts(config: Config, vocab_size: int, *, num_lanes: int, world_size: int = 1) -> list[Part]:
    """Return what a rank needs for an evaluation; `num_lanes`: lanes of the whole job that are read at one time."""
    held = num_lanes // world_size
    fixed = _fixed_parts(config, vocab_size, "memories of the lanes", held, {"eval.batch_size": config.eval.batch_size})
    reading = changed(config, {"train.micro_batch_size": max(1, min(config.train.micro_batch_size, held))})
    counted = count_micro_batch(reading, vocab_size, learns=False)
    forward = Part("one block and the logits of one micro-batch", counted.peak, {"vocabulary": vocab_size})
    return [*fixed, _with_keys(forward, config, "train.micro_batch_size", "train.seg_len", *_LENGTHS)]


def evaluated_lanes(eval_config: EvalConfig, index: Index) -> int:
    """Return the number of lanes of the whole job that an evaluation of a split reads at one time."""
    if eval_config.layout == "stream":
        return eval_config.batch_size
    return min(eval_config.batch_size, int((index.documents.num_tokens > 0).sum()))


def writing_parts(config: Config, vocab_size: int, *, num_samples: int) -> list[Part]:
    """Return what generation of `num_samples` texts at one time needs."""
    key = {"--samples": num_samples}
    fixed = _fixed_parts(config, vocab_size, "memories of the texts", num_samples, key)
    kept = num_samples * sizes_of(config, vocab_size, DTYPES[config.eval.precision]).open_bytes
    opened = _with_keys(Part("keys and values of open segments", kept, key), config, "train.seg_len", *_LENGTHS)
    columns = vocab_size if config.model.adaptive is None else int(config.model.adaptive.cutoffs[0])
    return [*fixed, opened, Part("logits of one token", 4 * num_samples * columns, {**key, "vocabulary": vocab_size})]


def _fixed_parts(config: Config, vocab_size: int, what: str, num_lanes: int, values: dict[str, Any]) -> list[Part]:
    """Return the weights, and the memories of all lanes."""
    dtype = DTYPES[config.eval.precision]
    sizes = sizes_of(config, vocab_size, dtype)
    lanes = Part(what, sizes.lane_bytes * num_lanes, values)
    weights = Part("weights", dtype.itemsize * sizes.parameters, {})
    return [_with_keys(weights, config, *_WEIGHTS), _with_keys(lanes, config, *_LENGTHS, *_WEIGHTS[:2])]


def _with_keys(part: Part, config: Config, *keys: str) -> Part:
    tree = as_tree(config)
    found = {key: value_at(tree, key) for key in keys}
    return part._replace(values={**part.values, **{key: value for key, value in found.items() if value is not None}})


def refuse_what_cannot_fit(
    parts: Sequence[Part], device: torch.device, *, gather: Callable[[Any], list[Any]] = lambda value: [value]
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


def _refusal(parts: Sequence[Part], needs: Sequence[int], limit: Limit) -> str:
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
