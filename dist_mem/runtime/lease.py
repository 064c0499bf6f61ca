"""One job per run directory: a lease file with a heartbeat.

Two jobs that write the same checkpoints destroy each other's. The first takes `RUN/lease.json` (created exclusively)
and touches it every few seconds; a second one is refused at the next touch it sees. A lease whose job is dead is taken
over: at once where the process can be seen to be gone (same host), else after watching it for `STALE_SECONDS` without a
touch. No two clocks are compared: those of hosts and file servers differ, by hours where nobody looks.

Of several jobs that find the same dead lease, one may take it: who creates its claim, a file named after the lease's
content. The claim then replaces the lease; a live one is never moved. If the job that claims dies as well, there is a
claim to its claim, and so on. No locks are used: not every file system of a cluster has them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dist_mem.errors import TakenOverError, UnusableError
from dist_mem.runtime.files import fsync_path, make_folder

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_LOOK_SECONDS = 1.0  # between two looks at a lease by who writes often: on a network file system each asks the server
FORMAT_VERSION = 1
_ATTEMPTS = 4  # at a lease that changes hands while it is looked at

log = logging.getLogger(__name__)


class LeaseError(UnusableError):
    """Another job holds the run directory."""


def _kernel_facts(pid: int) -> tuple[str, str]:
    """State letter and start of a process, in ticks since boot, as Linux tells them; empty where it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # a name may be any bytes
    except OSError:
        return "", ""
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks
    return fields[0], fields[19]


def _sight() -> str:
    """Which processes this one sees by number: those of its host since the boot, and of its container if it is in one.

    Containers often have the name of their host, and hosts may all have the same name.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _seen_pid(holder: dict[str, Any]) -> int | None:
    """The process of a lease, if it can be looked at from here."""
    pid = holder.get("pid")
    is_seen = holder.get("host") == socket.gethostname() and holder.get("sight", _sight()) == _sight()
    return pid if is_seen and isinstance(pid, int) and 0 < pid < 1 << 31 else None


def _process_lives(pid: int, ticks: str) -> bool:
    """Whether the process that wrote `ticks` is still there: neither a zombie nor another one with its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, present_ticks = _kernel_facts(pid)
    return state not in ("Z", "X") and (not ticks or not present_ticks or ticks == present_ticks)


def _is_abandoned(path: Path, text: str) -> bool:
    """Whether the job that wrote `text` is dead. Raises FileNotFoundError if the lease is given back meanwhile."""
    holder = _read_holder(text)
    pid = _seen_pid(holder)
    if pid is not None:
        return not _process_lives(pid, holder.get("started_ticks", ""))
    log.warning("%s: waiting up to %.0f s for a sign of life of %s", path, STALE_SECONDS, _name(holder))
    first_touch = _last_touch(path)
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_SECONDS / 10)
        if _last_touch(path) != first_touch:
            return False
    return True


def sign_of_life(run_dir: Path) -> str | None:
    """The process that holds a run directory, in words; None if nobody does, as far as one look can say.

    A process of another host counts as alive for `STALE_SECONDS` after its last touch, by this host's clock.
    """
    path = run_dir / "lease.json"
    with suppress(OSError):
        holder = _read_holder(_read(path))
        pid, age = _seen_pid(holder), max(0.0, time.time() - _last_touch(path) / 1e9)
        alive = age < STALE_SECONDS if pid is None else _process_lives(pid, holder.get("started_ticks", ""))
        return f"{_name(holder)}, last sign of life {age:.0f} s ago" if alive else None
    return None


def _last_touch(path: Path) -> int:
    with path.open("rb") as file:  # opened anew each time, or NFS answers from its cache
        return os.fstat(file.fileno()).st_mtime_ns


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder.get('host')}" if "pid" in holder else "a job that is just starting"


def _read(path: Path) -> str:
    """What stands in a lease, also one that a broken disk has made rubbish of: rank 0 must not fail alone at it."""
    return path.read_text(encoding="utf-8", errors="replace")


def _read_holder(text: str) -> dict[str, Any]:
    """What a lease says; nothing while it is being written, or if its writer died in the middle."""
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


_held: dict[Path, str] = {}  # what stands in the leases that this process has taken, by path
_looked: dict[Path, float] = {}  # when they were last seen to be there, by `_now`


def _now() -> float:
    """Seconds that go on while this process, or its whole machine, stands still."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def refuse_if_stood_still(run_dir: Path) -> None:
    """As `refuse_if_taken_over`, once a second at most: for whatever is written again and again."""
    path = (run_dir / "lease.json").resolve()
    if path not in _held or _now() < _looked.get(path, -_LOOK_SECONDS) + _LOOK_SECONDS:
        return
    now = _now()
    with suppress(OSError):  # a file system that stumbles once; the next look is at the next write
        refuse_if_taken_over(run_dir)
        _looked[path] = now


def refuse_if_taken_over(run_dir: Path) -> None:
    """Raise TakenOverError if the lease that this process took is not its own by now: it stood still for too long.

    A lease that is gone is not either: the other job may have ended already.
    """
    path = run_dir / "lease.json"
    mine = _held.get(path.resolve())
    if mine is None:
        return
    try:
        text = _read(path)
    except FileNotFoundError:
        raise TakenOverError(
            f"{path} is gone: another job has taken the run directory over and ended, or somebody has removed the "
            "file. Start the same command again"
        ) from None
    if text != mine:
        raise TakenOverError(
            f"{run_dir}: {_name(_read_holder(text))} has taken the run directory over; leave it to that job"
        )


def _line(path: Path) -> list[tuple[Path, str]]:
    """A lease with what stands in it, the claim to it, the claim to that claim, and so on."""
    line: list[tuple[Path, str]] = []
    heir = path
    with suppress(FileNotFoundError):
        while True:
            text = _read(heir)
            line.append((heir, text))
            heir = _claim(heir, text)
    return line


def _claim(path: Path, text: str) -> Path:
    """Where a job that takes over from the one that wrote `text` into `path` says so; only one can create it."""
    digest = hashlib.sha256(f"{path.name} {text}".encode()).hexdigest()
    return path.with_name(f"lease.json.{digest[:16]}")


class Lease:
    """Held from construction to `release`.

    Raises:
        LeaseError: another live job holds the directory; names its host and process.
        OSError: the directory cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lease.json"
        make_folder(run_dir)
        self._take()
        _held[self.path.resolve()] = self._text
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)
        self._heart.start()

    def _take(self) -> None:
        me = {
            "format_version": FORMAT_VERSION,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "started_ticks": _kernel_facts(os.getpid())[1],
            "sight": _sight(),
        }
        self._text = json.dumps(me)
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError, FileNotFoundError):  # another job was faster: look who has it
                line = _line(self.path)
                is_mine = self._take_over(line) if line else self._create(self.path)
                if is_mine:
                    return
        raise LeaseError(f"{self.path}: another job took the run directory at the same moment; start one of them again")

    def _create(self, path: Path) -> bool:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(self._text)
                file.flush()
                os.fsync(file.fileno())  # and its name: an empty lease would keep the next job waiting
                fsync_path(path.parent)
            except OSError:  # a full disk
                path.unlink()
                raise
        return True

    def _take_over(self, line: list[tuple[Path, str]]) -> bool:
        """Claim what the last of the line has left, and put the claim in the place of the lease.

        Returns:
            False if the line has become another one meanwhile: its last one was not the holder any more.
        """
        last, text = line[-1]
        if not _is_abandoned(last, text):
            raise LeaseError(
                f"{self.path}: {_name(_read_holder(text))} is using this run directory. Stop that job, or give "
                "this one another run_dir"
            )
        claim = _claim(last, text)
        self._create(claim)
        if _line(self.path) != [*line, (claim, self._text)]:
            claim.unlink(missing_ok=True)
            return False
        claim.replace(self.path)
        fsync_path(self.path.parent)
        for settled in self.path.parent.glob(f"{self.path.name}.*"):
            settled.unlink(missing_ok=True)
        return True

    def _is_mine(self) -> bool:
        try:
            return _read(self.path) == self._text
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a file system that stumbles once must not end the heartbeat
                if self._is_mine():
                    os.utime(self.path)

    def release(self) -> None:
        """Give the run directory back, unless another job has taken it over from this one, held up for too long."""
        self._released.set()
        self._heart.join()
        _held.pop(self.path.resolve(), None)
        with suppress(OSError):  # the disk has gone away: the next job finds the lease of a dead process
            if self._is_mine():
                self.path.unlink()
