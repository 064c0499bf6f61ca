"""Restore a checkpoint's slices into DeepSpeed's tensors, at any ZeRO stage and on any number of ranks."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dist_mem.engine.zero_state import (
    COUNTERS,
    LOSS_SCALE,
    DeepSpeedEngine,
    Flat,
    base_optimizer,
    buffers,
    flats,
    frozen,
    loss_scaler,
)
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import on_all_ranks

ReadSlice = Callable[[str, str, int, int], Tensor | None]  # (kind, name, start, stop) -> the elements; None: not there
Counters = Mapping[str, float]


def restore(engine: DeepSpeedEngine, read: ReadSlice, counters: Counters) -> None:
    """Fill all held slices, and derive the model's weights from the masters as DeepSpeed does after a step.

    Every rank calls it, between two updates. Settings of the optimizer's groups are unchanged.

    Raises:
        UnusableError: on every rank; `read` lacks something, or its tensors do not fit this engine's partitions.
    """
    with torch.no_grad():
        on_all_ranks(lambda: _fill(engine, read), "restoring the engine")
        _derive_weights(engine)
    _restore_counters(engine, counters)


def _fill(engine: DeepSpeedEngine, read: ReadSlice) -> None:
    optimizer = base_optimizer(engine)
    kinds: dict[torch.device, dict[str, torch.device]] = {}
    for flat in flats(engine):
        for name, start, stop, offset in flat.spans:
            master = flat.key.view(-1)[offset : offset + stop - start]
            master.copy_(_read_weights(read, ("master", "frozen"), name, start, stop))
        if flat.spans:  # not only padding
            if flat.key.device not in kinds:
                kinds[flat.key.device] = _kinds(optimizer, flat.key.device)
            _fill_state(optimizer, flat, kinds[flat.key.device], read)
    for name, start, stop, parts in [*frozen(engine), *buffers(engine)]:
        for kind, tensor in parts.items():
            tensor.copy_(_read_weights(read, (kind, "master"), name, start, stop))


def _read_weights(read: ReadSlice, kinds: tuple[str, str], name: str, start: int, stop: int) -> Tensor:
    """Return the first kind that exists: a parameter may have been frozen, or unfrozen, since the checkpoint."""
    for kind in kinds:
        found = read(kind, name, start, stop)
        if found is not None:
            return found
    raise CheckpointError(f"the checkpoint has no weights of {name}: it is of another model")


def _kinds(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, torch.device]:
    """Return the kinds of state that the optimizer keeps for a parameter on `device`, and where it keeps each.

    A step of a copy of the optimizer shows them; the state of the optimizer itself may still be empty. A fused Adam
    counts its steps on the device, any other one on the host.
    """
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [probe]}]
    trial.step()
    return {kind: tensor.device for kind, tensor in trial.state[probe].items() if tensor is not None}


def _fill_state(
    optimizer: torch.optim.Optimizer, flat: Flat, kinds: Mapping[str, torch.device], read: ReadSlice
) -> None:
    """Fill the optimizer's state of one flat tensor; clear it if the checkpoint has none, as before the first step."""
    lacking = {kind: _fill_kind(optimizer, flat, kind, read, device) for kind, device in kinds.items()}
    all_names = [span.name for span in flat.spans]
    if all(names == all_names for names in lacking.values()):
        optimizer.state[flat.key].clear()
        return
    for kind, names in lacking.items():
        if names:
            raise CheckpointError(
                f"the checkpoint has no {kind} of {names}, but other state of parameters that ZeRO steps together with "
                "them: give them a separate optimizer.groups entry"
            )


def _fill_kind(
    optimizer: torch.optim.Optimizer, flat: Flat, kind: str, read: ReadSlice, device: torch.device
) -> list[str]:
    """Fill one kind of state; return the names of the parameters for which the checkpoint has none."""
    lacking: list[str] = []
    scalars: dict[str, Tensor] = {}
    for name, start, stop, offset in flat.spans:
        part = read(kind, name, start, stop)
        if part is None:
            lacking.append(name)
        elif part.dim() == 0:
            scalars[name] = part
        else:
            state = optimizer.state[flat.key]
            if kind not in state:
                state[kind] = torch.zeros_like(flat.key, requires_grad=False)
            state[kind].view(-1)[offset : offset + stop - start].copy_(part)
    if scalars:
        # A copy for this flat tensor: a count shared by all of them would grow once for each in every step.
        optimizer.state[flat.key][kind] = _common_value(kind, scalars).to(device, copy=True)
    return lacking


def _common_value(kind: str, scalars: dict[str, Tensor]) -> Tensor:
    first = next(iter(scalars.values()))
    if any(not torch.equal(scalar, first) for scalar in scalars.values()):
        values = {name: scalar.item() for name, scalar in scalars.items()}
        raise CheckpointError(
            f"the checkpoint has different values of {kind} for parameters that ZeRO steps together: {values}; give "
            "them separate optimizer.groups entries"
        )
    return first


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
