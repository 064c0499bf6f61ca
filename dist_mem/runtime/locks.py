"""Lock files: one command at a time writes into a folder, also on other hosts where the file system knows locks.

    with held_folder(out, f"--out {out}"):                     # refused at once if another command has it
    with lock_file(path) as file:
        wait_for_lock(file, check, seconds=900, what="compiling")  # hears signals

The kernel releases the lock of a process that ends in any way. `hold_lock` removes its file at the end, before it
releases the lock, so that nothing is left in the folder; whoever gets the lock of a file that is gone opens the new
one. Files that others wait for stay. The content of a file names the holder, for messages only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.files import check_replaceable, open_regular

log = logging.getLogger(__name__)
LOCK_NAME = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # as Lustre without its option flock
SAY_SECONDS = 2.0  # a wait that is shorter is nobody's concern
POLL_SECONDS = 0.1  # between two attempts: a signal handler that only sets a flag does not end a blocking flock


@contextmanager
def hold_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder to write into, which is made, for the block; a new one that a failure leaves empty is removed.

    Raises:
        UnusableError, OSError: as `hold_lock`.
    """
    with _make_folder(folder), hold_lock(folder / LOCK_NAME, what):
        yield


@contextmanager
def _make_folder(folder: Path) -> Iterator[None]:
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # something is in it
                folder.rmdir()
        raise


def check_free(folder: Path, what: str) -> None:
    """Check that no command writes into a folder, before work whose result this one will write there.

    Raises:
        UnusableError, OSError: as `hold_lock`.
    """
    if (folder / LOCK_NAME).exists():
        with hold_lock(folder / LOCK_NAME, what):
            return


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, which is made in an existing folder, for the block.

    Args:
        what: the folder or file that is locked, for the message.

    Raises:
        UnusableError: another process holds it; names that process and its host.
        OSError: the file cannot be opened.
    """
    while True:
        with lock_file(path) as file:
            try:
                is_free = try_lock(file)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning(
                    "%s: its file system has no locks, so nothing keeps another command from writing there", what
                )
                is_free = True
            if not is_free:
                reason = f"another command is writing there ({holder(file)}); wait for it, or end it"
                raise UnusableError(f"{what}: {reason}")
            if not _is_at(path, file):
                continue  # its holder has just removed it
            sign(file)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


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


@contextmanager
def hold_file(path: Path) -> Iterator[None]:
    """Hold a file that is read and written again, or the files PATH.*, for the block; their folder is made.

    A pipe or a device is only written to, and not held.

    Raises:
        UnusableError, OSError: as `hold_lock`; FileExistsError: the path is a folder.
    """
    with _make_folder(path.absolute().parent), ExitStack() as stack:
        if check_replaceable(path):
            stack.enter_context(hold_lock(path.with_name(f".{path.name}{LOCK_NAME}"), str(path)))
        yield


def wait_for_lock(
    file: IO[bytes],
    check: Callable[[], None],
    *,
    seconds: float,
    what: str,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Lock an open file as soon as no other process holds it.

    Args:
        check: called after each attempt; raises what ends the wait, as a signal that was received.
        seconds: the longest wait.
        what: what the holder does meanwhile, for the message.
        say: called once after `SAY_SECONDS`, with who holds the lock and for how long.

    Raises:
        UnfitError: the wait was longer than `seconds`.
    """
    began = time.monotonic()
    is_said = False
    while not try_lock(file):
        check()
        waited = time.monotonic() - began
        if not is_said and waited > SAY_SECONDS:
            is_said = True
            age = max(waited, time.time() - os.fstat(file.fileno()).st_mtime)  # `sign` has written the file
            say(f"waiting for {holder(file)}, which has been {what} for {age:.0f} s")
        if waited > seconds:
            raise UnfitError(f"{what}: another process ({holder(file)}) has not ended it for {seconds:,.0f} s")
        time.sleep(POLL_SECONDS)


def holder(file: IO[bytes]) -> str:
    """Return who holds a lock file, as it says itself."""
    file.seek(0)
    return file.read(200).decode("utf-8", "replace").strip() or "an unknown process"


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sign(file: IO[bytes]) -> None:
    """Write who holds a lock file."""
    with suppress(OSError):  # of a full disk: the lock is held all the same
        file.truncate(0)
        file.write(f"process {os.getpid()} on {node_name()}".encode())
