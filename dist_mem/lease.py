"""One job per run directory: a lease file with a heartbeat.

Two jobs that write the same checkpoints destroy each other's. The first takes `RUN/lease.json` (created exclusively)
and touches it every few seconds; a second one is refused at the next touch it sees. A lease whose job is dead is taken
over: at once where the process can be seen to be gone (same host), else after watching it for `STALE_SECONDS` without a
touch. No two clocks are compared: those of hosts and file servers differ, by hours where nobody looks.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dist_mem.errors import UnusableError

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
FORMAT_VERSION = 1

log = logging.getLogger(__name__)


class LeaseError(UnusableError):
    """Another job holds the run directory."""


def _kernel_facts(pid: int) -> tuple[str, str]:
    """State letter and start of a process, in ticks since boot, as Linux tells them; empty where it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return "", ""
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks
    return fields[0], fields[19]


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
    if holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
        return not _process_lives(holder["pid"], holder.get("started_ticks", ""))
    log.warning("%s: waiting up to %.0f s for a sign of life of %s", path, STALE_SECONDS, _name(holder))
    first_touch = _last_touch(path)
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_SECONDS / 10)
        if _last_touch(path) != first_touch:
            return False
    return True


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


def refuse_if_taken_over(run_dir: Path) -> None:
    """Raise LeaseError if the lease is another process's by now: this job stood still for too long."""
    try:
        holder = _read_holder(_read(run_dir / "lease.json"))
    except FileNotFoundError:
        return
    pid = holder.get("pid")
    is_here = holder.get("host") == socket.gethostname() and isinstance(pid, int)
    if not is_here or (pid != os.getpid() and _process_lives(cast(int, pid), holder.get("started_ticks", ""))):
        raise LeaseError(f"{run_dir}: {_name(holder)} has taken the run directory over; leave it to that job")


class Lease:
    """Held from construction to `release`.

    Raises:
        LeaseError: another live job holds the directory; names its host and process.
        OSError: the directory cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lease.json"
        run_dir.mkdir(parents=True, exist_ok=True)
        self._take()
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
        }
        self._text = json.dumps(me)
        for _ in range(2):
            try:
                self._create()
                return
            except FileExistsError:
                self._remove_if_abandoned()
        raise LeaseError(f"{self.path}: another job took the run directory at the same moment; start one of them again")

    def _create(self) -> None:
        with self.path.open("x", encoding="utf-8") as file:
            try:
                file.write(self._text)
                file.flush()
            except OSError:  # a full disk; an empty lease would keep the next job waiting
                self.path.unlink()
                raise

    def _remove_if_abandoned(self) -> None:
        try:
            text = _read(self.path)
            if not _is_abandoned(self.path, text):
                raise LeaseError(
                    f"{self.path}: {_name(_read_holder(text))} is using this run directory. Stop that job, or give "
                    "this one another run_dir"
                )
        except FileNotFoundError:
            return  # its holder has just released it
        self._remove(text)

    def _remove(self, text: str) -> None:
        """Remove the lease that says `text`, and no other: another job may have taken it over since it was read."""
        aside = self.path.with_name(f"{self.path.name}.{socket.gethostname()}.{os.getpid()}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != text:
            with suppress(FileExistsError):
                self.path.hardlink_to(aside)
        aside.unlink()

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
        with suppress(OSError):  # the disk has gone away: the next job finds the lease of a dead process
            if self._is_mine():
                self._remove(self._text)
