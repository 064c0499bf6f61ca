"""Copy a rank's share of a checkpoint to host memory, so that training continues while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.checkpoint.engine_files import engine_ranges, engine_tensors
from dist_mem.checkpoint.lane_states import Lanes
from dist_mem.engine.engine import Engine
from dist_mem.memory.base import MemoryState, map_state, named_tensors


class Snapshot(NamedTuple):
    """One rank's share of the checkpoint of a step; it shares no memory with the training."""

    step: int
    parts: dict[str, dict[str, Tensor]]  # engine, lanes, rng -> that part of this rank's file
    ranges: np.ndarray  # (ranges, 3), see `engine_ranges`
    engine: dict[str, Any]  # engine.json without the slices
    small_files: dict[str, bytes]  # written by rank 0: configuration, tokenizer, memories from outside the package
    metadata: dict[str, Any]  # further keys of the manifest

    @property
    def num_bytes(self) -> int:
        """Size of this rank's tensors."""
        return sum(tensor.nbytes for tensors in self.parts.values() for tensor in tensors.values())


def take_snapshot(
    *,
    step: int,
    engine: Engine,
    lanes: Lanes,
    small_files: Mapping[str, bytes],
    metadata: Mapping[str, Any],
    is_rehearsal: bool = False,
) -> Snapshot:
    """Copy this rank's engine, lanes and random state: the only part of a save that training must wait for.

    Args:
        is_rehearsal: empty the tensors of the engine and the memories, which may take gigabytes.
    """
    owned = engine.owned_slices()
    live = engine_tensors(owned)
    memories = _empty(named_tensors(lanes.states[0])) if is_rehearsal else _join(lanes.states)
    engine_metadata = engine.metadata()
    return Snapshot(
        step=step,
        parts={
            "engine": _empty(live) if is_rehearsal else {name: _copy(tensor) for name, tensor in live.items()},
            "lanes": {**memories, "lane_ids": _copy(lanes.lane_ids), "cursors": _copy(lanes.cursors)},
            "rng": _random_state(engine.device),
        },
        ranges=engine_ranges(owned, engine_metadata["shapes"]),
        engine=engine_metadata,
        small_files=dict(small_files),
        metadata=deepcopy(dict(metadata)),
    )


def _empty(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without elements of the same names and dtypes."""
    return {name: tensor.new_empty(0, device="cpu") for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _join(states: Sequence[MemoryState]) -> dict[str, Tensor]:
    """Concatenate the states of all lane groups into new tensors, on the host."""
    return named_tensors(map_state(lambda *parts: torch.cat([part.detach().cpu() for part in parts]), *states))


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state
