"""A folder of others runs no code: no process of this program imports from the working directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dist_mem.datasets.builder import map_unordered
from dist_mem.launch.local import launcher
from dist_mem.recompute.spawn import run_ranks
from dist_mem.runtime.environment import keep_working_directory_out
from dist_mem.runtime.processes import python_module
from tests.support.limits import limit
from tests.support.paths import PACKAGE, ROOT

pytestmark = pytest.mark.ranks

HOSTILE = "raise SystemExit('a module of the working directory has run')\n"
NAMES_PYTHON = re.compile(r"""\bsys\.(?:_base_)?executable\b|["'](?:-m|python3|torchrun)["']""")
STARTS_RANKS = re.compile(r"^[^#]*(?:\b(?:torchrun|deepspeed) --|-m(?:odule)? dist_mem\b)")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose modules end every process that imports one of them."""
    for name in ("yaml", "omegaconf", "torch", "numpy", "deepspeed", "psutil", "pickle", "socket", "dist_mem"):
        (tmp_path / f"{name}.py").write_text(HOSTILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_one_module_names_the_executable_of_python() -> None:
    """What it returns carries -P, or is a word that the user wrote; no other module can start a Python."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [name for name, text in texts.items() if NAMES_PYTHON.search(text)] == ["runtime/processes.py"]
    assert python_module("yaml")[:2] == [sys.executable, "-P"]


def test_every_script_that_starts_ranks_keeps_the_working_directory_out() -> None:
    scripts = [*(ROOT / "launch").glob("*.s*"), *(ROOT / "launch" / "sites").iterdir(), PACKAGE / "launch" / "job.sh"]
    for path in scripts:
        lines = path.read_text(encoding="utf-8").splitlines()
        starts = [index for index, line in enumerate(lines) if STARTS_RANKS.search(line)]
        safe = [index for index, line in enumerate(lines) if re.match(r"export .*\bPYTHONSAFEPATH=1", line)]
        assert not starts or (safe and safe[0] < starts[0]), (path, lines[starts[0]])


def test_ranks_import_nothing_from_a_run_folder_of_others(hostile: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(["config", "--get", "train.steps", "train.steps=7"], 1, device="cpu") == 0
    assert capfd.readouterr().out.strip() == "7"


def test_the_launcher_imports_nothing_from_a_run_folder_of_others(hostile: Path) -> None:
    command = [*launcher(2), "config", "--get", "train.steps", "train.steps=7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(90), check=False)
    assert done.returncode == 0 and done.stdout.split()[-2:] == ["7", "7"], done.stdout + done.stderr


def test_workers_and_other_children_import_nothing_from_it_either(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool starts its workers by `python -c`; libraries start what they like."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    keep_working_directory_out()
    with map_unordered(abs, [-1, -2, -3], workers=2) as results:
        assert sorted(results) == [1, 2, 3]
    child = subprocess.run([sys.executable, "-c", "import yaml, socket"], env=os.environ, check=False)
    assert child.returncode == 0
