"""The protocol by which a checkpoint comes to exist completely or not at all.

    staging directory -> every rank writes, flushes and hashes its own files in one pass -> vote -> manifest -> rename
    -> pointer `latest` -> retention

    RUN/checkpoints/step-00001000/
        engine/rank-00003.safetensors   what rank 3 owns of parameters and optimizer, see engine_files.py
        lanes/rank-00003.safetensors    the memory state and the cursor of every lane of rank 3
        rng/rank-00003.safetensors      random generators of rank 3
        engine.json                     which rank has which range of which parameter
        config.yaml, memory/*.py        the configuration, unresolved, and memories from outside the package
        tokenizer/                      the tokenizer, as in a data directory
        manifest.json                   written last: sizes and SHA-256 of all files, lane id -> file and row

Files and flushes are a few a rank, whatever the model. Ranks share the file system of the run directory.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.engine_files import ENGINE_JSON, Range, engine_index
from dist_mem.checkpoint.manifest import run_of, step_dir, write_manifest
from dist_mem.checkpoint.retention import prune
from dist_mem.checkpoint.snapshot import Snapshot
from dist_mem.checkpoint.tensor_file import safetensors_parts
from dist_mem.config import CheckpointConfig
from dist_mem.runtime.distributed import AgreedError, SideChannel, World, describe_error, name_failures
from dist_mem.runtime.files import free_name, fsync_path, write_hashed, write_text
from dist_mem.runtime.lease import refuse_if_taken_over

_LIBRARIES = ("torch", "deepspeed", "dist-mem")
_MARGIN = 1 << 20  # bytes that the disk must have besides, for headers and for what else is written meanwhile


class Written(NamedTuple):
    """A checkpoint that is on disk."""

    path: Path
    num_bytes: int
    num_files: int
    num_fsyncs: int
    messages: list[str]  # of retention


class Share(NamedTuple):
    """What a rank tells rank 0 of its files."""

    entries: dict[str, Any]  # of the manifest, by name
    lanes: dict[str, tuple[str, int]]  # lane id -> file, row
    ranges: list[Range]  # of the engine's file
    error: str | None


def write_checkpoint(
    snapshot: Snapshot,
    *,
    run_dir: Path,
    world: World,
    channel: SideChannel,
    rules: CheckpointConfig,
    flush_records: Callable[[], None],
    broken: Sequence[Path] = (),
) -> Written:
    """Write the checkpoint of a snapshot and delete those that `rules` no longer keep. Every rank calls it.

    Args:
        flush_records: puts on the disk what the run has logged so far; rank 0 calls it before the commit.
        broken: checkpoints that become `.broken` with this commit.

    Raises:
        AgreedError: on every rank, if any could not write its part; names the ranks.
    """
    final = step_dir(run_dir, snapshot.step)
    partial = final.with_name(f".{final.name}.partial")
    try:
        channel.decided_by_rank0(snapshot.num_bytes, lambda sizes: _open(partial, snapshot, sum(sizes)))
        share = _write_share(partial, snapshot, world.rank)
        return channel.decided_by_rank0(
            share, lambda shares: _finish(partial, final, snapshot, shares, rules, flush_records, broken)
        )
    except AgreedError as error:
        raise AgreedError(
            f"checkpoint {final}: {error}. Earlier checkpoints are whole: mend this, and the same command resumes"
        ) from error


def _open(partial: Path, snapshot: Snapshot, num_bytes: int) -> None:
    """Make the staging directory, if this job may still write and the disk has room for what will be in it."""
    refuse_if_taken_over(run_of(partial))
    partial.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(partial.parent).free
    needed = num_bytes + sum(map(len, snapshot.small_files.values())) + _MARGIN
    if needed > free:
        raise AgreedError(
            f"it needs {needed:,} bytes, {partial.parent} has {free:,} free: make room there, or keep fewer "
            "checkpoints, see checkpoint.keep_last"
        )
    shutil.rmtree(partial, ignore_errors=True)  # of a save that failed; what cannot be removed, mkdir tells of
    partial.mkdir()
    for folder in {Path(name).parent for name in snapshot.small_files} | set(map(Path, snapshot.files)):
        (partial / folder).mkdir(exist_ok=True)


def _write_share(partial: Path, snapshot: Snapshot, rank: int) -> Share:
    """Write this rank's files."""
    entries: dict[str, Any] = {}
    error: Exception | None = None
    try:
        for kind, tensors in snapshot.files.items():
            name = _rank_file(kind, rank)
            entries[name] = write_hashed(partial / name, safetensors_parts(tensors))
    except Exception as caught:  # whatever it is: the others wait for this rank, and raise it too
        error = caught
    rows = enumerate(snapshot.files["lanes"]["lane_ids"].tolist())
    lanes = {str(lane): (_rank_file("lanes", rank), row) for row, lane in rows}
    return Share(entries, lanes, snapshot.ranges, describe_error(error))


def _rank_file(kind: str, rank: int) -> str:
    return f"{kind}/rank-{rank:05d}.safetensors"


def _finish(
    partial: Path,
    final: Path,
    snapshot: Snapshot,
    shares: Sequence[Share],
    rules: CheckpointConfig,
    flush_records: Callable[[], None],
    broken: Sequence[Path],
) -> Written:
    """Commit what all ranks have written, or remove it: on a full disk it would take the room of the next one."""
    refuse_if_taken_over(run_of(final))  # before anything is removed: the other job's directory has the same name
    try:
        failure = name_failures([share.error for share in shares], "writing")
        if failure is not None:
            raise AgreedError(failure)
        flush_records()  # a resumed run makes no point up to this step again
        written = _commit(partial, final, snapshot, shares, broken)
        return written._replace(messages=prune(run_of(final), snapshot.step, rules))
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _commit(partial: Path, final: Path, snapshot: Snapshot, shares: Sequence[Share], broken: Sequence[Path]) -> Written:
    index = engine_index(snapshot.engine, [share.ranges for share in shares])
    small_files = {**snapshot.small_files, ENGINE_JSON: (json.dumps(index, sort_keys=True) + "\n").encode()}
    own = {name: write_hashed(partial / name, [content]) for name, content in small_files.items()}
    files = {name: entry for entries in (own, *(share.entries for share in shares)) for name, entry in entries.items()}
    folders = {(partial / name).parent for name in files} - {partial}
    for folder in folders:
        fsync_path(folder)
    write_manifest(partial, _manifest(snapshot, files, shares))  # flushes the staging directory too
    for old in {final, *(final.with_name(path.name) for path in broken)}:  # passed over, or it would have been used
        if old.exists():
            old.rename(free_name(old.with_name(f"{old.name}.broken")))
    partial.rename(final)
    fsync_path(final.parent)
    write_text(final.parent / "latest", final.name + "\n")
    num_files = len(files) + 2  # manifest and pointer
    num_directories = len(folders) + 3  # staging, and the names of checkpoint and pointer
    num_bytes = sum(entry["bytes"] for entry in files.values())
    return Written(final, num_bytes, num_files, num_files + num_directories, [])


def _manifest(snapshot: Snapshot, files: Mapping[str, Any], shares: Sequence[Share]) -> dict[str, Any]:
    return {
        "step": snapshot.step,
        "world_size": len(shares),
        "versions": {name: version(name) for name in _LIBRARIES} | {"python": platform.python_version()},
        **snapshot.metadata,
        "files": dict(sorted(files.items())),
        "lanes": {lane: row for share in shares for lane, row in share.lanes.items()},
    }
