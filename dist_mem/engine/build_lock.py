"""A lock on a directory of torch's extension builder: one process of a node at a time compiles or loads.

torch's lock there is a file that a killed process leaves behind, and the next one waits for it forever. Ours is a
kernel lock, which ends with its process; the content of its file shows whether that process was still building.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        _refuse_stale(left_behind)
        lock.write("building")
        lock.flush()
        yield
        lock.truncate(0)


def _refuse_stale(lock: Path) -> None:
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > _LONGEST_COMPILATION:
        raise ValueError(f"{lock} is {age / 60:.0f} minutes old: a killed process has left it, remove it")
