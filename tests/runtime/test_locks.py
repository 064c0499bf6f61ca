"""Lock files: refused at once, waited for, released by the end of a process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from dist_mem.errors import StoppedEarlyError, UnfitError, UnusableError
from dist_mem.runtime.locks import held, lock_file, try_lock, wait_for_lock


def test_a_second_holder_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    refusal = pytest.raises(UnusableError, match=rf"out: .*process {os.getpid()} on ")
    with held(tmp_path / ".lock", "out"), refusal, held(tmp_path / ".lock", "out"):
        raise AssertionError
    with held(tmp_path / ".lock", "out"):
        pass


def test_a_refused_holder_leaves_the_name_of_the_first(tmp_path: Path) -> None:
    with held(tmp_path / ".lock", "out"):
        for _ in range(2):
            with pytest.raises(UnusableError, match=str(os.getpid())), held(tmp_path / ".lock", "out"):
                raise AssertionError


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    if not (child := os.fork()):
        with held(tmp_path / ".lock", "out"):
            os.write(write, b"1")
            os._exit(9)
    os.read(read, 1)
    os.waitpid(child, 0)
    with held(tmp_path / ".lock", "out"):
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
