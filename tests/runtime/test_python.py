"""Where the program runs: it imports nothing from the working directory, and needs no home directory."""

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.runtime.children import launcher
from dist_mem.runtime.environment import extension_cache, keep_working_directory_out
from dist_mem.runtime.processes import python_module
from dist_mem.runtime.workers import map_unordered
from tests.support.jobs import write_config
from tests.support.limits import limit
from tests.support.messages import said_line
from tests.support.paths import PACKAGE, ROOT

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


# A user without a home directory: a folder of its own takes its place, for every library that looks for one

UID = os.getuid()
# HOME (None: not set) and whether passwd knows the user -> the home; None: a folder in TMPDIR.
HOMES: Mapping[str, tuple[str | None, bool, str | None]] = {
    "not set": (None, False, None),
    "empty": ("", False, None),
    "of passwd": (None, True, "mine"),
    "of the image": ("/", False, None),
    "cannot be made": ("/proc/nobody", False, None),
    "a file": ("mine/file", False, None),
    "there": ("mine", False, "mine"),
    "to be made": ("mine/later", False, "mine/later"),
    "read-only, perhaps with credentials": ("read-only", False, "read-only"),
}


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with homes, and an empty TMPDIR; only what is inside of `mine` and TMPDIR can be written."""
    for name in ("mine", "read-only", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "file").touch()
    writable = (str(tmp_path / "mine"), str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(writable) and Path(path).is_dir())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", HOMES)
def test_home_is_what_the_user_has_or_else_a_folder_in_tmpdir(
    name: str, homes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, is_known, expected = HOMES[name]
    monkeypatch.setenv("HOME", str(homes / given) if given else "")
    if given is None:
        monkeypatch.delenv("HOME")

    def entry(uid: int) -> pwd.struct_passwd:
        if not is_known:
            raise KeyError(uid)
        return pwd.struct_passwd(("ada", "x", uid, uid, "", str(homes / "mine"), "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", entry)
    assert main(["config", "--get", "train.steps", "train.steps=7"]) == 0
    own = homes / "tmp" / f"dist_mem-{UID}" / "home"
    assert Path("~").expanduser() == (own if expected is None else homes / expected)
    warned = capsys.readouterr().err
    assert ("home directory" in warned) == (expected is None)
    if expected is None:
        said_line(warned, f"user {UID}", own)
    assert not (homes / "~").exists()


def test_a_folder_of_others_in_tmpdir_is_no_home(
    homes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (homes / "tmp" / f"dist_mem-{UID}").mkdir()
    (homes / "tmp" / f"dist_mem-{UID}").chmod(0o777)
    monkeypatch.setenv("HOME", "/")
    assert main(["config"]) == 2
    text = capsys.readouterr().err
    assert "has no home directory, and " in text and "; set HOME to a folder of yours" in text


@pytest.mark.skipif(shutil.which("unshare") is None or UID != 0, reason="needs unshare, as root")
def test_a_user_whom_the_machine_does_not_know_trains(tmp_path: Path, books: Path) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 1}})
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", str(extension_cache()))
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "TORCH_EXTENSIONS_DIR": compiled}
    command = ["unshare", "-U", "--map-user=54321", sys.executable, "-m", "dist_mem", "train", str(config)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit(120), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir() and not (tmp_path / "~").exists()
