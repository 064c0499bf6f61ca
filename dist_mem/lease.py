"""One job per run directory: a lease file with a heartbeat.

Two jobs that write the same checkpoints destroy each other's. The first takes `RUN/lease.json` (created exclusively)
and touches it every few seconds; a second one is refused while the heartbeat is fresh. A lease whose job is dead is
taken over: at once where the process can be seen to be gone (same host), else when the heartbeat is `STALE_SECONDS`
old.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
FORMAT_VERSION = 1


class LeaseError(RuntimeError):
    """Another job holds the run directory."""


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_abandoned(holder: dict[str, Any], age_seconds: float) -> bool:
    if holder.get("host") == socket.gethostname():
        return not _process_lives(int(holder["pid"]))
    return age_seconds > STALE_SECONDS


class Lease:
    """Held from construction to `release`.

    Raises:
        LeaseError: another live job holds the directory; names its host, process and the age of its last sign of life.
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
        }
        for _ in range(2):
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    json.dump(me, file)
                return
            except FileExistsError:
                self._remove_if_abandoned()
        raise LeaseError(f"{self.path}: another job took the run directory at the same moment; start one of them again")

    def _remove_if_abandoned(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
            age = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return  # its holder has just released it
        # An empty file is a lease being written, or one whose writer died before the first byte.
        abandoned = age > STALE_SECONDS if not text else _is_abandoned(json.loads(text), age)
        if not abandoned:
            holder = json.loads(text) if text else {}
            raise LeaseError(
                f"{self.path}: process {holder.get('pid')} on {holder.get('host')} is using this run directory (last "
                f"sign of life {age:.0f} s ago). Stop that job, or give this one another run_dir"
            )
        self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return

    def release(self) -> None:
        """Give the run directory back."""
        self._released.set()
        self._heart.join()
        self.path.unlink(missing_ok=True)
