"""One job per run directory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_mem.lease import STALE_SECONDS, Lease, LeaseError


def holder(pid: int, host: str) -> str:
    return json.dumps({"format_version": 1, "host": host, "pid": pid, "started": 0})


def write_lease(run_dir: Path, text: str, *, age_seconds: float) -> None:
    path = run_dir / "lease.json"
    path.write_text(text)
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_lease_is_exclusive_and_comes_back(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with pytest.raises(LeaseError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        Lease(tmp_path)
    lease.release()
    Lease(tmp_path).release()
    assert not (tmp_path / "lease.json").exists()


def test_lease_of_a_dead_process_here_is_taken_at_once(tmp_path: Path) -> None:
    write_lease(tmp_path, holder(dead_process(), socket.gethostname()), age_seconds=0)
    Lease(tmp_path).release()


def test_live_process_here_keeps_its_lease_however_old(tmp_path: Path) -> None:
    write_lease(tmp_path, holder(os.getpid(), socket.gethostname()), age_seconds=10 * STALE_SECONDS)
    with pytest.raises(LeaseError):
        Lease(tmp_path)


@pytest.mark.parametrize("text", [holder(1, "another-host"), "", '{"host": "x", "pi', "[]"])
def test_lease_that_cannot_be_checked_is_taken_when_its_heartbeat_is_old(tmp_path: Path, text: str) -> None:
    write_lease(tmp_path, text, age_seconds=STALE_SECONDS / 2)
    with pytest.raises(LeaseError):
        Lease(tmp_path)
    write_lease(tmp_path, text, age_seconds=STALE_SECONDS + 1)
    Lease(tmp_path).release()


def test_lease_of_a_killed_process_that_nobody_has_reaped_is_taken_at_once(tmp_path: Path) -> None:
    """In a container whose first process does not reap, a killed job stays a zombie for ever."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    write_lease(tmp_path, holder(process.pid, socket.gethostname()), age_seconds=0)
    Lease(tmp_path).release()
    process.wait()


def test_process_that_got_the_number_of_the_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    lease = json.loads(holder(os.getpid(), socket.gethostname()))
    write_lease(tmp_path, json.dumps({**lease, "started_ticks": "1"}), age_seconds=0)
    Lease(tmp_path).release()


def test_lease_taken_over_by_another_job_is_left_alone(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    write_lease(tmp_path, holder(1, "another-host"), age_seconds=0)
    lease.release()
    assert json.loads((tmp_path / "lease.json").read_text())["host"] == "another-host"


def test_lease_renewed_while_it_was_taken_for_stale_is_put_back(tmp_path: Path) -> None:
    """Two jobs find the same dead lease; the slower one must not remove what the faster one has written."""
    lease = Lease(tmp_path)
    lease._remove("the dead lease that both have read")
    assert lease._is_mine()
    lease.release()
    assert list(tmp_path.iterdir()) == []
