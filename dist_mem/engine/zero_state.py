"""DeepSpeed's training state as slices of named parameters; the only module that knows its layout.

Every ZeRO stage passes torch's optimizer flat tensors of fp32 master weights. Without ZeRO a tensor is one
parameter. At stages 1 and 2 it is this rank's part of a whole parameter group, with padding between and after the
parameters. At stage 3 it is a sub-group: this rank's parts of its parameters one after another, each padded on the last
rank. A name and a range in the flattened parameter mean the same at every stage and on any number of ranks; padding has
no name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dist_mem.engine.muon import MUON, HeldRange, MuonMatrix

DeepSpeedEngine: TypeAlias = Any  # deepspeed.DeepSpeedEngine, which has no types
COUNTERS = ("global_steps", "skipped_steps", "global_samples")
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of fp16, if dynamic


class Slice(NamedTuple):
    """A range of a flattened parameter or buffer that this rank holds."""

    name: str  # the parameter's first name in the model
    start: int
    stop: int
    parts: dict[str, Tensor]  # kind -> live (stop - start,) view, or a 0-d tensor that applies to the whole range


class Span(NamedTuple):
    """The place of a range of a parameter in a flat tensor."""

    name: str
    start: int
    stop: int
    offset: int  # of `start`, in the flat tensor


class Flat(NamedTuple):
    """A flat tensor, which torch's optimizer treats as one parameter."""

    key: Tensor  # fp32, requires gradient: the optimizer's key of the state
    spans: list[Span]
    names: list[str]  # of all its parameters, in an order that is that of every rank; `spans` has those that are here
    group: int  # of the optimizer


def base_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return torch's optimizer, which DeepSpeed wraps except in fp32 without ZeRO."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _names(engine: DeepSpeedEngine) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in engine.module.named_parameters()}


def _flats_of_whole_parameters(engine: DeepSpeedEngine) -> Iterator[Flat]:
    """Yield the flat tensors of stage 0: in fp32 the model's parameters, otherwise fp32 copies of them."""
    names, optimizer = _names(engine), engine.optimizer
    masters = [group["params"] for group in optimizer.param_groups]
    for place, (group, keys) in enumerate(zip(getattr(optimizer, "fp16_groups", masters), masters, strict=True)):
        for parameter, key in zip(group, keys, strict=True):
            spans = [Span(names[parameter], 0, key.numel(), 0)] if key.numel() else []
            yield Flat(key, spans, [names[parameter]], place)


def _flats_of_groups(engine: DeepSpeedEngine) -> Iterator[Flat]:
    """Yield the flat tensors of stages 1 and 2: a group's parameters at their offsets, one part per rank."""
    names, optimizer = _names(engine), engine.optimizer
    for group, key in enumerate(optimizer.single_partition_of_fp32_groups):
        first = dist.get_rank() * optimizer.partition_size[group]
        spans = []
        offsets = optimizer.round_robin_bit16_offsets[group]
        for parameter, offset in zip(optimizer.round_robin_bit16_groups[group], offsets, strict=True):
            start = max(0, first - offset)
            stop = min(parameter.numel(), first + key.numel() - offset)
            if start < stop:
                spans.append(Span(names[parameter], start, stop, offset + start - first))
        yield Flat(key, spans, [names[parameter] for parameter in optimizer.round_robin_bit16_groups[group]], group)


def _partition(parameter: Any) -> tuple[int, int]:
    """Return start and stop of this rank's part of a parameter at stage 3; equal if it is all padding."""
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank() * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def _flats_of_sub_groups(engine: DeepSpeedEngine) -> Iterator[Flat]:
    """Yield the flat tensors of stage 3, the sub-groups."""
    names, optimizer = _names(engine), engine.optimizer
    sub_groups = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (parameters, key) in enumerate(sub_groups):
        spans, offset = [], 0
        for parameter in parameters:
            start, stop = _partition(parameter)
            if start < stop:
                spans.append(Span(names[parameter], start, stop, offset))
            offset += parameter.ds_tensor.ds_numel
        group = optimizer.sub_group_to_group_id[number]
        yield Flat(key, spans, [names[parameter] for parameter in parameters], group)


def flats(engine: DeepSpeedEngine) -> list[Flat]:
    """Return all flat tensors that this rank's optimizer steps."""
    stage = engine.zero_optimization_stage()
    find = (_flats_of_whole_parameters, _flats_of_groups, _flats_of_groups, _flats_of_sub_groups)[stage]
    return list(find(engine))


def matrices_of(engine: DeepSpeedEngine) -> dict[Tensor, list[MuonMatrix]]:
    """Return the matrices in the flat tensors of Muon's groups, in the same order on every rank."""
    shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for each, name in _names(engine).items()}
    groups, found = base_optimizer(engine).param_groups, {}
    for flat in flats(engine):
        if groups[flat.group]["rule"] == MUON:
            pieces = {name: HeldRange(*place) for name, *place in flat.spans}
            found[flat.key] = [MuonMatrix(shapes[name], pieces.get(name)) for name in flat.names]
    return found


def _flat_slices(flat: Flat, state: Mapping[str, Tensor | None]) -> Iterator[Slice]:
    tensors = {"master": flat.key.detach(), **{kind: tensor for kind, tensor in state.items() if tensor is not None}}
    for name, start, stop, offset in flat.spans:
        rows = slice(offset, offset + stop - start)
        parts = {kind: tensor.view(-1)[rows] if tensor.dim() else tensor for kind, tensor in tensors.items()}
        yield Slice(name, start, stop, parts)


def _trained_slices(engine: DeepSpeedEngine) -> list[Slice]:
    state = base_optimizer(engine).state
    return [found for flat in flats(engine) for found in _flat_slices(flat, state.get(flat.key, {}))]


def frozen_slices(engine: DeepSpeedEngine) -> Iterator[Slice]:
    """Yield weights that are in no optimizer, in the model's dtype."""
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        is_cut = hasattr(parameter, "ds_tensor")
        tensor = parameter.ds_tensor if is_cut else parameter
        start, stop = _partition(parameter) if is_cut else (0, parameter.numel())
        if start < stop:
            yield Slice(name, start, stop, {"frozen": tensor.detach().view(-1)[: stop - start]})


def buffers(engine: DeepSpeedEngine) -> Iterator[Slice]:
    """Yield the model's buffers that are in its state_dict; every rank holds them whole."""
    persistent = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in persistent and buffer.numel():  # no rank has a share of an empty one
            yield Slice(name, 0, buffer.numel(), {"buffer": buffer.view(-1)})


def owned_slices(engine: DeepSpeedEngine) -> list[Slice]:
    """Return the slices that this rank saves; together the ranks have every element of every parameter exactly once."""
    stage = engine.zero_optimization_stage()
    found = [(stage > 0, _trained_slices(engine)), (stage == 3, frozen_slices(engine)), (False, buffers(engine))]
    cut = [part for is_cut, parts in found if is_cut for part in parts]
    whole = [part for is_cut, parts in found if not is_cut for part in parts]  # the same on every rank
    return [*cut, *_even_share(whole, dist.get_rank(), dist.get_world_size())]


def _even_share(slices: list[Slice], rank: int, num_ranks: int) -> Iterator[Slice]:
    """Yield the rank's even share, counted in elements, of slices that are the same on all ranks."""
    total = sum(found.stop - found.start for found in slices)
    first, last = total * rank // num_ranks, total * (rank + 1) // num_ranks
    offset = 0
    for name, start, stop, parts in slices:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            share = {kind: tensor[low:high] if tensor.dim() else tensor for kind, tensor in parts.items()}
            yield Slice(name, start + low, start + high, share)
        offset += stop - start


def loss_scaler(engine: DeepSpeedEngine) -> Any:
    """Return the object with the dynamic loss scale of fp16; None if the scale is constant."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def metadata(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return what is the same on all ranks: shapes and further names of parameters, counters and the loss scale."""
    scaler, names = loss_scaler(engine), _names(engine)
    scale = {name: getattr(scaler, name) for name in LOSS_SCALE} if scaler else {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name != names[parameter]:
            aliases.setdefault(names[parameter], []).append(name)
    named = {**dict(engine.module.named_parameters()), **dict(engine.module.named_buffers())}
    kept = engine.module.state_dict().keys()
    return {
        "counters": {name: getattr(engine, name) for name in COUNTERS} | scale,
        "shapes": {
            name: list(getattr(found, "ds_shape", found.shape)) for name, found in named.items() if name in kept
        },
        "aliases": aliases,
    }
