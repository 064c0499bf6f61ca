"""One job per run directory: a lease file with a heartbeat.

Two jobs that write the same checkpoints destroy each other's. The first job creates `RUN/lease.json` exclusively and
touches it every few seconds; a second job is refused as soon as it sees a touch. The lease of a dead job is taken over:
at once if its process is visibly gone (same host), else, as after a reboot, after `STALE_SECONDS` without a touch. No
two clocks are compared: those of hosts and file servers differ, by hours on unattended machines.

If several jobs find the same dead lease, the one that creates its claim, a file named after the lease's content, takes
it. The claim then replaces the lease; a live lease is never moved. If the claiming job dies too, the next job claims
its claim, and so on. No locks are used: not every file system of a cluster has them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_mem.errors import TakenOverError, UnfitError
from dist_mem.runtime.files import fsync_path, make_folder, open_regular, read_regular
from dist_mem.runtime.processes import is_running, pid_scope, process_stat

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # between two checks by a frequent writer: on a network file system each check asks the server
FORMAT_VERSION = 1
_ATTEMPTS = 4  # to take a lease that changes hands meanwhile

log = logging.getLogger(__name__)


class LeaseError(UnfitError):
    """Another job holds the run directory."""


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether the holder of a lease is alive; None if this process cannot see it.

    A zombie is dead, and so is a process whose pid belongs to one that started at another time.
    """
    pid, scope = holder.get("pid"), pid_scope()
    if holder.get("host") != socket.gethostname() or not (isinstance(pid, int) and 0 < pid < 1 << 31):
        return None
    if holder.get("sight", scope) != scope:
        return None
    return is_running(pid) and (ticks := process_stat(pid)[1]) in ("", holder.get("started_ticks") or ticks)


def is_abandoned(path: Path, text: str, check: Callable[[], None] = lambda: None) -> bool:
    """Return whether the job that wrote `text` is dead. Raises FileNotFoundError if it releases the lease meanwhile.

    Args:
        check: called while this waits; raises what ends the wait, as a signal that was received.
    """
    holder = _read_holder(text)
    is_alive = _is_alive(holder)
    if is_alive is not None:
        return not is_alive
    log.warning("%s: waiting up to %.0f s for a sign of life of %s", path, STALE_SECONDS, _name(holder))
    first_touch = _last_touch(path)
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        check()
        time.sleep(HEARTBEAT_SECONDS / 10)
        if _last_touch(path) != first_touch:
            return False
    return True


def sign_of_life(run_dir: Path) -> str | None:
    """Return a description of the process that holds a run directory; None if, from one look, none does.

    The lease in a copy of a run directory says nothing of the copy.
    A process on another host counts as alive for `STALE_SECONDS` after its last touch, by this host's clock.
    """
    path = run_dir / "lease.json"
    with suppress(FileNotFoundError):
        holder = _read_holder(text := _read(path))
        if _original(path, text):
            return None
        is_alive, age = _is_alive(holder), max(0.0, time.time() - _last_touch(path) / 1e9)
        if is_alive or (is_alive is None and age < STALE_SECONDS):
            return f"{_name(holder)}, last sign of life {age:.0f} s ago"
    return None


def _last_touch(path: Path) -> int:
    with open_regular(path) as file:  # reopened each time, or NFS answers from its cache
        return os.fstat(file.fileno()).st_mtime_ns


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "a job that is just starting"


def _read(path: Path) -> str:
    """Return the text of a lease, even one that a broken disk has corrupted: rank 0 must not fail on it alone."""
    return read_regular(path).decode(errors="replace")


def _read_holder(text: str) -> dict[str, Any]:
    """Return the content of a lease; {} while it is being written, or if its writer died in the middle."""
    try:
        holder = json.loads(text)
    except (RecursionError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _original(path: Path, text: str) -> Path | None:
    """Return the run directory whose live lease a lease with this text is a copy of; None if it is no copy."""
    run_dir = _read_holder(text).get("run_dir")
    with suppress(OSError, ValueError):
        if isinstance(run_dir, str) and not Path(run_dir).samefile(path.parent):
            return Path(run_dir) if _read(Path(run_dir) / path.name) == text else None
    return None


_held: dict[Path, str] = {}  # text of each lease that this process holds, by path
_looked: dict[Path, float] = {}  # time of the last successful check of each, by `_now`


def _now() -> float:
    """Return seconds of a clock that also runs while this process, or its whole machine, is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def refuse_if_taken_over_throttled(run_dir: Path) -> None:
    """Call `refuse_if_taken_over`, at most once per second; for callers that write frequently."""
    path = (run_dir / "lease.json").resolve()
    if path not in _held or _now() < _looked.get(path, -_LOOK_SECONDS) + _LOOK_SECONDS:
        return
    now = _now()
    with suppress(OSError):  # a transient error of the file system; the next write checks again
        refuse_if_taken_over(run_dir)
        _looked[path] = now


def refuse_if_taken_over(run_dir: Path) -> None:
    """Raise TakenOverError if another job has taken over this process's lease, after a suspension that was too long.

    A missing lease counts as taken over: the other job may have ended already.
    """
    path = run_dir / "lease.json"
    held_text = _held.get(path.resolve())
    if held_text is None:
        return
    try:
        text = _read(path)
    except FileNotFoundError:
        raise TakenOverError(
            f"{path} is gone: another job has taken the run directory over and ended, or somebody has removed the "
            "file. Start the same command again"
        ) from None
    if text != held_text:
        raise TakenOverError(
            f"{run_dir}: {_name(_read_holder(text))} has taken the run directory over; leave it to that job"
        )


def _claim_chain(path: Path) -> list[tuple[Path, str]]:
    """Return the chain of claims with their texts: the lease, its claim, the claim to that claim, and so on."""
    chain: list[tuple[Path, str]] = []
    heir = path
    with suppress(FileNotFoundError):
        while True:
            text = _read(heir)
            chain.append((heir, text))
            heir = _claim(heir, text)
    return chain


def _claim(path: Path, text: str) -> Path:
    """Return the path by which a job claims the lease with this text; only one job can create it."""
    digest = hashlib.sha256(f"{path.name} {text}".encode()).hexdigest()
    return path.with_name(f"lease.json.{digest[:16]}")


class Lease:
    """The lease on a run directory, held from construction to `release`.

    Raises:
        LeaseError: another live job holds the directory; the message names its host and process.
        OSError: the directory cannot be written.
    """

    def __init__(self, run_dir: Path, check: Callable[[], None] = lambda: None) -> None:
        """Take the lease; `check` as of `is_abandoned`."""
        self.path, self._check = run_dir / "lease.json", check
        make_folder(run_dir)
        self._take()
        _held[self.path.resolve()] = self._text
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._heart.start()

    def _take(self) -> None:
        holder = {
            "format_version": FORMAT_VERSION,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "started_ticks": process_stat(os.getpid())[1],
            "sight": pid_scope(),
            "run_dir": str(self.path.parent.resolve()),
        }
        self._text = json.dumps(holder)
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError, FileNotFoundError):  # another job was faster: read the chain again
                chain = _claim_chain(self.path)
                is_taken = self._take_over(chain) if chain else self._create(self.path)
                if is_taken:
                    return
        raise LeaseError(f"{self.path}: another job took the run directory at the same moment; start one of them again")

    def _create(self, path: Path) -> bool:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(self._text)
                file.flush()
                os.fsync(file.fileno())  # with its name: an empty lease would make the next job wait
                fsync_path(path.parent)
            except OSError:  # a full disk
                path.unlink()
                raise
        return True

    def _take_over(self, chain: list[tuple[Path, str]]) -> bool:
        """Claim the last entry of the chain, and replace the lease with the claim.

        Returns:
            False if the chain has changed meanwhile: its last entry was no longer the holder's.
        """
        last, text = chain[-1]
        original = _original(last, text)
        if not is_abandoned(original / self.path.name if original else last, text, self._check):
            if original:
                raise LeaseError(
                    f"{self.path}: {self.path.parent} is a copy of {original}, in which "
                    f"{_name(_read_holder(text))} is training. A run branches off another one without a copy: give "
                    f"run_dir=NEW and resume={original}"
                )
            raise LeaseError(
                f"{self.path}: {_name(_read_holder(text))} is using this run directory. Stop that job, or give "
                "this one another run_dir"
            )
        claim = _claim(last, text)
        self._create(claim)
        if _claim_chain(self.path) != [*chain, (claim, self._text)]:
            claim.unlink(missing_ok=True)
            return False
        claim.replace(self.path)
        fsync_path(self.path.parent)
        for obsolete in self.path.parent.glob(f"{self.path.name}.*"):
            obsolete.unlink(missing_ok=True)
        return True

    def _is_mine(self) -> bool:
        try:
            return _read(self.path) == self._text
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a transient error of the file system must not end the heartbeat
                if self._is_mine():
                    os.utime(self.path)

    def release(self) -> None:
        """Delete the lease, unless another job has taken it over because this one was suspended for too long."""
        self._released.set()
        self._heart.join()
        _held.pop(self.path.resolve(), None)
        with suppress(OSError):  # the disk is gone: the next job finds the lease of a dead process
            if self._is_mine():
                self.path.unlink()
