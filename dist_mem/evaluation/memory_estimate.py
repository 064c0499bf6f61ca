"""Estimate whether a job fits into the memory of its machines, before anything is allocated.

The estimate is a lower bound of what is allocated at one time: weights, gradients and optimizer state, memories of all
lanes, and the easily counted parts of one forward, such as attention and logits. Libraries, buffers and fragmentation
come on top: a refused job could not have run, and a job that is not refused may still not fit. Shape letters: B lanes
of a micro-batch, T segment, M memory, D model, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from omegaconf import DictConfig, OmegaConf

from dist_mem.config import Config, deepspeed_block
from dist_mem.data.batch_plan import batch_plan
from dist_mem.data.shard import Index
from dist_mem.engine.optimizer import num_moments, parameter_groups
from dist_mem.errors import UnusableError
from dist_mem.evaluation.protocol import short_term_len
from dist_mem.memory import memory_kinds
from dist_mem.memory.base import named_tensors
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.machine_memory import Limit, memory_limits

_SHOWN = 0.1  # share of the total; smaller parts are not listed
_WEIGHTS = ("model.num_layers", "model.d_model", "model.d_inner", "model.d_embed")
_LENGTHS = ("memory.mem_len", "memory.cmem_len", "memory.num_basis", "memory.over.mem_len", "memory.over.cmem_len")


class Part(NamedTuple):
    """Bytes that one rank needs at one time, and the keys that determine them."""

    what: str  # description of the part
    num_bytes: int
    values: dict[str, Any]  # key, or option of the command line -> value


class Sizes(NamedTuple):
    """Sizes of a model as it would be built."""

    parameters: int  # number of values
    trained: int  # number of values that the optimizer updates
    lane_bytes: int  # bytes of the memories of one lane


def sizes_of(config: Config, vocab_size: int, dtype: torch.dtype) -> Sizes:
    """Return the sizes of a model without allocating it."""
    with torch.device("meta"):
        model = MemoryLM(config, vocab_size)
        state = model.init_state(torch.zeros(1, dtype=torch.int64), "meta", dtype)
    groups = parameter_groups(model, config.optimizer)
    trained = sum(parameter.numel() for group in groups for parameter in group["params"])
    lane_bytes = sum(part.numel() * part.element_size() for part in named_tensors(state).values())
    return Sizes(sum(parameter.numel() for parameter in model.parameters()), trained, lane_bytes)


def training_parts(
    config: Config, vocab_size: int, *, world_size: int, on_gpu: bool, eval_lanes: int = 0
) -> list[Part]:
    """Return what a rank needs on its device for training.

    Args:
        eval_lanes: lanes of the whole job that an evaluation during training reads at one time.
    """
    train, dtype = config.train, DTYPES[config.train.precision]
    sizes, batch = sizes_of(config, vocab_size, dtype), batch_plan(config.train, world_size)
    # At the end of an update, the memories from before it are still allocated.
    lanes = Part("memories of the lanes", 2 * sizes.lane_bytes * batch.lanes_per_rank, {"train.lanes": train.lanes})
    lanes = _with_keys(lanes, config, *_LENGTHS, *_WEIGHTS[:2])
    forward, logits = forward_parts(config, vocab_size, num_lanes=train.micro_lanes, num_rows=train.seg_len)
    num_bytes = _fixed_bytes(config, sizes, world_size, on_gpu)
    if batch.accumulation == 1:  # gradients are allocated as activations are freed
        gradients = DTYPES[train.precision].itemsize * sizes.trained
        num_bytes = max(0, num_bytes - min(gradients, forward.num_bytes + logits.num_bytes))
    fixed = _with_keys(Part("weights, gradients and optimizer", num_bytes, {}), config, *_WEIGHTS)
    scored = Part("memories of the evaluation's lanes", sizes.lane_bytes * (eval_lanes // world_size), {})
    if scored.num_bytes > forward.num_bytes + logits.num_bytes:  # they are not allocated at the same time
        scored = _with_keys(scored, config, "eval.lanes", *_LENGTHS, *_WEIGHTS[:2])
        return [fixed, lanes._replace(num_bytes=lanes.num_bytes // 2), scored]
    return [fixed, lanes, forward, logits]


def scoring_parts(config: Config, vocab_size: int, *, num_lanes: int, world_size: int = 1) -> list[Part]:
    """Return what a rank needs for an evaluation; `num_lanes`: lanes of the whole job that are read at one time."""
    held = num_lanes // world_size
    fixed = _fixed_parts(config, vocab_size, "memories of the lanes", held, {"eval.lanes": config.eval.lanes})
    together = min(config.train.micro_lanes, held)
    rows = config.train.seg_len
    return [*fixed, *forward_parts(config, vocab_size, num_lanes=together, num_rows=rows, learns=False)]


def evaluated_lanes(config: Config, index: Index) -> int:
    """Return the number of lanes of the whole job that an evaluation of a split reads at one time."""
    if config.eval.layout == "stream":
        return config.eval.lanes
    return min(config.eval.lanes, sum(entry.num_tokens > 0 for entry in index.documents))


def writing_parts(config: Config, vocab_size: int, *, num_samples: int) -> list[Part]:
    """Return what generation of `num_samples` texts at one time needs."""
    key = {"--samples": num_samples}
    fixed = _fixed_parts(config, vocab_size, "memories of the texts", num_samples, key)
    parts = forward_parts(config, vocab_size, num_lanes=num_samples, num_rows=1, learns=False)
    return [*fixed, *(part._replace(values=key) for part in parts)]


def _fixed_parts(config: Config, vocab_size: int, what: str, num_lanes: int, values: dict[str, Any]) -> list[Part]:
    """Return the weights, and the memories of all lanes."""
    dtype = DTYPES[config.eval.precision]
    sizes = sizes_of(config, vocab_size, dtype)
    lanes = Part(what, sizes.lane_bytes * num_lanes, values)
    weights = Part("weights", dtype.itemsize * sizes.parameters, {})
    return [_with_keys(weights, config, *_WEIGHTS), _with_keys(lanes, config, *_LENGTHS, *_WEIGHTS[:2])]


def forward_parts(config: Config, vocab_size: int, *, num_lanes: int, num_rows: int, learns: bool = True) -> list[Part]:
    """Return what one forward needs: the activations that its blocks keep for the backward, and the logits.

    Without training (`learns` False), activations are those of one block at a time.
    """
    model, train = config.model, config.train
    size = DTYPES[train.precision if learns else config.eval.precision].itemsize
    kept = size * model.d_model  # bytes of a row, with activation checkpointing
    whole = size * (2 * model.d_model + model.d_inner)
    if config.memory["kind"] in memory_kinds():
        # Attention probabilities; an external memory may attend in another way.
        whole += 4 * model.num_heads * (num_rows + short_term_len(config.memory))
    blocks = model.num_layers * whole if learns else whole
    if learns and train.activation_checkpointing:
        blocks = (model.num_layers - 1) * kept + whole
    columns = vocab_size if model.adaptive is None else int(model.adaptive.cutoffs[0])
    rows = num_lanes * num_rows
    forward = Part("activations of one micro-batch", rows * blocks, {})
    # In training, both the probabilities and their gradient are allocated.
    logits = Part("logits of one micro-batch", (8 if learns else 4) * rows * columns, {"vocabulary": vocab_size})
    keys = ("train.micro_lanes", "train.seg_len")
    return [
        _with_keys(forward, config, *keys, *_WEIGHTS[:3], "model.num_heads", *_LENGTHS),
        _with_keys(logits, config, *keys),
    ]


def _fixed_bytes(config: Config, sizes: Sizes, world_size: int, on_gpu: bool) -> int:
    """Return the bytes of weights, gradients, fp32 masters and moments, as DeepSpeed divides them among the ranks."""
    zero = deepspeed_block(config).get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    size = DTYPES[config.train.precision].itemsize
    share = sizes.trained if stage == 0 else sizes.trained // world_size
    weights = size * (sizes.parameters if stage < 3 else sizes.parameters // world_size)
    masters = 4 * share if stage > 0 or size < 4 else 0
    updated = masters + 4 * num_moments(config.optimizer) * share + size * share
    if on_gpu and (zero.get("offload_param") or {}).get("device", "none") != "none":
        weights = 0
    if on_gpu and (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        updated = 0
    return weights + updated


def _with_keys(part: Part, config: Config, *keys: str) -> Part:
    found = {key: OmegaConf.select(cast(DictConfig, config), key) for key in keys}
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
        if sum(needs[name]) > limit.num_bytes:
            raise UnusableError(_refusal(parts, needs[name], limit))


def _refusal(parts: Sequence[Part], needs: Sequence[int], limit: Limit) -> str:
    """Return the message: what is needed, what is available, and the largest parts with their keys."""
    ranks = "" if len(needs) == 1 else f" for {len(needs)} ranks"
    first = f"this needs at least {gibibytes(sum(needs))}{ranks}, but {limit.text} has {gibibytes(limit.num_bytes)}:"
    total, lines = sum(part.num_bytes for part in parts), []
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.num_bytes > _SHOWN * total:
            values = ", ".join(f"{key} = {value}" for key, value in part.values.items())
            lines.append(f"  {gibibytes(part.num_bytes)} a rank: {part.what} ({values})")
    return "\n".join([first, *lines])


def gibibytes(num_bytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB"
