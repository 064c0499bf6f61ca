"""DeepSpeed's communication op for CPUs: the lock under which it is compiled, and its shared memory.

One process of a node at a time compiles or loads it. torch's lock for that is a file that a killed process leaves
behind, and the next one waits for it forever. Ours is a kernel lock, which ends with its process; the content of its
file shows whether that process was still building. The op has 66 MiB per rank in /dev/shm, which it never removes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_mem.runtime.ranks import rendezvous_address

CPU_OP = "deepspeed_shm_comm"  # compiled at the first start
SHM = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"  # prefix of the names
_LONGEST_COMPILATION = 900.0  # seconds; it takes 30 to 150


@contextmanager
def building(directory: Path) -> Iterator[None]:
    """Hold the directory, and remove a lock of torch's that a killed job of ours left in it.

    Raises:
        ValueError: another program's lock is older than any compilation takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left_behind = directory / "lock"
    with (directory / "dist_mem.lock").open("a+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if lock.read():
            left_behind.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            if (age := time.time() - left_behind.stat().st_mtime) > _LONGEST_COMPILATION:
                reason = f"{left_behind} is {age / 60:.0f} minutes old: a killed process has left it, remove it"
                raise ValueError(reason)
        lock.write("building")
        lock.flush()
        yield
        lock.truncate(0)


def drop_buffer_name(rank: int) -> None:
    """Unlink this rank's buffer; call it after all ranks have finished `start_communication`.

    The ranks keep the buffer mapped, and nothing is left behind when the job ends, however it ends.
    """
    address, port = rendezvous_address()
    (SHM / f"{BUFFER}_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
