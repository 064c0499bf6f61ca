"""What a rank finds on its own node, without a configuration: limits, rights, shared memory, compiler, time left."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dist_mem.engine.shared_memory import BUFFER, SHM
from dist_mem.runtime.distributed import World
from dist_mem.runtime.environment import compiler_caches, cpp_compiler, job_end
from dist_mem.runtime.findings import Remark, fail, ok, warning

GOOD_OPEN_FILES = 4096  # what sites set for training; a rank of a large job needs hundreds
_OWN_FILES, _FILES_A_PEER = 200, 4  # libraries and shards; the groups of gloo or NCCL have sockets to every rank
GOOD_PROCESSES = 4096  # threads count too
_SHM_BYTES_A_RANK = 80 * 2**20  # of DeepSpeed's buffer, 66 MiB, and of the readers' queues
_NEW_SECONDS = 60.0
_SHORT_SECONDS = 600.0


def check_machine(world: World) -> Iterator[Remark]:
    """Checks of a node, for its first rank to make."""
    yield _check_umask()
    yield from _check_shared_memory(world.local_size)
    if world.device.type == "cpu":
        yield _check_compiler()
    yield from _check_time_left()


def check_limits(world_size: int) -> Iterator[Remark]:
    """Limits of this process, for every rank to check; soft ones are raised where they may be."""
    needed = _OWN_FILES + _FILES_A_PEER * world_size
    files = _raised(resource.RLIMIT_NOFILE, max(GOOD_OPEN_FILES, needed))
    fix = f"ulimit -n {GOOD_OPEN_FILES} before the start, or nofile in /etc/security/limits.conf"
    if files < needed:
        yield fail("open files", f"{files} may be open, a rank needs {needed}", fix, blames_node=True)
    elif files < GOOD_OPEN_FILES:
        yield warning("open files", f"{files} may be open, {GOOD_OPEN_FILES} are usual", fix)
    else:
        yield ok("open files", f"{files:,} may be open")
    processes = _raised(resource.RLIMIT_NPROC, GOOD_PROCESSES)
    if processes < GOOD_PROCESSES:
        fix = f"ulimit -u {GOOD_PROCESSES}, or nproc in /etc/security/limits.conf"
        yield warning("processes", f"{processes} of this user, threads included", fix)


def _raised(kind: int, good: int) -> int:
    """The soft limit, raised up to `good` as far as the hard one allows."""
    soft, hard = resource.getrlimit(kind)
    soft, hard = (2**31 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft < good and soft < hard:
        soft = min(good, hard)
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    return soft


def _check_umask() -> Remark:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    umask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    fix = "umask 022 before the start"
    if umask & 0o700:
        return fail("umask", f"{umask:04o}: you could not read the checkpoints of this job", fix)
    if not umask & 0o002:
        return warning("umask", f"{umask:04o}: everybody may change the files of this job", fix)
    return ok("umask", f"{umask:04o}")


def _check_shared_memory(local_size: int) -> Iterator[Remark]:
    if not SHM.is_dir():
        yield fail("/dev/shm", "is missing", "mount a tmpfs there; containers: --ipc=host", blames_node=True)
        return
    stat = os.statvfs(SHM)
    free, needed = stat.f_bavail * stat.f_frsize, _SHM_BYTES_A_RANK * local_size
    dead = [path for path in SHM.glob(f"{BUFFER}_*") if _is_dead(path)]
    if dead:
        num_bytes = sum(path.stat().st_size for path in dead)
        told = f"{len(dead)} buffers of dead ranks hold {num_bytes / 2**20:,.0f} MiB of memory"
        yield warning("/dev/shm", told, f"rm {' '.join(map(str, dead[:2]))}{' ...' if len(dead) > 2 else ''}")
    if free < needed:
        told = f"{free / 2**20:,.0f} MiB free, {local_size} ranks want {needed / 2**20:,.0f}"
        yield warning("/dev/shm", told, "mount it larger; containers: --shm-size=8g or --ipc=host")
    elif not dead:
        yield ok("/dev/shm", f"{free / 2**30:,.1f} GiB free")


def _is_dead(path: Path) -> bool:
    """Whether it is a file of this user's that no process seen from here uses; what is new may be mapped soon."""
    stat = path.stat()
    return stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _NEW_SECONDS and not _is_mapped(path)


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:  # it has ended, or is somebody else's: then it does not hold our file
            continue
    return False


def _check_compiler() -> Remark:
    compiler, ninja = cpp_compiler(), shutil.which("ninja")
    if compiler and ninja:
        return ok("C++ compiler", compiler)
    extensions, _ = compiler_caches()["DeepSpeed's ops"]
    if any(extensions.glob("**/deepspeed_shm_comm.so")):
        return ok("C++ compiler", "none, and none is needed: DeepSpeed's op is compiled")
    missing, fix = "ninja", "pip install ninja"
    if not compiler:
        missing, fix = "C++ compiler", "apt-get install g++, dnf install gcc-c++, or module load gcc"
    return fail("C++ compiler", f"no {missing}: DeepSpeed compiles an op at the first start", fix, blames_node=True)


def _check_time_left() -> Iterator[Remark]:
    end = job_end()
    if end is None:
        return
    left = end - time.time()
    if left <= 0:
        told = f"DIST_MEM_JOB_END was {-left:,.0f} s ago by this node's clock"
        yield fail("time left", told, "unset it outside of a job; else set the clock of this node", blames_node=True)
    elif left < _SHORT_SECONDS:
        yield warning("time left", f"{left:,.0f} s of this job", "ask for more: --time, launch.time")
    else:
        yield ok("time left", f"{left / 3600:,.1f} h of this job")
