"""Locks around the compilation of DeepSpeed's op: a kill at the wrong moment must not keep the next start waiting."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dist_mem.engine import start
from dist_mem.engine.cpu_op import CPU_OP, building, load
from dist_mem.errors import UnfitError
from dist_mem.runtime.locks import POLL_SECONDS
from tests.support.limits import holds_open, limit, wait_until
from tests.support.messages import refused

BUILDER = """
import sys, time
from pathlib import Path
from dist_mem.engine.cpu_op import building
with building(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "lock").touch()  # as torch does
    print("building", flush=True)
    time.sleep(600)
"""


def killed_builder(directory: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", BUILDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_what_a_killed_job_has_left_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "deepspeed_shm_comm"
    killed_builder(directory)
    assert (directory / "lock").exists()
    with building(directory):
        assert not (directory / "lock").exists()


def test_the_lock_of_another_program_stays(tmp_path: Path) -> None:
    for _ in range(2):
        with building(tmp_path):
            (tmp_path / "lock").touch()
    assert (tmp_path / "lock").exists()


def test_one_process_builds_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER.replace("600", "0"), str(tmp_path)]
    with building(tmp_path):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: holds_open(process, "dist_mem.lock"), "the other process to wait")
        assert process.poll() is None and not (tmp_path / "lock").exists()
    assert process.communicate(timeout=limit(60))[0] == "building\n"


def test_an_old_lock_of_another_program_is_named_not_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, time.time() - 20 * 60))
    with refused(ValueError, lock, "20 minutes"), building(lock.parent):
        pass


@pytest.mark.parametrize("compiles", [True, False])
def test_a_start_says_that_it_compiles_an_op_again_if_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiles: bool
) -> None:
    """The op is there, and its compiler or sources may have changed: only what ninja starts shows it.

    Every start runs ninja, which takes a second on a busy node to find that nothing has.
    """
    (tmp_path / f"{CPU_OP}.so").touch()
    ninja = shutil.copy(shutil.which("sh" if compiles else "sleep") or "", tmp_path / "ninja")
    seconds = str(3 * POLL_SECONDS)
    load(tmp_path, lambda: subprocess.run([ninja, *(("-c", f"sleep {seconds}; :") if compiles else (seconds,))]))
    assert ("compiling" in capsys.readouterr().err) == compiles


def test_a_place_that_takes_no_op_now_may_take_one_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error than that of a missing compiler, for which nobody needs to do anything to the command."""

    def read_only(name: str, verbose: bool) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), ".cache")

    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(start, "_get_build_directory", read_only)
    with refused(UnfitError, "[Errno 30]", "'.cache'", "TORCH_EXTENSIONS_DIR"):
        start.start_communication()
