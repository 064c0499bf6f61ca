"""Disks: is the run directory the same everywhere, writable, roomy; do caches lie on the node."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from dist_mem.runtime.environment import compiler_caches
from dist_mem.runtime.files import file_system_of, is_network_file_system
from dist_mem.runtime.findings import Remark, fail, ok, warning

_FLEETING_TYPES = ("tmpfs", "ramfs", "overlay")  # gone with the node, or the container
_RATE_BYTES, _BLOCK_BYTES = 64 << 20, 64 << 10
_SEEING_SECONDS = 5.0  # NFS may not look at the server for a few seconds


def device_of(path: Path) -> str:
    """What is mounted where a path lies, as /dev/sda1 or server:/home."""
    number = path.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[1]
    return "unknown"


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_caches() -> Iterator[Remark]:
    """What compilers and the like write should lie on the node: thousands of ranks would lock and read it."""
    found = []
    for name, (path, variable) in compiler_caches().items():
        kind = file_system_of(path)
        if is_network_file_system(kind):
            fix = "DIST_MEM_CACHES=/tmp, or another disk of the node: a folder of your own is made there"
            fix = "TMPDIR=/tmp, or another disk of the node" if variable == "TMPDIR" else f"unset {variable}, {fix}"
            yield warning("caches", f"{name}: {path} is on {kind}", fix)
        else:
            found.append(kind)
    if len(found) == len(compiler_caches()):
        yield ok("caches", f"on the node ({', '.join(sorted(set(found)))})")


def check_run_dir_type(run_dir: Path) -> Iterator[Remark]:
    """Which file system the run directory is on."""
    kind = file_system_of(run_dir)
    if kind in _FLEETING_TYPES:
        told = f"{run_dir} is on {kind}: it is gone with the node or the container"
        yield warning("run directory", told, "set run_dir to a disk that stays")
    else:
        yield ok("run directory", f"{run_dir} is on {kind}")


def leave_probe(run_dir: Path, name: str) -> Remark | None:
    """Write a file that the other ranks will look for; returns what kept it from being written."""
    probe = run_dir / name
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text(name, encoding="utf-8")
    except OSError as error:
        return cannot_write(error)
    return None


def look_for_probe(run_dir: Path, name: str) -> Iterator[Remark]:
    """Whether a node sees the file of rank 0, and may write beside it."""
    probe, own = run_dir / name, run_dir / f"{name}.{os.getpid()}"
    deadline = time.monotonic() + _SEEING_SECONDS
    while not probe.exists():
        if time.monotonic() > deadline:
            told = f"{run_dir} (on {file_system_of(run_dir)} here) is not the folder that rank 0 has"
            fix = "set run_dir to a folder that all nodes share, and mount it on this node"
            yield fail("run directory", told, fix, blames_node=True)
            return
        time.sleep(0.05)
    try:
        own.write_text(name, encoding="utf-8")
        own.unlink()
    except OSError as error:
        yield cannot_write(error)


def cannot_write(error: OSError) -> Remark:
    """The run directory, of a node that cannot write there."""
    fix = "make room there (quota, inodes), or the rights to write; or set run_dir to another disk"
    return fail("run directory", f"cannot be written: {error}", fix, blames_node=True)


def check_room(run_dir: Path, *, num_bytes: int, num_files: int, kept: int) -> Iterator[Remark]:
    """Whether the disk has bytes and inodes for the checkpoints that will be there at once.

    Args:
        num_bytes, num_files: of one checkpoint.
        kept: checkpoints still to be written until the oldest is deleted.
    """
    stat = os.statvfs(existing(run_dir))
    free, size = stat.f_bavail * stat.f_frsize, _size(num_bytes)
    told = f"{_size(free)} free, {kept} checkpoints of {size} are to come"
    fix = "make room, keep fewer (checkpoint.keep_last), or set run_dir to another disk"
    if free < num_bytes * kept:
        yield fail("disk room", told, fix)
    else:
        yield ok("disk room", told)
    is_counted = 0 <= stat.f_favail <= stat.f_files and stat.f_files > 0  # some file systems do not, or say -1
    if is_counted and stat.f_favail < num_files * kept:
        yield fail("inodes", f"{stat.f_favail:,} free, {kept} checkpoints have {num_files * kept:,} files", fix)
    elif is_counted:
        yield ok("inodes", f"{stat.f_favail:,} free")


def check_quota(run_dir: Path, num_bytes: int) -> Iterator[Remark]:
    """What the `quota` command tells of this user on the run directory's file system, if it tells anything.

    Args:
        num_bytes: that are to be written.
    """
    program, device = shutil.which("quota"), device_of(existing(run_dir))
    if program is None:
        return
    try:
        told = subprocess.run([program, "-w", "-p"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return  # a server that does not answer: what counts is the writing, which is tried too
    for line in told.stdout.splitlines():
        words = line.split()
        if words[:1] == [device] and len(words) >= 4:
            used, *limits = (int(word.rstrip("*")) * 1024 for word in words[1:4])
            limit = min((one for one in limits if one), default=0)
            if limit:
                yield _quota_remark(limit - used, num_bytes)


def _quota_remark(left: int, num_bytes: int) -> Remark:
    told = f"{_size(max(left, 0))} of yours left, checkpoints take {_size(num_bytes)}"
    return fail("quota", told, "delete, or ask for more; or set run_dir") if left < num_bytes else ok("quota", told)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def write_rate(run_dir: Path) -> float:
    """Bytes a second that this process writes into the run directory, flushed: 64 MiB, or less on a disk that is full.

    Raises:
        OSError: it cannot: a quota is used up, say.
    """
    stat = os.statvfs(run_dir)
    num_blocks = max(1, min(_RATE_BYTES, stat.f_bavail * stat.f_frsize // 4) // _BLOCK_BYTES)
    path = run_dir / f".rate-{os.getpid()}"
    block = os.urandom(_BLOCK_BYTES)  # some file systems compress
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(num_blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return num_blocks * _BLOCK_BYTES / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)
