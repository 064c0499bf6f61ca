"""One job per run directory."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import TakenOverError
from dist_mem.supervision import lease
from dist_mem.supervision.lease import STALE_SECONDS, Lease, LeaseError, refuse_if_taken_over
from tests.support.faults import small_disk
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said_line

HERE = socket.gethostname()
ODD_CLOCKS = [0, 3600, -3600]  # how old the last touch seems: the clocks agree, ours is fast, ours is slow


def holder(pid: Any, host: str = HERE, **more: str) -> str:
    return json.dumps({"format_version": 1, "host": host, "pid": pid, "started": 0, **more})


def write_lease(run_dir: Path, text: str | bytes, *, age_seconds: float = 0) -> None:
    path = run_dir / "lease.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    then = time.time() - age_seconds
    os.utime(path, (then, then))


def dead_process(*, is_reaped: bool = True) -> int:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
    return pid


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become hundredths."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.6)


def seconds_to_take(run_dir: Path) -> float:
    began = time.monotonic()
    Lease(run_dir).release()
    assert not (run_dir / "lease.json").exists()
    return time.monotonic() - began


@pytest.mark.parametrize(
    "text",
    [
        lambda: holder(dead_process()),
        # In a container whose first process does not reap, a killed job stays a zombie for ever.
        lambda: holder(dead_process(is_reaped=False)),
        lambda: holder(os.getpid(), started_ticks="1"),
    ],
    ids=["a dead process", "a zombie", "another process got its number"],
)
def test_lease_of_a_dead_process_here_is_taken_at_once(tmp_path: Path, text: Callable[[], str]) -> None:
    write_lease(tmp_path, text())
    assert seconds_to_take(tmp_path) < STALE_SECONDS / 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("text", "age_seconds"),
    [
        *((holder(1, "another-host"), age) for age in ODD_CLOCKS),
        *((text, 0) for text in ("", '{"host": "x", "pi', "[]", "[" * 10**5)),
        (b"\xff\xfe{", 0),  # of a broken disk: any error but a LeaseError would leave the other ranks waiting
        *((holder(pid), 0) for pid in (0, -1, 1 << 70, "7", None)),
        # In another container of this host, which has numbers of its own; what lives has it touched in time.
        pytest.param(lambda: holder(dead_process(), sight="boot pid:[1]"), 0, id="another container"),
    ],
)
def test_lease_that_cannot_be_checked_is_taken_when_it_is_not_touched_for_a_while(
    tmp_path: Path, text: Any, age_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    write_lease(tmp_path, text() if callable(text) else text, age_seconds=age_seconds)
    assert 0.6 < seconds_to_take(tmp_path) < limit(5)
    said_line(caplog.messages[0], tmp_path / "lease.json", "up to 1 s")


def test_live_process_here_keeps_its_lease_however_old_and_whatever_its_name(tmp_path: Path) -> None:
    no_text = "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b'\\xff'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", no_text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for pid in (os.getpid(), process.pid):
            write_lease(tmp_path, holder(pid), age_seconds=10 * STALE_SECONDS)
            with refused_to(pid):
                Lease(tmp_path)
        process.kill()


@contextmanager
def refused_to(pid: int, host: str = HERE) -> Iterator[None]:
    with pytest.raises(LeaseError, match=f"process {pid} on {host} is using this run directory"):
        yield


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
        written = (tmp_path / "lease.json").stat().st_mtime_ns
        wait_until(lambda: (tmp_path / "lease.json").stat().st_mtime_ns != written, "a sign of life by the odd clock")
        with refused_to(os.getpid(), "another-host"):
            Lease(tmp_path)
    held.release()


def test_lease_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    """An empty one would keep the next job waiting."""
    with small_disk(tmp_path / "disk", "size=4k") as disk:
        (disk / "full").write_bytes(bytes(4096))
        with refused(OSError, "[Errno 28]"):
            Lease(disk)
        assert [path.name for path in disk.iterdir()] == ["full"]


def test_a_slow_job_never_takes_a_live_lease_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs find the same dead lease; while the slower one still believes in it, no third one may get in."""
    write_lease(tmp_path, holder(dead_process()))
    judge, rename, faster = lease.is_abandoned, Path.rename, list[Any]()

    def judge_slowly(path: Path, text: str, check: Callable[[], None]) -> bool:
        is_abandoned = judge(path, text, check)
        if is_abandoned and not faster:
            faster.append(None)
            faster[0] = Lease(tmp_path)
        return is_abandoned

    def rename_slowly(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        with pytest.raises(LeaseError):
            Lease(tmp_path)
        return moved

    monkeypatch.setattr(lease, "is_abandoned", judge_slowly)
    monkeypatch.setattr(Path, "rename", rename_slowly)
    with refused(LeaseError, "lease.json", "is using this run directory"):
        Lease(tmp_path)
    faster[0].release()
    assert list(tmp_path.iterdir()) == []


def test_lease_in_a_copy_is_of_the_original_and_says_how_to_branch(tmp_path: Path) -> None:
    """A moved run directory has its own still."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    held = Lease(live)
    shutil.copytree(live, copy)
    assert lease.sign_of_life(live) and lease.sign_of_life(copy) is None
    with refused(LeaseError, copy, f"copy of {live}", f"resume={live}"):
        Lease(copy)
    live.rename(tmp_path / "moved")
    assert lease.sign_of_life(tmp_path / "moved") is not None
    with refused(LeaseError, tmp_path / "moved", "is using this run directory"):
        Lease(tmp_path / "moved")
    (tmp_path / "moved").rename(live)
    held.release()


def test_job_whose_lease_was_taken_over_may_not_write_even_when_the_other_has_ended(tmp_path: Path) -> None:
    """Nor does it remove the lease of the other job."""
    held = Lease(tmp_path)
    refuse_if_taken_over(tmp_path)
    write_lease(tmp_path, holder(1, "another-host"))
    with refused(TakenOverError, "another-host has taken"):
        refuse_if_taken_over(tmp_path)
    (tmp_path / "lease.json").unlink()
    with refused(TakenOverError, "lease.json"):
        refuse_if_taken_over(tmp_path)
    held.release()
    refuse_if_taken_over(tmp_path)
    held = Lease(tmp_path)
    write_lease(tmp_path, holder(1, "another-host"))
    held.release()
    assert json.loads((tmp_path / "lease.json").read_text())["host"] == "another-host"
