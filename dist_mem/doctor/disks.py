"""Disk checks: the run directory is shared, writable and has room for checkpoints; caches are on the node."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dist_mem.block import model_spec
from dist_mem.checkpoint.manifest import list_steps
from dist_mem.config import CheckpointConfig, Config
from dist_mem.data.directory import local_dir
from dist_mem.data.tokenizers.registry import FILE_NAMES, JSON_NAME
from dist_mem.estimate.step_time import checkpoint_bytes
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.estimate.zero import sizes_of
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.compilers import compiler_caches
from dist_mem.runtime.file_systems import file_system_of, is_network_file_system
from dist_mem.runtime.files import partial_of
from dist_mem.supervision.findings import Remark, fail, ok, warning

_FLEETING_TYPES = ("tmpfs", "ramfs", "overlay")  # gone with the node, or the container
_SEEING_SECONDS = 5.0  # NFS clients may cache directory listings for a few seconds
_FILES_PER_RANK, _OTHER_FILES = 1, 13  # tensors; manifest, configuration, tokenizer, folders
_BYTES_PER_RANK = 10_000  # random state, headers


def nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_caches() -> Iterator[Remark]:
    """Check that compiler caches are on the node; on a shared disk thousands of ranks would lock and read them."""
    found = []
    for name, (path, variable) in compiler_caches().items():
        kind = file_system_of(path)
        if is_network_file_system(kind):
            fix = "DIST_MEM_CACHES=/tmp, or another disk of the node: a folder for your user is created there"
            fix = "TMPDIR=/tmp, or another disk of the node" if variable == "TMPDIR" else f"unset {variable}, {fix}"
            yield warning("caches", f"{name}: {path} is on {kind}", fix)
        else:
            found.append(kind)
    if len(found) == len(compiler_caches()):
        yield ok("caches", f"on the node ({', '.join(sorted(set(found)))})")


def check_run_dir_type(run_dir: Path) -> Iterator[Remark]:
    """Check that the run directory is on a persistent file system."""
    kind = file_system_of(run_dir)
    if kind in _FLEETING_TYPES:
        text = f"{run_dir} is on {kind}: it disappears with the node or the container"
        yield warning("run directory", text, "set run_dir to a persistent disk")
    else:
        yield ok("run directory", f"{run_dir} is on {kind}")


def write_probe(run_dir: Path, name: str) -> Iterator[Remark]:
    """Write a file that the other ranks will look for; yield a finding if it cannot be written."""
    probe = run_dir / name
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text(name, encoding="utf-8")
    except OSError as error:
        yield cannot_write(error)


def look_for_probe(run_dir: Path, name: str) -> Iterator[Remark]:
    """Check that this node sees the file of rank 0 and can write beside it."""
    probe, written = run_dir / name, partial_of(run_dir / name)
    deadline = time.monotonic() + _SEEING_SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            text = f"{run_dir} (on {file_system_of(run_dir)} here) is not the folder that rank 0 has"
            fix = "set run_dir to a folder that all nodes share, and mount it on this node"
            yield fail("run directory", text, fix, blames_node=True)
            return
        time.sleep(0.05)
    try:
        written.write_text(name, encoding="utf-8")
        written.unlink()
    except OSError as error:
        yield cannot_write(error)


def cannot_write(error: OSError) -> Remark:
    """Return the finding that this node cannot write to the run directory."""
    fix = "make room there (quota, inodes), or the rights to write; or set run_dir to another disk"
    return fail("run directory", f"cannot be written: {error}", fix, blames_node=True)


def check_room(run_dir: Path, one: CheckpointFiles, *, kept: int) -> Iterator[Remark]:
    """Check that the disk has bytes and inodes for the checkpoints that will exist at the same time.

    Args:
        one: the size of a checkpoint.
        kept: checkpoints still to be written until the oldest is deleted.
    """
    stat = os.statvfs(nearest_existing(run_dir))
    free, size = stat.f_bavail * stat.f_frsize, _size(one.num_bytes)
    text = f"{_size(free)} free, {kept} checkpoints of {size} are to come"
    fix = "make room, keep fewer (checkpoint.keep_last), or set run_dir to another disk"
    if free < one.num_bytes * kept:
        yield fail("disk room", text, fix)
    else:
        yield ok("disk room", text)
    is_counted = 0 <= stat.f_favail <= stat.f_files and stat.f_files > 0  # some file systems do not count, or report -1
    if is_counted and stat.f_favail < one.num_files * kept:
        yield fail("inodes", f"{stat.f_favail:,} free, {kept} checkpoints have {one.num_files * kept:,} files", fix)
    elif is_counted:
        yield ok("inodes", f"{stat.f_favail:,} free")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


class CheckpointFiles(NamedTuple):
    """The disk use of one checkpoint."""

    num_bytes: int
    num_files: int


def checkpoint_size(config: Config, world_size: int) -> CheckpointFiles:
    """Return the size of weights, optimizer state, memories of all lanes, and tokenizer."""
    path, spec = local_dir(config.data), model_spec(config, vocab_size_of(config.data, config.model))
    sizes = sizes_of(spec, DTYPES[config.train.precision], config.optimizer)
    tokenizer = sum((path / name).stat().st_size for name in (JSON_NAME, *FILE_NAMES) if (path / name).exists())
    num_bytes = checkpoint_bytes(config.train, sizes, world_size=world_size) + tokenizer + _BYTES_PER_RANK * world_size
    return CheckpointFiles(num_bytes, _FILES_PER_RANK * world_size + _OTHER_FILES)


def checkpoints_to_come(rules: CheckpointConfig, run_dir: Path) -> int:
    """Return how many more will exist at once: those that `checkpoint.keep_last` keeps, and the one being written."""
    kept = 2 if rules.keep_last is None else rules.keep_last + (rules.keep_best or 0) + 1
    return max(1, kept - len(list_steps(run_dir)))
