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
from faults import small_disk

from dist_mem import lease
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
    held = Lease(tmp_path)
    with pytest.raises(LeaseError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        Lease(tmp_path)
    held.release()
    Lease(tmp_path).release()
    assert not (tmp_path / "lease.json").exists()


def test_lease_of_a_dead_process_here_is_taken_at_once(tmp_path: Path) -> None:
    write_lease(tmp_path, holder(dead_process(), socket.gethostname()), age_seconds=0)
    Lease(tmp_path).release()


def test_live_process_here_keeps_its_lease_however_old(tmp_path: Path) -> None:
    write_lease(tmp_path, holder(os.getpid(), socket.gethostname()), age_seconds=10 * STALE_SECONDS)
    with pytest.raises(LeaseError):
        Lease(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.6)


ODD_CLOCKS = [0, 3600, -3600]  # how old the last touch seems: the clocks agree, ours is fast, ours is slow


@pytest.mark.usefixtures("quick")
def test_lease_that_a_broken_disk_made_rubbish_is_taken_too(tmp_path: Path) -> None:
    """On rank 0, and no other rank looks: any error but a LeaseError would leave them waiting."""
    (tmp_path / "lease.json").write_bytes(b"\xff\xfe{")
    Lease(tmp_path).release()
    assert not (tmp_path / "lease.json").exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("age_seconds", ODD_CLOCKS)
@pytest.mark.parametrize("text", [holder(1, "another-host"), "", '{"host": "x", "pi', "[]"])
def test_lease_that_cannot_be_checked_is_taken_when_it_is_not_touched_for_a_while(
    tmp_path: Path, text: str, age_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    write_lease(tmp_path, text, age_seconds=age_seconds)
    before = time.monotonic()
    Lease(tmp_path).release()
    assert 0.6 < time.monotonic() - before < 5
    assert "waiting up to 1 s for a sign of life of" in caplog.text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("age_seconds", ODD_CLOCKS)
def test_job_on_another_host_keeps_its_lease_whatever_the_clocks_say(
    tmp_path: Path, age_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "another-host")
        held = Lease(tmp_path)
    with monkeypatch.context() as skewed:
        touch, now = os.utime, time.time()
        skewed.setattr(os, "utime", lambda path: touch(path, (now - age_seconds, time.time() - age_seconds)))
        time.sleep(0.1)
        with pytest.raises(LeaseError, match=rf"process {os.getpid()} on another-host is using this run directory"):
            Lease(tmp_path)
    held.release()


def test_lease_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    """An empty one would keep the next job waiting."""
    with small_disk(tmp_path / "disk", "size=4k") as disk:
        (disk / "full").write_bytes(bytes(4096))
        with pytest.raises(OSError, match="No space left on device"):
            Lease(disk)
        assert [path.name for path in disk.iterdir()] == ["full"]


def test_lease_of_a_killed_process_that_nobody_has_reaped_is_taken_at_once(tmp_path: Path) -> None:
    """In a container whose first process does not reap, a killed job stays a zombie for ever."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    write_lease(tmp_path, holder(process.pid, socket.gethostname()), age_seconds=0)
    Lease(tmp_path).release()
    process.wait()


def test_process_that_got_the_number_of_the_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    written = json.loads(holder(os.getpid(), socket.gethostname()))
    write_lease(tmp_path, json.dumps({**written, "started_ticks": "1"}), age_seconds=0)
    Lease(tmp_path).release()


def test_lease_taken_over_by_another_job_is_left_alone(tmp_path: Path) -> None:
    held = Lease(tmp_path)
    write_lease(tmp_path, holder(1, "another-host"), age_seconds=0)
    held.release()
    assert json.loads((tmp_path / "lease.json").read_text())["host"] == "another-host"


def test_lease_renewed_while_it_was_taken_for_stale_is_put_back(tmp_path: Path) -> None:
    """Two jobs find the same dead lease; the slower one must not remove what the faster one has written."""
    held = Lease(tmp_path)
    held._remove("the dead lease that both have read")
    assert held._is_mine()
    held.release()
    assert list(tmp_path.iterdir()) == []
