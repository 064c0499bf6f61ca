"""Compiled code on a node's own disk: loaded only from a folder of this user into which nobody else can write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.runtime import compilers

OTHER = 65534  # nobody
VARIABLES = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


def of_another(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)


def writable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    (folder.parent / "theirs").mkdir()
    folder.symlink_to(folder.parent / "theirs")


@pytest.fixture
def node_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that DIST_MEM_CACHES names; the user's own caches lie beside it, and no variable is set."""
    (tmp_path / "disk").mkdir()
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DIST_MEM_CACHES", str(tmp_path / "disk"))
    return tmp_path / "disk"


@pytest.mark.parametrize("plant", [of_another, writable_by_others, a_link])
def test_folder_that_others_may_fill_is_never_used(
    node_disk: Path, capsys: pytest.CaptureFixture[str], plant: Callable[[Path], None]
) -> None:
    folder = node_disk / f"dist_mem-{os.getuid()}"
    plant(folder)
    compilers.use_node_caches()
    used = [Path(os.environ[name]) for name in VARIABLES]
    assert all(path.is_relative_to(node_disk.parent / "home") for path in used), used
    assert f"{folder} must be a folder of this user" in capsys.readouterr().err


def test_own_folder_is_made_for_its_user_alone_and_used(node_disk: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = "/mine"
    for _ in range(2):  # made, then found
        compilers.use_node_caches()
    folder = node_disk / f"dist_mem-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder / "torch_extensions")
    assert os.environ["TRITON_CACHE_DIR"] == "/mine", "what the user has set stays"


def test_without_a_node_disk_nothing_is_set(node_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST_MEM_CACHES")
    compilers.use_node_caches()
    assert not set(VARIABLES) & os.environ.keys()
