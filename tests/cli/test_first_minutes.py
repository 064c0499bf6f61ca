"""Before the first step: the current part is shown, and a signal ends it in one line."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.cli.commands import config
from dist_mem.runtime.distributed import announce
from dist_mem.runtime.environment import extension_cache
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.ranks import export_for_libraries
from tests.support.jobs import write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import said
from tests.support.ranks import launcher_environment

# A compiler that never ends, but tells torch what it is. It names its child when its trap is set and the child runs: a
# shell that received SIGINT between two commands, or before `exec`, would go on to the sleep, and ninja would wait.
SLOW_COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
  trap 'kill "$child"; exit 130' INT
  sleep 600 >/dev/null 2>&1 &
  child=$!
  echo "$child" >"$MARK"
  wait ;;
esac
exec c++ "$@"
"""


def start(config: Path, **environment: str) -> subprocess.Popen[str]:
    """`dist-mem train CONFIG`, alone and in a process group of its own, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "dist_mem", "train", str(config)],
        env={**os.environ, **launcher_environment(0, 1, free_port()), **environment},
        cwd=config.parent,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT, *, seconds: float = 300) -> str:
    """What a training says that gets a signal before its first step: Ctrl-C with its children, any other one alone."""
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, reported = process.communicate(timeout=limit(seconds))
    assert process.returncode == 85, reported
    assert "Traceback" not in reported
    said(reported.splitlines()[-1], number.name)
    return reported


def test_ctrl_c_while_libraries_are_loaded_ends_in_one_line(tmp_path: Path, books: Path) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    process = start(config)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first == f"starting {tmp_path / 'run'}: loading torch and DeepSpeed\n"
    assert len(interrupted(process).splitlines()) == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_op_is_compiled_leaves_no_lock_no_compiler_and_no_half_an_op(
    tmp_path: Path, books: Path, number: signal.Signals
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"preflight": False})
    compiler, mark = tmp_path / "slow-c++", tmp_path / "mark"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    own = {"CXX": str(compiler), "MARK": str(mark), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    process = start(config, **own)

    def compiles() -> bool:
        return mark.exists() and mark.read_text().endswith("\n")

    wait_until(lambda: compiles() or process.poll() is not None, "the compiler", seconds=300)
    reported = interrupted(process, number, seconds=10)
    assert "compiling DeepSpeed's CPU communication op, once for this environment: 1 to 3 minutes" in reported
    assert "could not compile" not in reported
    left = {path.name for path in (tmp_path / "ops" / "deepspeed_shm_comm").iterdir()}
    assert not left & {"lock", "deepspeed_shm_comm.so", "shm.o", "shm_interface.o"}
    assert not (tmp_path / "run" / "lease.json").exists()
    child = Path(f"/proc/{int(mark.read_text())}")
    wait_until(lambda: not child.exists(), "the end of the compiler")


def test_ctrl_c_ends_any_other_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "load_checked", interrupt)
    assert main(["config", "configs/demo.yaml"]) == 130
    said(capsys.readouterr().err, "SIGINT")


@pytest.mark.parametrize(("rank", "expected"), [("0", "opening data\n"), ("1", "")])
def test_rank_0_tells_what_takes_long(
    rank: str, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def has_ended() -> bool:
        return not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())

    with announce("opening data", after=0.0):
        wait_until(has_ended, "its timer")  # first: capfd loses what is written while it reads
    assert capfd.readouterr().err == expected
    with announce("something quick", after=60.0):
        pass
    wait_until(has_ended, "its timer")
    assert capfd.readouterr().err == ""


def cache_beside(folder: Path, packages: Sequence[str], **variables: str) -> str:
    """The cache of an environment whose packages lie in `folder`."""
    for name in packages:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").touch()
    code = "from dist_mem.runtime.environment import extension_cache; print(extension_cache())"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **variables}
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_each_environment_has_its_own_compiled_ops(tmp_path: Path) -> None:
    """torch keys them by Python's version alone, and ninja compiles anew when a path in the command has changed."""
    packages: dict[str, list[str]] = {"plain": [], "one": ["deepspeed"], "other": ["deepspeed"], "torch": ["torch"]}
    caches = [cache_beside(tmp_path / name, packages[name]) for name in packages]
    assert len(set(caches)) == 4
    assert cache_beside(tmp_path / "empty", []) == caches[0], "the clone that is run from does not count"


def test_each_compiler_has_its_own_compiled_ops(tmp_path: Path) -> None:
    """The command that ninja compares begins with it."""
    wrapper = tmp_path / "bin" / "ccache"
    wrapper.parent.mkdir()
    wrapper.touch(mode=0o755)
    with_wrapper = {"PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"}
    variables: list[dict[str, str]] = [{"CXX": ""}, {"CXX": "g++-12"}, {**with_wrapper, "CXX": ""}]
    assert len({cache_beside(tmp_path, [], **given) for given in variables}) == 3
    not_used = {**with_wrapper, "CXX": "", "TORCH_NO_COMPILER_WRAPPER": "1"}
    assert cache_beside(tmp_path, [], **not_used) == cache_beside(tmp_path, [], **variables[0])


def test_a_directory_that_the_user_has_set_stays(
    tmp_path: Path, single_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    export_for_libraries(0, 1, 0, 1)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    export_for_libraries(0, 1, 0, 1)
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(extension_cache())
