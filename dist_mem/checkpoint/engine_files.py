"""The engine's files in a checkpoint: the slices of every rank by name and range, readable on any number of ranks.

    engine/rank-00003.safetensors   KIND/NAME -> flat slice of NAME, or a 0-d tensor that holds for the whole slice
    engine.json                     the range of each parameter that each rank stores; shapes, aliases, counters

Kinds: master (fp32 weights), frozen (weights that are not trained), buffer, and the optimizer state that torch keeps
per parameter (exp_avg, exp_avg_sq, momentum_buffer, step). The files hold no pickles: reading them runs no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dist_mem.checkpoint.manifest import rank_file, reading
from dist_mem.checkpoint.schemas import engine_problems
from dist_mem.engine.zero_state import Slice
from dist_mem.errors import CheckpointError
from dist_mem.runtime.file_schema import check, read_json

ENGINE_JSON = "engine.json"
Range = tuple[str, int, int]  # name, start, stop
_WEIGHTS = ("master", "frozen", "buffer")


def engine_tensors(slices: Iterable[Slice]) -> dict[str, Tensor]:
    """Return the content of a rank's file. The tensors are live: copy them before training continues."""
    return {f"{kind}/{found.name}": tensor for found in slices for kind, tensor in found.parts.items()}


def engine_ranges(slices: Iterable[Slice]) -> list[Range]:
    """Return the ranges of a rank's slices, which rank 0 needs to write engine.json."""
    return [(found.name, found.start, found.stop) for found in slices]


def engine_index(metadata: Mapping[str, Any], ranges: Sequence[Sequence[Range]]) -> dict[str, Any]:
    """Return the content of engine.json.

    Args:
        metadata: of the engine: shapes, aliases, counters.
        ranges: `engine_ranges` of all ranks, in rank order.
    """
    slices: dict[str, list[list[int]]] = {name: [] for name in metadata["shapes"]}
    for rank, rank_ranges in enumerate(ranges):
        for name, start, stop in rank_ranges:
            slices[name].append([rank, start, stop])
    return {**metadata, "slices": {name: sorted(found, key=lambda entry: entry[1]) for name, found in slices.items()}}


class EngineReader:
    """Reads any range of any parameter of a checkpoint; opens each rank's file when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with reading(directory / ENGINE_JSON):
            self.index = read_json(directory / ENGINE_JSON, CheckpointError)
        check(self.index, engine_problems, directory / ENGINE_JSON, CheckpointError)
        self.counters: dict[str, float] = self.index["counters"]
        self._files: dict[int, tuple[Any, set[str]]] = {}

    def _stored(self, rank: int, key: str, low: int, high: int) -> Tensor | None:
        """Return elements low to high of a tensor in a rank's file, or a whole 0-d tensor; None without it."""
        path = self.directory / rank_file("engine", rank)
        with reading(path):
            if rank not in self._files:
                file = safe_open(path, framework="pt")
                self._files[rank] = file, set(file.keys())
            file, keys = self._files[rank]
            if key not in keys:
                return None
            stored = file.get_slice(key)
            if not (shape := stored.get_shape()):
                return file.get_tensor(key)
            if len(shape) != 1 or shape[0] < high:
                raise CheckpointError(
                    f"{path}: {key} has shape {shape}, but {ENGINE_JSON} lists {high} elements or more"
                )
            return stored[low:high]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor | None:
        """Return elements start to stop of a flattened parameter, or a 0-d tensor; None if there are none.

        Raises:
            CheckpointError: a part of the range is missing, or the ranks' files differ in a 0-d tensor.
        """
        parts, covered = [], 0
        for rank, first, last in self.index["slices"].get(name, []):
            low, high = max(start, first), min(stop, last)
            part = self._stored(rank, f"{kind}/{name}", low - first, high - first) if low < high else None
            if part is not None:
                parts.append(part)
                covered += high - low
        if not parts:
            return None
        if covered != stop - start:
            raise CheckpointError(
                f"{self.directory}: of {kind} of {name} there are {covered} of the elements {start} to {stop}"
            )
        if parts[0].dim():
            return torch.cat(parts)
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise CheckpointError(f"{self.directory}: the ranks' files differ in {kind} of {name}")
        return parts[0]

    def weights(self) -> dict[str, Tensor]:
        """Return all weights in full, under every name in the model's state_dict; floating point weights as fp32."""
        weights: dict[str, Tensor] = {}
        for name, shape in self.index["shapes"].items():
            whole = self._read_whole(name, prod(shape)).view(shape)
            whole = whole.float() if whole.is_floating_point() else whole
            weights.update(dict.fromkeys([name, *self.index["aliases"].get(name, [])], whole))
        return weights

    def _read_whole(self, name: str, length: int) -> Tensor:
        if length == 0:
            return torch.zeros(0)
        for kind in _WEIGHTS:
            found = self.read(kind, name, 0, length)
            if found is not None:
                return found
        raise CheckpointError(f"{self.directory}: the files of the ranks have no weights of {name}")
