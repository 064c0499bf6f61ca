"""Lock files: refused at once, waited for, released by the end of a process."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

import pytest

from dist_mem.errors import StoppedEarlyError, UnfitError, UnusableError
from dist_mem.runtime import locks
from dist_mem.runtime.locks import hold_file, hold_folder, hold_lock, lock_file, try_lock, wait_for_lock


def test_a_second_holder_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    with hold_lock(tmp_path / ".lock", "out"):
        for _ in range(2):  # who is refused leaves the name of the first
            refusal = pytest.raises(UnusableError, match=rf"out: .*process {os.getpid()} on ")
            with refusal, hold_lock(tmp_path / ".lock", "out"):
                raise AssertionError
    with hold_lock(tmp_path / ".lock", "out"):
        pass


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    if not (child := os.fork()):
        with hold_lock(tmp_path / ".lock", "out"):
            os.write(write, b"1")
            os._exit(9)
    os.read(read, 1)
    os.waitpid(child, 0)
    with hold_lock(tmp_path / ".lock", "out"):
        pass


def test_a_wait_ends_by_its_check_and_by_its_limit(tmp_path: Path) -> None:
    def stopped() -> None:
        raise StoppedEarlyError("SIGTERM")

    with lock_file(tmp_path / "lock") as first, lock_file(tmp_path / "lock") as second:
        assert try_lock(first)
        with pytest.raises(StoppedEarlyError):
            wait_for_lock(second, stopped, seconds=60, what="compiling")
        with pytest.raises(UnfitError, match="compiling: another process"):
            wait_for_lock(second, lambda: None, seconds=0, what="compiling")


def test_a_wait_ends_when_the_lock_is_free(tmp_path: Path) -> None:
    with lock_file(tmp_path / "lock") as first, lock_file(tmp_path / "lock") as second:
        assert try_lock(first)
        wait_for_lock(second, lambda: fcntl.flock(first, fcntl.LOCK_UN), seconds=60, what="compiling")
        assert not try_lock(first)


def test_nothing_is_left_in_a_folder_after_the_block_and_after_a_refusal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="full"), hold_folder(out, "out"):
        raise ValueError("full")
    assert not out.exists()
    with hold_folder(out, "out"):
        (out / "result").touch()
    assert [path.name for path in out.iterdir()] == ["result"]
    with pytest.raises(ValueError, match="full"), hold_folder(out, "out"):
        raise ValueError("full")
    assert out.exists()


def test_of_many_that_take_turns_no_two_hold_a_folder_at_once(tmp_path: Path) -> None:
    """Though each removes the lock file: one that opened it before must not hold the lock of a file that is gone."""

    def take_turns() -> None:
        number = 0
        while number < 50:
            with suppress(UnusableError), hold_lock(tmp_path / ".lock", "out"):
                os.close(os.open(tmp_path / "alone", os.O_CREAT | os.O_EXCL))
                (tmp_path / "alone").unlink()
                number += 1

    children = []
    for _ in range(4):
        if not (child := os.fork()):
            try:
                take_turns()
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with hold_lock(tmp_path / ".lock", "--out x"):
        pass
    assert "--out x: its file system has no locks" in caplog.text


def test_a_file_is_held_beside_others_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report"
    refusal = pytest.raises(UnusableError, match=rf"new/report: .*process {os.getpid()} on ")
    with hold_file(path), hold_file(path.with_name("other")), refusal, hold_file(path):
        raise AssertionError
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(KeyError), hold_file(tmp_path / "failed" / "report"):
        raise KeyError
    assert not (tmp_path / "failed").exists()
    with hold_file(Path("/dev/null")), hold_file(Path("/dev/null")):  # a stream is no file that is made
        pass
    with pytest.raises(FileExistsError, match="folder"), hold_file(tmp_path):
        raise AssertionError
