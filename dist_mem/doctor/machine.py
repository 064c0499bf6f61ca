"""Checks of a rank's node that need no configuration: limits, umask, shared memory, compiler, time left."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dist_mem.engine.cpu_op import CPU_OP, SHM
from dist_mem.runtime.compilers import compiler_caches, cpp_compiler
from dist_mem.runtime.distributed import World
from dist_mem.runtime.environment import job_end, variable
from dist_mem.runtime.limits import GOOD_OPEN_FILES, raise_limit, raise_open_files
from dist_mem.supervision.findings import Remark, fail, ok, warning

GOOD_PROCESSES = 4096  # threads count as processes
_SHM_BYTES_PER_RANK = 80 * 2**20  # DeepSpeed's buffer, 66 MiB, and the readers' queues
_SHORT_SECONDS = 600.0


def check_machine(world: World) -> Iterator[Remark]:
    """Run the checks of a node; only its first rank calls this."""
    yield _check_umask()
    yield from check_shared_memory(world.local_size)
    if world.device.type == "cpu":
        yield _check_compiler()
    yield from check_time_left()


def check_limits(world_size: int) -> Iterator[Remark]:
    """Check the limits of this process, after raising soft limits if allowed; every rank calls this."""
    files, needed = raise_open_files(world_size)
    fix = f"ulimit -n {GOOD_OPEN_FILES} before the start, or nofile in /etc/security/limits.conf"
    if files < needed:
        yield fail("open files", f"{files} may be open, a rank needs {needed}", fix, blames_node=True)
    elif files < GOOD_OPEN_FILES:
        yield warning("open files", f"{files} may be open, {GOOD_OPEN_FILES} are usual", fix)
    else:
        yield ok("open files", f"{files:,} may be open")
    processes = raise_limit(resource.RLIMIT_NPROC, GOOD_PROCESSES)
    if processes < GOOD_PROCESSES:
        fix = f"ulimit -u {GOOD_PROCESSES}, or nproc in /etc/security/limits.conf"
        yield warning("processes", f"{processes} of this user, threads included", fix)


def _check_umask() -> Remark:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    umask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    fix = "umask 022 before the start"
    if umask & 0o700:
        return fail("umask", f"{umask:04o}: you could not read the checkpoints of this job", fix)
    if not umask & 0o002:
        return warning("umask", f"{umask:04o}: everybody may change the files of this job", fix)
    return ok("umask", f"{umask:04o}")


def check_shared_memory(local_size: int) -> Iterator[Remark]:
    if not SHM.is_dir():
        yield fail("/dev/shm", "is missing", "mount a tmpfs there; containers: --ipc=host", blames_node=True)
        return
    stat = os.statvfs(SHM)
    free, needed = stat.f_bavail * stat.f_frsize, _SHM_BYTES_PER_RANK * local_size
    if free < needed:
        text = f"{free / 2**20:,.0f} MiB free, {local_size} ranks need {needed / 2**20:,.0f}"
        yield warning("/dev/shm", text, "mount it larger; containers: --shm-size=8g or --ipc=host")
    else:
        yield ok("/dev/shm", f"{free / 2**30:,.1f} GiB free")


def _check_compiler() -> Remark:
    compiler, ninja = cpp_compiler(), shutil.which("ninja")
    if compiler and ninja:
        return ok("C++ compiler", compiler)
    extensions, _ = compiler_caches()["DeepSpeed's ops"]
    if any(extensions.glob(f"**/{CPU_OP}.so")):
        return ok("C++ compiler", "none, and none is needed: DeepSpeed's op is compiled")
    missing, fix = "ninja", "pip install ninja"
    if not compiler and (requested := variable("CXX")):
        missing, fix = f"C++ compiler {requested!r}, which CXX names", "unset CXX, or set it to one that is on PATH"
    elif not compiler:
        missing, fix = "C++ compiler", "apt-get install g++, dnf install gcc-c++, or module load gcc"
    return fail("C++ compiler", f"no {missing}: DeepSpeed compiles an op at the first start", fix, blames_node=True)


def check_time_left() -> Iterator[Remark]:
    end = job_end()
    if end is None:
        return
    left = end - time.time()
    if left <= 0:
        text = f"DIST_MEM_JOB_END was {-left:,.0f} s ago by this node's clock"
        yield fail("time left", text, "unset it outside of a job; else set the clock of this node", blames_node=True)
    elif left < _SHORT_SECONDS:
        yield warning("time left", f"{left:,.0f} s of this job", "request more: --time, launch.time")
    else:
        yield ok("time left", f"{left / 3600:,.1f} h of this job")
