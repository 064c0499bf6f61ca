"""Read lanes and random state from a checkpoint; commit.py writes them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.checkpoint.manifest import step_dir
from dist_mem.checkpoint.rank_file import RankFile, rank_file
from dist_mem.errors import CheckpointError, run_error
from dist_mem.memory.base import MemoryState, map_state, named_tensors
from dist_mem.runtime.distributed import World
from dist_mem.runtime.files import free_name


class Lanes(NamedTuple):
    """Memory states and cursors of a rank's lanes."""

    lane_ids: Tensor  # (P,) int64, global lane numbers; those >= G are idle lanes
    cursors: Tensor  # (P, 3) int64: epoch, place, offset
    states: list[MemoryState]  # one memory state per lane group, lane first, groups in lane order


def open_checkpoints(run_dir: Path, set_aside: Sequence[Path] = ()) -> None:
    """Create the checkpoint directory, check that it can be written, and remove the remains of killed saves.

    Args:
        set_aside: checkpoints newer than the one the run resumes from; they are renamed to `.superseded`.

    Raises:
        UnusableError, UnfitError: the directory cannot be created or written.
    """
    directory = step_dir(run_dir, 0).parent
    probe = directory / ".probe.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left_behind in directory.glob(".*.partial"):
            shutil.rmtree(left_behind, ignore_errors=True)
        probe.mkdir()
        probe.rmdir()
        for newer in set_aside:
            newer.rename(free_name(newer.with_name(f"{newer.name}.superseded")))
    except OSError as error:
        message = f"checkpoints cannot be written: {error}; fix this, or give the run another run_dir"
        raise run_error(error, message) from error


def read_lanes(
    directory: Path,
    manifest: Mapping[str, Any],
    lane_ids: Tensor,
    fresh: Sequence[MemoryState],
    *,
    num_lanes: int | None = None,
    convert: bool = False,
) -> Lanes:
    """Read the lanes with these ids, from whichever ranks' files hold them, into the structure of the `fresh` states.

    Args:
        fresh: empty memories of the lanes, one state per lane group.
        num_lanes: G; lanes with ids >= G are idle and keep their states in `fresh`. None: read all lanes.
        convert: convert memories of another floating point type instead of refusing them.

    Raises:
        CheckpointError: a lane is not in the checkpoint, its state does not fit the model, or a file cannot be read.
    """
    is_busy = lane_ids < num_lanes if num_lanes is not None else torch.ones_like(lane_ids, dtype=torch.bool)
    rows = _rows_of(directory, manifest, lane_ids[is_busy].tolist())
    opened = {name: RankFile(directory / name, "lanes").read() for name in {name for name, _ in rows}}
    _check_lane_ids(directory, opened, rows, lane_ids[is_busy].tolist())

    def fill_lanes(key: str, empty: Tensor) -> Tensor:
        if not rows:
            return empty
        if any(key not in tensors for tensors in opened.values()):
            raise CheckpointError(f"{directory}: its lanes have no {key}, which the model's memory carries")
        if any(len(opened[name][key]) != len(opened[name]["lane_ids"]) for name, _ in rows):
            raise CheckpointError(f"{directory}: {key} of its lanes does not have one row per lane")
        try:
            stored = torch.stack([opened[name][key][row] for name, row in rows])
        except RuntimeError as error:
            raise CheckpointError(f"{directory}: {key} has another shape in each rank's file ({error})") from error
        whole = empty.clone()
        fitting = _fit_rows(key, stored, empty, convert=convert)
        for lane, row in zip(is_busy.nonzero().flatten().tolist(), fitting, strict=True):
            whole[lane] = row  # not by a mask, which torch does not implement for unsigned integers
        return whole

    empty = map_state(lambda *parts: torch.cat(parts), *fresh)
    names = iter(named_tensors(empty))  # walks a state in the same order as map_state
    joined = map_state(lambda part: fill_lanes(next(names), part), empty)
    size = len(lane_ids) // len(fresh)  # not from a tensor: a memory may have no state
    states = [
        map_state(lambda part, first=first: part[first : first + size].clone(), joined)
        for first in range(0, len(lane_ids), size)
    ]
    cursors = fill_lanes("cursors", torch.zeros(len(lane_ids), 3, dtype=torch.int64))
    return Lanes(lane_ids=lane_ids, cursors=cursors, states=states)


def read_cursors(directory: Path, manifest: Mapping[str, Any], num_lanes: int) -> list[list[int]]:
    """Return the cursors of lanes 0 to `num_lanes` - 1 of a checkpoint, without reading their memories.

    Raises:
        CheckpointError: a lane is not in the checkpoint, or a file cannot be read.
    """
    rows = _rows_of(directory, manifest, range(num_lanes))
    files = {name: RankFile(directory / name, "lanes") for name in {name for name, _ in rows}}
    opened = {name: file.read(("lane_ids", "cursors")) for name, file in files.items()}
    _check_lane_ids(directory, opened, rows, range(num_lanes))
    return [opened[name]["cursors"][row].tolist() for name, row in rows]


def _rows_of(directory: Path, manifest: Mapping[str, Any], lane_ids: Sequence[int]) -> list[tuple[str, int]]:
    """Return the file and row of every lane."""
    missing = [lane for lane in lane_ids if str(lane) not in manifest["lanes"]]
    if missing:
        raise CheckpointError(f"{directory}: lanes {missing} are not in this checkpoint")
    return [manifest["lanes"][str(lane)] for lane in lane_ids]


def _check_lane_ids(
    directory: Path, opened: Mapping[str, Mapping[str, Tensor]], rows: Sequence[tuple[str, int]], lanes: Sequence[int]
) -> None:
    """Compare the lane ids in the files with the manifest: the shape of a wrong lane's memory is right too."""
    ids = {name: tensors["lane_ids"].flatten().tolist() for name, tensors in opened.items() if "lane_ids" in tensors}
    for lane, (name, row) in zip(lanes, rows, strict=True):
        found = ids.get(name, [])[row : row + 1]
        if found != [lane]:
            holds = f"holds lane {found[0]}" if found else "is not there"
            raise CheckpointError(f"{directory / name}: row {row} {holds}, but the manifest has lane {lane}: swapped?")


def _fit_rows(name: str, stored: Tensor, empty: Tensor, *, convert: bool) -> Tensor:
    """Return rows with the dtype and device of `empty`. Raises CheckpointError if they do not fit."""
    is_other = stored.dtype != empty.dtype
    may_convert = convert and stored.is_floating_point() and empty.is_floating_point()
    if stored.shape[1:] != empty.shape[1:] or (is_other and not may_convert):
        raise CheckpointError(
            f"memory state {name} is {tuple(stored.shape[1:])} {stored.dtype} in the checkpoint, "
            f"the model wants {tuple(empty.shape[1:])} {empty.dtype}"
        )
    return stored.to(empty)


def read_random_state(directory: Path, world: World) -> dict[str, Tensor] | None:
    """Read the state of this rank's random generators; None if the rank ran on another kind of device."""
    state = RankFile(directory / rank_file(world.rank), "rng").read()
    return state if ("cuda" in state) == (world.device.type == "cuda") else None


def set_random_state(state: Mapping[str, Tensor], world: World) -> None:
    """Set the state of this rank's random generators."""
    torch.set_rng_state(state["cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)
