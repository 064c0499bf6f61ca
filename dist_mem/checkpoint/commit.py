"""Write a checkpoint atomically: it exists completely or not at all.

    staging directory -> every rank writes, flushes and hashes its files in one pass -> vote -> manifest -> rename
    -> pointer `latest` -> retention

    RUN/checkpoints/step-00001000/
        ranks/rank-00003.safetensors    parameters, optimizer state, lanes and random state of rank 3, see rank_file.py
        engine.json                     where the elements of each parameter are, see engine_files.py
        config.yaml, {memory,sinks}/*.py   the unresolved configuration; memories and sinks from outside the package
        tokenizer/                      the tokenizer, in the layout of a data directory
        manifest.json                   written last: size and SHA-256 of every file, lane id -> file and row

Each rank writes and flushes one file, whatever the size of the model. All ranks share the file system of the run
directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dist_mem.checkpoint.engine_files import ENGINE_JSON, engine_index
from dist_mem.checkpoint.manifest import read_manifest, run_of, step_dir, write_manifest
from dist_mem.checkpoint.rank_file import FOLDER, RankFile, rank_file, safetensors_parts, tensors_of_file
from dist_mem.checkpoint.retention import prune
from dist_mem.checkpoint.snapshot import Snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.errors import RunError, UnfitError, UnusableError
from dist_mem.runtime.distributed import RankFailure, World, agree_on_error, describe_failure
from dist_mem.runtime.files import free_name, fsync_path, write_hashed, write_text
from dist_mem.runtime.versions import code_versions
from dist_mem.supervision.lease import refuse_if_taken_over
from dist_mem.supervision.side_channel import SideChannel

_MARGIN = 1 << 20  # bytes of free space kept for file headers and for other files written during the save


class WrittenCheckpoint(NamedTuple):
    """A checkpoint on disk."""

    path: Path
    num_bytes: int
    num_files: int
    num_fsyncs: int
    messages: list[str]  # of retention, for the user


class RankShare(NamedTuple):
    """The description of a rank's file that it sends to rank 0."""

    entry: dict[str, Any]  # of the file, in the manifest; empty if it was not written
    lane_ids: list[int]  # in the order of the rows in its file
    ranges: np.ndarray  # (ranges, 3), see `engine_ranges`
    error: RankFailure | None  # None: it was written


def write_checkpoint(
    snapshot: Snapshot,
    *,
    run_dir: Path,
    world: World,
    channel: SideChannel,
    rules: CheckpointConfig,
    flush_records: Callable[[], None],
    broken: Sequence[Path] = (),
) -> WrittenCheckpoint:
    """Write a snapshot as a checkpoint and delete the checkpoints that `rules` no longer keep; collective.

    Args:
        flush_records: flushes the run's logs to disk; rank 0 calls it before the commit.
        broken: checkpoints that this commit renames to `.broken`.

    Raises:
        UnfitError: on every rank, if any rank could not write its part; names those ranks.
    """
    final = step_dir(run_dir, snapshot.step)
    partial = final.with_name(f".{final.name}.partial")
    try:
        channel.decide_on_rank0(snapshot.num_bytes, lambda sizes: _open(partial, snapshot, sum(sizes)))
        share = _write_share(partial, snapshot, world.rank)
        return channel.decide_on_rank0(
            share, lambda shares: _finish(partial, final, snapshot, shares, rules, flush_records, broken)
        )
    except (UnfitError, UnusableError) as error:
        raise UnfitError(
            f"checkpoint {final}: {error}. Earlier checkpoints are intact: fix this, and the same command resumes"
        ) from error


def rehearse_checkpoint(snapshot: Snapshot, *, run_dir: Path, world: World, channel: SideChannel) -> None:
    """Write all files of a checkpoint, open two of them, and remove them; collective, before the first step.

    Args:
        snapshot: a rehearsal, in which the tensors of the engine and the memories are empty.

    Raises:
        UnfitError: on every rank, if any rank could not write its part; names those ranks.
        UnusableError: likewise, or no start could read what is written.
    """
    partial = step_dir(run_dir, snapshot.step).with_name(".rehearsal.partial")

    def fill(shares: Sequence[RankShare]) -> None:
        try:
            if (failure := _failure_of(shares)) is not None:
                # Where some ranks could write, the others' machines are unfit, and another start may succeed.
                raise failure if all(share.error for share in shares) else UnfitError(str(failure))
            _fill(partial, snapshot, shares)
            read_manifest(partial)
            RankFile(partial / rank_file(0), "lanes")
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    try:
        channel.decide_on_rank0(snapshot.num_bytes, lambda sizes: _open(partial, snapshot, sum(sizes)))
        channel.decide_on_rank0(_write_share(partial, snapshot, world.rank), fill)
    except (UnfitError, UnusableError) as error:
        raise type(error)(
            f"no checkpoint can be written into {partial.parent}: {error}. Earlier checkpoints are intact: fix this, "
            "and the same command resumes"
        ) from error


def _open(partial: Path, snapshot: Snapshot, num_bytes: int) -> None:
    """Check that this job still owns the run and that the disk has room; create the staging directory."""
    refuse_if_taken_over(run_of(partial))
    partial.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(partial.parent).free
    needed = num_bytes + sum(map(len, snapshot.small_files.values())) + _MARGIN
    if needed > free:
        raise UnfitError(
            f"it needs {needed:,} bytes, {partial.parent} has {free:,} free: make room there, or keep fewer "
            "checkpoints, see checkpoint.keep_last"
        )
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that failed; if it cannot be removed, mkdir raises
    partial.mkdir()
    for folder in {Path(name).parent for name in snapshot.small_files} | {Path(FOLDER)}:
        (partial / folder).mkdir(exist_ok=True)


def _write_share(partial: Path, snapshot: Snapshot, rank: int) -> RankShare:
    """Write this rank's file."""
    entry: dict[str, Any] = {}
    error: Exception | None = None
    try:
        entry = write_hashed(partial / rank_file(rank), safetensors_parts(tensors_of_file(snapshot.parts)))
    except Exception as caught:  # of any kind: the other ranks wait for this one, and raise the error too
        error = caught
    return RankShare(entry, snapshot.parts["lanes"]["lane_ids"].tolist(), snapshot.ranges, describe_failure(error))


def _finish(
    partial: Path,
    final: Path,
    snapshot: Snapshot,
    shares: Sequence[RankShare],
    rules: CheckpointConfig,
    flush_records: Callable[[], None],
    broken: Sequence[Path],
) -> WrittenCheckpoint:
    """Commit the files of all ranks, or remove them: on a full disk they would take the room of the next save."""
    refuse_if_taken_over(run_of(final))  # before removing anything: the other job's staging directory has the same name
    try:
        if (failure := _failure_of(shares)) is not None:
            raise UnfitError(str(failure))  # whatever the reason: the run has written here before
        flush_records()  # a resumed run does not log the points up to this step again
        written = _commit(partial, final, snapshot, shares, broken)
        return written._replace(messages=prune(run_of(final), snapshot.step, rules))
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _failure_of(shares: Sequence[RankShare]) -> RunError | None:
    return agree_on_error([share.error for share in shares], "writing")


def _fill(partial: Path, snapshot: Snapshot, shares: Sequence[RankShare]) -> tuple[dict[str, Any], set[Path]]:
    """Write the small files and the manifest beside the files of the ranks; return all entries, and the folders."""
    index = engine_index(snapshot.engine, [share.ranges for share in shares])
    small_files = {**snapshot.small_files, ENGINE_JSON: (json.dumps(index, sort_keys=True) + "\n").encode()}
    small = {name: write_hashed(partial / name, [content]) for name, content in small_files.items()}
    files = {**small, **{rank_file(rank): share.entry for rank, share in enumerate(shares)}}
    folders = {(partial / name).parent for name in files} - {partial}
    for folder in folders:
        fsync_path(folder)
    write_manifest(partial, _manifest(snapshot, files, shares))  # also flushes the staging directory
    return files, folders


def _commit(
    partial: Path, final: Path, snapshot: Snapshot, shares: Sequence[RankShare], broken: Sequence[Path]
) -> WrittenCheckpoint:
    files, folders = _fill(partial, snapshot, shares)
    for old in {final, *(final.with_name(path.name) for path in broken)}:  # a checkpoint of this step was passed over
        if old.exists():
            old.rename(free_name(old.with_name(f"{old.name}.broken")))
    partial.rename(final)
    fsync_path(final.parent)
    write_text(final.parent / "latest", final.name + "\n")
    num_files = len(files) + 2  # the manifest and the pointer
    num_directories = len(folders) + 3  # the staging directory, and the parent directory after each of two renames
    num_bytes = sum(entry["bytes"] for entry in files.values())
    return WrittenCheckpoint(final, num_bytes, num_files, num_files + num_directories, [])


def _manifest(snapshot: Snapshot, files: Mapping[str, Any], shares: Sequence[RankShare]) -> dict[str, Any]:
    return {
        "step": snapshot.step,
        "world_size": len(shares),
        "versions": code_versions(),
        **snapshot.metadata,
        "files": dict(sorted(files.items())),
        "lanes": {
            str(lane): (rank_file(rank), row)
            for rank, share in enumerate(shares)
            for row, lane in enumerate(share.lane_ids)
        },
    }
