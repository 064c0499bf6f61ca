"""Variables of the environment: one that is set to empty is one that is not set, whoever reads it."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.runtime import compilers, devices, environment, ranks
from tests.support.jobs import write_config
from tests.support.limits import limit
from tests.support.messages import said_line

MODULES = (environment, ranks, compilers, devices)
NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")
# Empty says that no GPU is visible; the others are Python's and the shell's, without which no program is found.
MEANT = {"CUDA_VISIBLE_DEVICES", "PATH", "PYTHONPATH", "PYTHONSAFEPATH"}
READ_BY_LIBRARIES = {
    "HF_HOME",
    "HF_TOKEN",
    "TRITON_CACHE_DIR",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "MAX_JOBS",
    "XDG_DATA_HOME",
}
RANKS = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "7",
}
STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
AROUND: list[dict[str, str]] = [{}, RANKS, STEP, {**STEP, **RANKS, "SLURM_STEP_TASKS_PER_NODE": "2"}]


def names() -> set[str]:
    """Every text in those modules that may be the name of a variable."""
    trees = [ast.parse(inspect.getsource(module)) for module in MODULES]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and NAME.fullmatch(text)}


def readers() -> dict[str, Callable[[], Any]]:
    """The functions that return something, and need no arguments, but for those that pass the whole environment on."""
    found: dict[str, Callable[[], Any]] = {}
    for module in MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            signature = inspect.signature(function)
            is_free = all(parameter.default is not parameter.empty for parameter in signature.parameters.values())
            if is_free and signature.return_annotation != "None" and not name.startswith(("_", "environment_of")):
                found[name] = function
    return found


def outcomes() -> dict[str, str]:
    found = {}
    for name, function in readers().items():
        try:
            found[name] = repr(function())
        except (ValueError, OSError) as error:
            found[name] = repr(error)
    return found


def test_every_reader_takes_an_empty_variable_for_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(names()) > 60 and len(readers()) > 20
    for around in AROUND:
        for name in names():
            monkeypatch.delenv(name, raising=False)
        for name, value in around.items():
            monkeypatch.setenv(name, value)
        for name in sorted(names() - MEANT):
            with monkeypatch.context() as changed:
                changed.delenv(name, raising=False)
                unset = outcomes()
                changed.setenv(name, "")
                assert outcomes() == unset, f"{name} beside {sorted(around)}"


def test_a_default_takes_the_place_of_an_empty_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given, expected in (("A_SET", "x", "x"), ("AN_EMPTY", "", "default"), ("A_NEW", None, "default")):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
        environment.set_default(name, "default")
        assert os.environ[name] == expected
        monkeypatch.delenv(name)


def test_empty_variables_of_libraries_are_gone_once_the_program_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"MY_OWN", "no_proxy", "GIT_ASKPASS", "CUDA_VISIBLE_DEVICES"}
    for name in READ_BY_LIBRARIES | others:
        monkeypatch.setenv(name, "")
    environment.drop_empty()
    assert {name for name in READ_BY_LIBRARIES | others if name in os.environ} == others


def train(folder: Path, books: Path, **variables: str) -> tuple[int, str]:
    config = write_config(folder / "run.yaml", books, folder / "run", {"train": {"steps": 1}})
    command = [sys.executable, "-m", "dist_mem", "train", str(config)]
    given = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, timeout=limit(120), check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_whose_variables_are_all_empty_is_one_without_them(tmp_path: Path, books: Path) -> None:
    """HOME, TORCH_EXTENSIONS_DIR and TMPDIR too: nothing is written into the working directory."""
    code, text = train(tmp_path, books, **dict.fromkeys((names() | READ_BY_LIBRARIES) - MEANT, ""))
    assert code == EXIT_DONE, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.yaml"]


def test_an_accelerator_that_dist_mem_does_not_take_is_refused(tmp_path: Path, books: Path) -> None:
    code, text = train(tmp_path, books, DS_ACCELERATOR="npu")
    assert code == EXIT_USAGE
    said_line(text, "DS_ACCELERATOR", "npu")
