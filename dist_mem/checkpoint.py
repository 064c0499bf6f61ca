"""Saving and restoring everything a run needs to go on exactly: engine files, lane states, cursors, random state.

    RUN/checkpoints/step-00001000/
        engine/                      DeepSpeed's files (parameters, optimizer moments, loss scale)
        lanes/rank-00003.safetensors the memory state and the cursor of every lane of rank 3
        rng/rank-00003.safetensors   random generators of rank 3
        config.yaml                  the configuration, unresolved
        manifest.json                written last: sizes and SHA-256 of all files, lane id -> file and row

Everything is written under a temporary name and renamed when every rank has voted. Nothing that ranks own separately
goes into DeepSpeed's client_state or into module buffers: they keep rank 0's copy only.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_mem.distributed import AgreedError, World, agree_all_well, decided_by_rank0, gather_objects
from dist_mem.engine import Engine
from dist_mem.files import fsync_path, write_text
from dist_mem.manifest import CheckpointError, describe_file, files_in, newest_verified, step_dir, write_manifest
from dist_mem.memory.base import map_state, named_tensors

_LIBRARIES = ("torch", "deepspeed", "dist-mem")


class Lanes(NamedTuple):
    """What a rank's lanes carry."""

    lane_ids: Tensor  # (P,) int64, global lane numbers; those >= G are idle lanes
    cursors: Tensor  # (P, 3) int64: epoch, place, offset
    states: list[Any]  # one memory state per lane group, lane first, groups in lane order


def _rank_file(directory: Path, kind: str, rank: int) -> Path:
    return directory / kind / f"rank-{rank:05d}.safetensors"


def _join_groups(states: Sequence[Any]) -> dict[str, Tensor]:
    joined = map_state(lambda *parts: torch.cat(parts).cpu().contiguous(), *states)
    return named_tensors(joined)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _write_rank_files(directory: Path, lanes: Lanes, world: World) -> None:
    contents = {
        "lanes": {**_join_groups(lanes.states), "lane_ids": lanes.lane_ids, "cursors": lanes.cursors},
        "rng": _random_state(world.device),
    }
    for kind, tensors in contents.items():
        path = _rank_file(directory, kind, world.rank)
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)


def _describe_share(directory: Path, world: World) -> dict[str, Any]:
    """Flush and hash this rank's share of all files: every rank reads a part of what all have written."""
    entries = {}
    for path in files_in(directory)[world.rank :: world.size]:
        fsync_path(path)
        entries[path.relative_to(directory).as_posix()] = describe_file(path)
    return entries


def _lane_rows(lanes: Lanes, rank: int) -> dict[str, tuple[str, int]]:
    name = f"lanes/rank-{rank:05d}.safetensors"
    return {str(lane): (name, row) for row, lane in enumerate(lanes.lane_ids.tolist())}


def _free_name(path: Path) -> Path:
    """The path, or the first of PATH-2, PATH-3, ... that nothing has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(name for name in chain([path], numbered) if not name.exists())


def _commit(partial: Path, final: Path, content: dict[str, Any]) -> None:
    write_manifest(partial, content)
    for folder in {path.parent for path in files_in(partial)}:
        fsync_path(folder)
    if final.exists():  # left by an interrupted run and passed over at the restart, or it would have been used
        final.rename(_free_name(final.with_name(f"{final.name}.broken")))
    partial.rename(final)
    fsync_path(final.parent)
    write_text(final.parent / "latest", final.name + "\n")


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    engine: Engine,
    lanes: Lanes,
    texts: Mapping[str, str],
    world: World,
    facts: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step`; it exists completely or not at all. Every rank calls it.

    Args:
        texts: files to write besides, config.yaml among them.
        facts: what else the manifest should tell (fingerprints, MLflow run id).

    Raises:
        AgreedError: on every rank, if any rank could not write its part; names the ranks.
    """
    final = step_dir(run_dir, step)
    partial = final.with_name(f".{final.name}.partial")
    with _whole_or_nothing(partial, world):
        _open_partial(partial, texts, world)
        entries = _write_share(partial, engine, lanes, world)
        told = gather_objects((entries, _lane_rows(lanes, world.rank)))
        error: OSError | None = None
        if world.rank == 0:
            content = {
                "step": step,
                "world_size": world.size,
                "zero_stage": engine.stage,
                "versions": {name: version(name) for name in _LIBRARIES} | {"python": platform.python_version()},
                **facts,
                "files": dict(sorted(item for files, _ in told for item in files.items())),
                "lanes": {lane: row for _, rows in told for lane, row in rows.items()},
            }
            try:
                _commit(partial, final, content)
            except OSError as caught:
                error = caught
        agree_all_well(error, f"committing checkpoint {final}")
    return final


@contextmanager
def _whole_or_nothing(partial: Path, world: World) -> Iterator[None]:
    """Remove what a failed save has written: on a full disk it would take the room of the next one."""
    try:
        yield
    except AgreedError as error:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise AgreedError(f"{error}. Earlier checkpoints are whole: mend this, and the same command resumes") from error


def _open_partial(partial: Path, texts: Mapping[str, str], world: World) -> None:
    error: OSError | None = None
    if world.rank == 0:
        try:
            partial.mkdir(parents=True)
            for name, text in texts.items():
                (partial / name).parent.mkdir(exist_ok=True)
                write_text(partial / name, text)
        except OSError as caught:
            error = caught
    agree_all_well(error, f"opening checkpoint {partial}")


def _write_share(partial: Path, engine: Engine, lanes: Lanes, world: World) -> dict[str, Any]:
    """Write what is this rank's; returns the entries of its share of all files."""
    error: Exception | None = None
    try:
        engine.save(partial)
        _write_rank_files(partial, lanes, world)
    except (OSError, SafetensorError) as caught:  # safetensors reports a full disk as its own kind of exception
        error = caught
    agree_all_well(error, f"writing checkpoint {partial}")
    entries: dict[str, Any] = {}
    try:
        entries = _describe_share(partial, world)
    except OSError as caught:
        error = caught
    agree_all_well(error, f"flushing checkpoint {partial}")
    return entries


def open_checkpoints(run_dir: Path) -> None:
    """Make the directory of the checkpoints, see that it can be written, and remove what killed saves have left there.

    Raises:
        OSError: it cannot be made or written.
    """
    directory = step_dir(run_dir, 0).parent
    probe = directory / ".probe.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left_behind in directory.glob(".*.partial"):
            shutil.rmtree(left_behind, ignore_errors=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise OSError(f"checkpoints cannot be written: {error}; mend that, or give the run another run_dir") from error


def choose_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, the same on every rank, and why newer ones were passed over.

    Raises:
        CheckpointError: on every rank, when there are checkpoints but none is usable.
    """
    return decided_by_rank0(lambda: newest_verified(run_dir), CheckpointError)


def _fitting(name: str, stored: Tensor, wanted: Tensor) -> Tensor:
    if stored.shape != wanted.shape or stored.dtype != wanted.dtype:
        raise CheckpointError(
            f"memory state {name} is {tuple(stored.shape)} {stored.dtype} in the checkpoint, "
            f"the model wants {tuple(wanted.shape)} {wanted.dtype}"
        )
    return stored.to(wanted.device)


def read_lanes(directory: Path, manifest: dict[str, Any], lane_ids: Tensor, fresh: Sequence[Any]) -> Lanes:
    """The lanes with these ids, from whichever ranks' files hold them, in the structure of the `fresh` states.

    Raises:
        CheckpointError: a lane is not in the checkpoint, or its state does not fit the model.
    """
    rows = [manifest["lanes"].get(str(lane)) for lane in lane_ids.tolist()]
    missing = [lane for lane, row in zip(lane_ids.tolist(), rows, strict=True) if row is None]
    if missing:
        raise CheckpointError(f"{directory}: lanes {missing} are not in this checkpoint")
    opened = {name: load_file(directory / name) for name in {name for name, _ in rows}}

    def gather(key: str) -> Tensor:
        return torch.stack([opened[name][key][row] for name, row in rows])

    empty = map_state(lambda *parts: torch.cat(parts), *fresh)
    names = iter(named_tensors(empty))  # walks a state in the same order as map_state
    whole = map_state(lambda wanted: _fitting(name := next(names), gather(name), wanted), empty)
    size = len(lane_ids) // len(fresh)  # a memory without state has no tensor to ask
    states = [
        map_state(lambda part, first=first: part[first : first + size].clone(), whole)
        for first in range(0, len(lane_ids), size)
    ]
    return Lanes(lane_ids=lane_ids, cursors=gather("cursors"), states=states)


def read_random_state(directory: Path, world: World) -> None:
    """Put this rank's random generators back where they were."""
    state = load_file(_rank_file(directory, "rng", world.rank))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)


def check_same_world(directory: Path, manifest: dict[str, Any], world: World, stage: int) -> None:
    """Refuse to load a checkpoint of another number of ranks or ZeRO stage.

    Raises:
        CheckpointError: naming both values and the fix.
    """
    for what, saved, now in (
        ("ranks", manifest["world_size"], world.size),
        ("ZeRO stage", manifest["zero_stage"], stage),
    ):
        if saved != now:
            raise CheckpointError(
                f"{directory}: written with {what} {saved}, this job has {now}; start it with {saved}"
            )
