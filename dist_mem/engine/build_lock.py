"""One process of a node at a time compiles or loads what torch's extension builder keeps in a directory.

torch's own lock there is a file that a killed process leaves behind, and the next one waits for it without an end. Ours
is the kernel's and dies with its process; what stands in its file tells whether that process was in the midst of it.
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
    """Hold the directory; a lock of torch's that a killed job of ours has left in it is removed.

    Raises:
        ValueError: some other program's lock is there for longer than any compilation takes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left_behind = directory / "lock"
    with (directory / "dist_mem.lock").open("a+", encoding="utf-8") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        own.seek(0)
        if own.read():
            left_behind.unlink(missing_ok=True)
        _refuse_stale(left_behind)
        own.write("building")
        own.flush()
        yield
        own.truncate(0)


def _refuse_stale(lock: Path) -> None:
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > _LONGEST_COMPILATION:
        raise ValueError(f"{lock} is {age / 60:.0f} minutes old: a killed process has left it, remove it")
