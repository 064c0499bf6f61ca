"""The copy of code and configuration that a job runs: whole or absent, and read in place of what it was made of."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import load_config
from dist_mem.errors import UnusableError
from dist_mem.launch import code_snapshot as snapshot
from dist_mem.runtime.environment import as_submitted
from dist_mem.tracking import provenance
from tests.support.messages import refused
from tests.support.paths import ROOT


def test_configuration_is_read_from_the_copy_though_its_files_are_edited_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("train: {steps: 3}\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    before = load_config(["a.yaml", "train.seed=4"])
    command = [sys.executable, "-m", "dist_mem", "config", "--snapshot", "copy", "a.yaml", "train.seed=4"]
    subprocess.run(command, check=True)
    (tmp_path / "a.yaml").write_text("train: {steps: 5}\n")
    (tmp_path / "ds.json").unlink()
    monkeypatch.setenv("DIST_MEM_SNAPSHOT", str(tmp_path / "copy"))
    assert load_config(["a.yaml", "train.seed=4"]) == before


def test_copy_has_the_package_its_configurations_and_git_state_and_no_more(tmp_path: Path) -> None:
    snapshot.make(tmp_path / "copy", [], {"tags": {"a": "b"}, "diff": "c", "commit": "d+"})
    code = tmp_path / "copy" / "code"
    assert {path.name for path in code.iterdir()} == {"configs", "dist_mem", "git.json", "launch"}
    assert (code / "configs" / "demo.yaml").read_bytes() == (ROOT / "configs" / "demo.yaml").read_bytes()
    package = tmp_path / "copy" / "code" / "dist_mem"
    assert (package / "model.py").read_bytes() == (snapshot.PACKAGE / "model.py").read_bytes()
    assert provenance.git_state(package) == ({"a": "b"}, "c")
    assert provenance.running_commit(package) == "d+"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_nobody_else_may_read_a_copy_than_may_read_the_file(tmp_path: Path, mode: int) -> None:
    (tmp_path / "a.yaml").write_text("launch: {env: ['TOKEN=secret']}\n")
    (tmp_path / "a.yaml").chmod(mode)
    snapshot.make(tmp_path / "copy", [tmp_path / "a.yaml"], {})
    copy = tmp_path / "copy" / "files" / (tmp_path / "a.yaml").relative_to("/")
    assert copy.stat().st_mode & 0o777 == mode and copy.read_bytes() == (tmp_path / "a.yaml").read_bytes()


def test_of_two_launches_of_the_same_code_one_makes_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copytree = shutil.copytree

    def overtaken(*given: Any, **options: Any) -> Any:
        (tmp_path / "copy" / "code").mkdir(parents=True, exist_ok=True)
        return copytree(*given, **options)

    monkeypatch.setattr(shutil, "copytree", overtaken)
    snapshot.make(tmp_path / "copy", [], {})
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_copy_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    with refused(UnusableError, "absent.yaml"):
        snapshot.make(tmp_path / "copy", [tmp_path / "absent.yaml"], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 25), "train.seed=\0"])
def test_name_that_no_file_can_have_is_not_looked_for_in_the_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An override may be longer than a file name; an error of a path belongs to who opens it."""
    (tmp_path / "files" / Path.cwd().relative_to("/")).mkdir(parents=True)
    monkeypatch.setenv("DIST_MEM_SNAPSHOT", os.fspath(tmp_path))
    assert as_submitted(Path(name)) == Path(name)
