"""Restore a checkpoint's slices into DeepSpeed's tensors, at any ZeRO stage and on any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dist_mem.engine.muon import MuonAdamW
from dist_mem.engine.zero_state import (
    COUNTERS,
    LOSS_SCALE,
    DeepSpeedEngine,
    Flat,
    base_optimizer,
    buffers,
    flats,
    frozen_slices,
    loss_scaler,
)
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import gather_objects, on_all_ranks

ReadSlice = Callable[[str, str, int, int], Tensor | None]  # (kind, name, start, stop) -> the elements; None: not there
Counters = Mapping[str, float]


def restore(engine: DeepSpeedEngine, read: ReadSlice, counters: Counters) -> list[str]:
    """Fill all held slices, and derive the model's weights from the masters as DeepSpeed does after a step.

    Every rank calls it, between two updates. Settings of the optimizer's groups are unchanged.

    Returns:
        The names of the trained parameters, of all ranks, whose optimizer state starts empty.

    Raises:
        UnusableError: on every rank; `read` lacks something, or its tensors do not fit this engine's partitions.
    """
    with torch.no_grad():
        empty = on_all_ranks(lambda: _fill(engine, read), "restoring the engine")
        _derive_weights(engine)
    _restore_counters(engine, counters)
    return sorted({name for names in gather_objects(empty) for name in names})


def _fill(engine: DeepSpeedEngine, read: ReadSlice) -> list[str]:
    optimizer = base_optimizer(engine)
    empty: list[str] = []
    kinds: dict[tuple[torch.device, int], dict[str, torch.device]] = {}
    for flat in flats(engine):
        for name, start, stop, offset in flat.spans:
            master = flat.key.view(-1)[offset : offset + stop - start]
            master.copy_(_read_weights(read, ("master", "frozen"), name, start, stop))
        if flat.spans:  # not only padding
            place = flat.key.device, flat.group
            if place not in kinds:
                kinds[place] = _kinds(optimizer, *place)
            empty += _fill_state(optimizer, flat, kinds[place], read)
    for name, start, stop, parts in [*frozen_slices(engine), *buffers(engine)]:
        for kind, tensor in parts.items():
            tensor.copy_(_read_weights(read, (kind, "master"), name, start, stop))
    return empty


def _read_weights(read: ReadSlice, kinds: tuple[str, str], name: str, start: int, stop: int) -> Tensor:
    """Return the first kind that exists: a parameter may have been frozen, or unfrozen, since the checkpoint."""
    for kind in kinds:
        found = read(kind, name, start, stop)
        if found is not None:
            return found
    raise CheckpointError(f"the checkpoint has no weights of {name}: it is of another model")


def _kinds(optimizer: torch.optim.Optimizer, device: torch.device, group: int = 0) -> dict[str, torch.device]:
    """Return the kinds of state that the optimizer keeps for a parameter of a group on `device`, and where each is.

    A step of a copy of the optimizer shows them; the state of the optimizer itself may still be empty. A fused Adam
    counts its steps on the device, any other one on the host.
    """
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))  # copy.copy would take groups and state only
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[group], "params": [probe]}]
    if isinstance(trial, MuonAdamW):
        trial.matrices = None
    trial.step()
    return {kind: tensor.device for kind, tensor in trial.state[probe].items() if tensor is not None}


def _fill_state(
    optimizer: torch.optim.Optimizer, flat: Flat, kinds: Mapping[str, torch.device], read: ReadSlice
) -> list[str]:
    """Fill the optimizer's state of one flat tensor; return the names of parameters of which the checkpoint has none.

    Their moments are zero, as before a first step. If no parameter has state, the flat tensor has none.
    """
    lacking = {kind: _fill_kind(optimizer, flat, kind, read, device) for kind, device in kinds.items()}
    empty = [span.name for span in flat.spans if all(span.name in names for names in lacking.values())]
    for kind, names in lacking.items():
        if other := [name for name in names if name not in empty]:
            raise CheckpointError(
                f"the checkpoint has no {kind} of {other}, but other state: it is damaged, or of another optimizer"
            )
    if len(empty) == len(flat.spans):
        optimizer.state[flat.key].clear()
    return empty if kinds else []


def _fill_kind(
    optimizer: torch.optim.Optimizer, flat: Flat, kind: str, read: ReadSlice, device: torch.device
) -> list[str]:
    """Fill one kind of state; return the names of the parameters for which the checkpoint has none, which get zeros."""
    lacking: list[str] = []
    counts: list[Tensor] = []
    for name, start, stop, offset in flat.spans:
        part = read(kind, name, start, stop)
        if part is not None and part.dim() == 0:
            counts.append(part)
            continue
        if part is None:
            lacking.append(name)
        state = optimizer.state[flat.key]
        if part is not None and kind not in state:
            state[kind] = torch.zeros_like(flat.key, requires_grad=False)
        if kind in state and state[kind].dim():
            rows = state[kind].view(-1)[offset : offset + stop - start]
            rows.zero_() if part is None else rows.copy_(part)
    if counts:
        # ZeRO has one count of steps for a flat tensor. It is the largest where they differ, as for a parameter that
        # was trained later than others: a smaller one would correct the bias of moments that have none any more.
        # A copy for this flat tensor: a count shared by all of them would grow once for each in every step.
        optimizer.state[flat.key][kind] = torch.stack(counts).max().to(device, copy=True)
    return lacking


def _derive_weights(engine: DeepSpeedEngine) -> None:
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # releases gathered parameters
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()  # gathers persistent parameters again
    elif stage:
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp16_groups"):
        for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)


def _restore_counters(engine: DeepSpeedEngine, counters: Counters) -> None:
    for name in COUNTERS:
        if type(counters.get(name)) is not int or counters[name] < 0:
            raise CheckpointError(
                f"engine.json: counters.{name} is {counters.get(name)!r}, but must be a count of steps"
            )
        setattr(engine, name, counters[name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()  # which may have changed
    scaler = loss_scaler(engine)
    for name in LOSS_SCALE:
        if scaler and name in counters:  # a checkpoint of another precision has none
            setattr(scaler, name, counters[name])
