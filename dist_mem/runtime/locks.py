"""Lock files: one command at a time writes into a folder, also on other hosts where the file system knows locks.

    with held(out / ".lock", f"--out {out}"):               # refused at once if another command has it
    with lock_file(path) as file:
        wait_for_lock(file, check, seconds=900, what="compiling")  # hears signals

The kernel releases the lock of a process that ends in any way. A lock file is never removed while others may wait for
it: they would hold the lock of a file that is gone. Its content names the holder, for messages only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.files import open_regular

POLL_SECONDS = 0.1  # between two attempts: a signal handler that only sets a flag does not end a blocking flock


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, which is made in an existing folder, for the block.

    Args:
        what: the folder or file that is locked, for the message.

    Raises:
        UnusableError: another process holds it; names that process and its host.
        OSError: the file cannot be opened.
    """
    with lock_file(path) as file:
        if not try_lock(file):
            raise UnusableError(f"{what}: another command is writing there ({holder(file)}); wait for it, or end it")
        _sign(file)
        yield
        file.truncate(0)


@contextmanager
def lock_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a lock file, which is made if it is absent."""
    with open_regular(path, "a+b", buffering=0) as file:
        yield file


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file, unless another process holds it; return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes], check: Callable[[], None], *, seconds: float, what: str) -> None:
    """Lock an open file as soon as no other process holds it.

    Args:
        check: called after each attempt; raises what ends the wait, as a signal that was received.
        seconds: the longest wait.
        what: what the holder does meanwhile, for the message.

    Raises:
        UnfitError: the wait was longer than `seconds`.
    """
    end = time.monotonic() + seconds
    while not try_lock(file):
        check()
        if time.monotonic() > end:
            raise UnfitError(f"{what}: another process ({holder(file)}) has not ended it for {seconds:,.0f} s")
        time.sleep(POLL_SECONDS)


def holder(file: IO[bytes]) -> str:
    """Return who holds a lock file, as it says itself."""
    file.seek(0)
    return file.read(200).decode("utf-8", "replace").strip() or "an unknown process"


def _sign(file: IO[bytes]) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {node_name()}".encode())
