"""The engine's files in a checkpoint: the slices of every rank by name and range, readable on any number of ranks.

    ranks/rank-00003.safetensors   engine/KIND/NAME -> flat slice of NAME, or a 0-d tensor for the whole slice
    engine.json                    which ranks have which elements of each parameter; shapes, aliases, counters

Kinds: master (fp32 weights), frozen (weights that are not trained), buffer, and the optimizer state that torch keeps
per parameter (exp_avg, exp_avg_sq, momentum_buffer, step). The files hold no pickles: reading them runs no code.

engine.json lists runs, because at ZeRO stage 3 every rank has a slice of every parameter: [5, 100, 330, 40] says that
rank 5 has elements 100 to 140, rank 6 the next 40, and so on, the last of them what is left before 330. So the file
grows with the parameters plus the ranks, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.checkpoint.manifest import reading
from dist_mem.checkpoint.rank_file import RankFile, rank_file
from dist_mem.checkpoint.schemas import engine_problems
from dist_mem.engine.zero_state import Slice
from dist_mem.errors import CheckpointError
from dist_mem.runtime.file_schema import check, read_json

ENGINE_JSON = "engine.json"
_WEIGHTS = ("master", "frozen", "buffer")


def engine_tensors(slices: Iterable[Slice]) -> dict[str, Tensor]:
    """Return the content of a rank's file. The tensors are live: copy them before training continues."""
    return {f"{kind}/{found.name}": tensor for found in slices for kind, tensor in found.parts.items()}


def engine_ranges(slices: Iterable[Slice], shapes: Mapping[str, Any]) -> np.ndarray:
    """Return what rank 0 needs of a rank's slices to write engine.json.

    Returns:
        (slices, 3) int64: number of the parameter in `shapes`, start, stop.
    """
    numbers = {name: number for number, name in enumerate(shapes)}
    rows = [(numbers[found.name], found.start, found.stop) for found in slices]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def engine_index(metadata: Mapping[str, Any], ranges: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the content of engine.json.

    Args:
        metadata: of the engine: shapes, aliases, counters.
        ranges: `engine_ranges` of all ranks, in rank order.
    """
    names = list(metadata["shapes"])
    slices: dict[str, list[list[int]]] = {name: [] for name in names}
    for number, *run in _runs(ranges).tolist():
        slices[names[number]].append(run)
    return {**metadata, "slices": slices}


def _runs(ranges: Sequence[np.ndarray]) -> np.ndarray:
    """Join slices of equal length on consecutive ranks, the last of which may be shorter.

    Returns:
        (runs, 5) int64, by parameter and start: number of the parameter, first rank, start, stop, length of a slice.
    """
    rank = np.repeat(np.arange(len(ranges)), [len(rows) for rows in ranges])
    number, start, stop = np.concatenate(ranges).T
    order = np.lexsort((start, number))
    number, start, stop, rank = number[order], start[order], stop[order], rank[order]
    size = stop - start
    follows = (np.diff(number) == 0) & (np.diff(rank) == 1) & (start[1:] == stop[:-1])
    is_equal = np.append(False, follows & (np.diff(size) == 0))
    # A shorter slice ends a run of equal ones, and so cannot be continued by a slice that equals it.
    is_last = np.append(False, follows & (np.diff(size) < 0) & is_equal[:-1])
    firsts = np.flatnonzero(~(is_last | (is_equal & ~np.append(False, is_last[:-1]))))
    lasts = np.append(firsts[1:], len(rank)) - 1
    return np.stack([number[firsts], rank[firsts], start[firsts], stop[lasts], size[firsts]], axis=1)


class RankSlice(NamedTuple):
    """A rank's slice of a parameter: its elements start to stop."""

    rank: int
    start: int
    stop: int


def places(runs: Iterable[Sequence[int]], start: int, stop: int) -> Iterator[RankSlice]:
    """Yield the slices with elements start to stop of a parameter, in order; `runs` is its entry in engine.json."""
    for first_rank, begin, end, length in runs:
        low, high = max(start, begin), min(stop, end)
        if low < high:
            for index in range((low - begin) // length, (high - 1 - begin) // length + 1):
                yield RankSlice(first_rank + index, begin + index * length, min(begin + (index + 1) * length, end))


class EngineReader:
    """Reads any range of any parameter of a checkpoint; opens each rank's file when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with reading(directory / ENGINE_JSON):
            self.index = read_json(directory / ENGINE_JSON, CheckpointError)
        check(self.index, engine_problems, directory / ENGINE_JSON, CheckpointError)
        self.counters: dict[str, float] = self.index["counters"]
        self._files: dict[int, RankFile] = {}

    def _file(self, rank: int) -> RankFile:
        if rank not in self._files:
            self._files[rank] = RankFile(self.directory / rank_file(rank), "engine")
        return self._files[rank]

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor | None:
        """Return elements start to stop of a flattened parameter, or a 0-d tensor; None if there are none.

        Raises:
            CheckpointError: a part of the range is missing, or the ranks' files differ in a 0-d tensor.
        """
        parts, covered = [], 0
        for rank, first, last in places(self.index["slices"].get(name, []), start, stop):
            low, high, key = max(start, first), min(stop, last), f"{kind}/{name}"
            if key in (file := self._file(rank)):
                parts.append(file.elements(key, low - first, high - first, size=last - first))
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
