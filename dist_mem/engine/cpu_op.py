"""DeepSpeed's communication op for CPUs: the lock under which it is compiled, and its shared memory.

One process of a node at a time compiles or loads it. torch's lock for that is a file that a killed process leaves
behind, and the next one waits for it forever. Ours is a kernel lock, which ends with its process; the content of its
file shows whether that process was still building. Both waits, for the lock and for the compiler, hear signals. The op
has 66 MiB per rank in /dev/shm, which it never removes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_mem.errors import UnfitError
from dist_mem.runtime.distributed import print_on_rank0
from dist_mem.runtime.locks import POLL_SECONDS, lock_file, sign, wait_for_lock
from dist_mem.runtime.ranks import rendezvous_address

CPU_OP = "deepspeed_shm_comm"  # compiled at the first start
SHM = Path("/dev/shm")
_BUFFER = "deepspeed_allreduce_buffer"  # prefix of the names
_LONGEST_COMPILATION = 900.0  # seconds; it takes 30 to 150
_ENDING_SECONDS = 5.0  # for a compiler to end
_COMPILING = "compiling DeepSpeed's CPU communication op, once for this environment: 1 to 3 minutes"


@contextmanager
def building(directory: Path, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the directory, and remove a lock of torch's that a killed job of ours left in it.

    Args:
        check: called while another process holds it; raises what ends the wait, as a signal that was received.

    Raises:
        ValueError: another program's lock is older than any compilation takes.
        UnfitError: another process holds it for longer than that.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left_behind = directory / "lock"
    with lock_file(directory / "dist_mem.lock") as lock:
        what = f"{'loading or compiling' if is_compiled(directory) else 'compiling'} {CPU_OP}"
        wait_for_lock(lock, check, seconds=_LONGEST_COMPILATION, what=what, say=print_on_rank0)
        if os.fstat(lock.fileno()).st_size:
            left_behind.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            if (age := time.time() - left_behind.stat().st_mtime) > _LONGEST_COMPILATION:
                reason = f"{left_behind} is {age / 60:.0f} minutes old: a killed process has left it, remove it"
                raise ValueError(reason)
        sign(lock)
        yield
        lock.truncate(0)


def is_compiled(directory: Path) -> bool:
    """Return whether the op was compiled there; its compiler or sources may have changed since."""
    return (directory / f"{CPU_OP}.so").exists()


def load(directory: Path, builder: Callable[[], object], check: Callable[[], None] = lambda: None) -> None:
    """Load the op in `directory`, which is held, by DeepSpeed's builder, which compiles it if need be; say so.

    Args:
        check: called meanwhile; raises what ends the compiler, and this.

    Raises:
        UnfitError: the compiler has not ended for longer than any compilation takes.
    """
    began, is_said = time.monotonic(), not is_compiled(directory)
    if is_said:
        print_on_rank0(_COMPILING)
    threads = ThreadPoolExecutor(1, thread_name_prefix="compiler")  # the main thread hears signals
    loading = threads.submit(builder)
    try:
        while not wait([loading], POLL_SECONDS).done:
            if any(map(_children, _ninjas())):  # without a child it only looks whether something has changed
                check()  # to load it takes no time that is worth a stop
                if not is_said:  # its compiler or sources have changed
                    is_said = True
                    print_on_rank0(_COMPILING)
            if (waited := time.monotonic() - began) > _LONGEST_COMPILATION:
                raise UnfitError(f"{CPU_OP} is not compiled after {waited / 60:.0f} minutes; start it again")
    except BaseException:
        _end_compilers(loading)
        raise
    finally:
        threads.shutdown(wait=False)
    loading.result()


def _ninjas() -> list[int]:
    """Return the processes of ninja that this one has started."""
    found = []
    for pid in _children("self"):
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_bytes().strip() == b"ninja":
                found.append(pid)
    return found


def _children(pid: int | str) -> list[int]:
    """Return the processes that a process has started."""
    found = list[int]()
    with suppress(OSError):  # it, or a thread of it, has just ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text(encoding="ascii").split())
    return found


def _end_compilers(loading: Future[object]) -> None:
    """End ninja, which ends its compilers and removes what is half written, and the next one if there is one."""
    end = time.monotonic() + _ENDING_SECONDS
    while not loading.done() and time.monotonic() < end:
        for pid in _ninjas():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait([loading], POLL_SECONDS)


def drop_buffer_name(rank: int) -> None:
    """Unlink this rank's buffer; call it after all ranks have finished `start_communication`.

    The ranks keep the buffer mapped, and nothing is left behind when the job ends, however it ends.
    """
    address, port = rendezvous_address()
    (SHM / f"{_BUFFER}_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
