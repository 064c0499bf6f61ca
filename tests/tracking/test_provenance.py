"""What a run says of the code it is made with."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from dist_mem import __version__
from dist_mem.tracking import provenance
from dist_mem.tracking.provenance import (
    MAX_DIFF_CHARS,
    UNKNOWN_TAG,
    UNTRACKED_TAG,
    git_state,
    versions,
    without_credentials,
)

GIT = "mlflow.source.git."


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def no_user_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout with one commit; the root of the checkout is its parent."""
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    (package.parent / "config.yaml").write_text("lr: 1\n")
    git(package.parent, "init")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-m", "first")
    return package


def test_clean_checkout_is_described_under_mlflows_names(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the package in a git hook too, and a file that was only touched is not dirty."""
    git(package, "remote", "add", "fork", "https://somewhere/else")
    git(package, "remote", "add", "origin", "https://ann:secret@host.org:8443/group/project.git?token=secret")
    tags = {f"{GIT}commit": git(package, "rev-parse", "HEAD"), f"{GIT}branch": "main", f"{GIT}dirty": "false"}
    os.utime(package / "__init__.py", (1e9, 1e9))
    git(package.parent.parent, "init", "other")
    for name, path in (("GIT_DIR", ".git"), ("GIT_INDEX_FILE", ".git/index")):
        monkeypatch.setenv(name, str(package.parent.parent / "other" / path))
    assert git_state(package) == ({**tags, f"{GIT}repoURL": "https://host.org:8443/group/project.git"}, "")


def test_changes_of_the_whole_checkout_make_a_patch_whatever_the_users_configuration(package: Path) -> None:
    for setting in ("diff.noprefix true", "diff.external false", "color.ui always", "diff.relative true"):
        git(package, "config", *setting.split())
    (package / "__init__.py").write_bytes(b"one = 1\ntwo = '\xe9'\n")
    (package.parent / "config.yaml").write_text("lr: 2\n")
    git(package, "add", "__init__.py")
    tags, diff = git_state(package)
    assert tags[f"{GIT}dirty"] == "true"
    assert "diff --git a/package/__init__.py b/package/__init__.py" in diff
    assert "+two = '\N{REPLACEMENT CHARACTER}'" in diff
    assert "+lr: 2" in diff
    assert "\x1b" not in diff


def test_new_files_are_named_and_their_content_is_kept_out(package: Path) -> None:
    (package / "mine.py").write_text("secret = 1\n")
    (package.parent / "notes.txt").write_text("secret = 2\n")
    tags, diff = git_state(package)
    assert (tags[UNTRACKED_TAG], tags[f"{GIT}dirty"], diff) == ("mine.py", "false", "")


def test_long_diff_is_cut_and_the_cut_is_marked(package: Path) -> None:
    (package / "__init__.py").write_text("x = 1\n" * 400_000)
    diff = git_state(package).diff
    assert MAX_DIFF_CHARS < len(diff) < MAX_DIFF_CHARS + 100
    assert diff.endswith(" characters]\n")
    assert "[cut here: 1,000,000 of 2,8" in diff


def test_detached_head_has_a_commit_and_no_branch(package: Path) -> None:
    git(package, "checkout", "--detach")
    tags = git_state(package).tags
    assert tags[f"{GIT}commit"] == git(package, "rev-parse", "HEAD") and f"{GIT}branch" not in tags
    assert tags[UNKNOWN_TAG] == "branch: HEAD is detached"


def test_checkout_without_a_commit_has_a_branch(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    tags, diff = git_state(tmp_path)
    assert (tags[f"{GIT}branch"], diff) == ("main", "")
    assert f"{GIT}commit" not in tags
    assert "commit: your current branch 'main' does not have any commits yet" in tags[UNKNOWN_TAG]


def test_worktree_of_a_bare_repository_is_a_checkout(package: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--bare", str(package.parent), "bare.git")
    git(tmp_path / "bare.git", "worktree", "add", "-b", "side", str(tmp_path / "side"))
    tags = git_state(tmp_path / "side" / "package").tags
    assert (tags[f"{GIT}branch"], tags[f"{GIT}commit"]) == ("side", git(package, "rev-parse", "HEAD"))


def installed_in_a_project(package: Path) -> str:
    """A copy in an environment inside a project that has a repository of its own."""
    copy = package.parent / "venv" / "package"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text("")
    return str(copy)


def declared_bare(package: Path) -> str:
    git(package, "config", "core.bare", "true")
    return str(package)


def of_another_user(package: Path) -> str:
    subprocess.run(["chown", "-R", "12345", package.parent], check=True)
    return str(package)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda package: str(package.parent.parent), "not a git repository"),
        (installed_in_a_project, "is not part of a checkout, although one surrounds it"),
        (declared_bare, "is not part of a checkout"),
        (lambda package: str(package / "nowhere"), "No such file or directory"),
        pytest.param(
            of_another_user, "dubious ownership", marks=pytest.mark.skipif("os.getuid() != 0", reason="needs chown")
        ),
    ],
)
def test_what_git_cannot_tell_leaves_the_version_and_the_reason(
    package: Path, change: Callable[[Path], str], reason: str
) -> None:
    tags, diff = git_state(Path(change(package)))
    assert reason in tags.pop(UNKNOWN_TAG)
    assert (tags, diff) == ({"version.dist_mem": __version__}, "")


def test_a_git_that_is_not_there_or_hangs_is_the_reason(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(package).tags[UNKNOWN_TAG] == "there is no git command"
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(provenance, "_SECONDS", 0.2)
    assert git_state(package).tags[UNKNOWN_TAG] == "git ls-files took more than 0.2 s"


SHOWN = {
    "https://user:password@host/a/b.git": "https://host/a/b.git",
    "https://token@host:8443/a": "https://host:8443/a",
    "ssh://git@host/a": "ssh://host/a",
    "git@host.org:a/b.git": "git@host.org:a/b.git",
    "/srv/git/a@b": "/srv/git/a@b",
    "https://host/a?access_token=x#y": "https://host/a",
    "postgresql+psycopg2:///db?host=/sock&user=me&password=secret": "postgresql+psycopg2:///db",
    "postgresql://me:secret@/db?host=/sock": "postgresql:///db",
    "mssql+pyodbc:///?odbc_connect=PWD%3Dsecret": "mssql+pyodbc:///",
    "postgresql://me:se/c#r?et@db/x?password=secret": "postgresql://db/x",
    "postgresql://me:1/2@db/x": "postgresql://db/x",
    "https://me:se/c#r?et@host:5000/a@b?c": "https://host:5000/a@b",
    "https://host:5000/a@b": "https://host:5000/a@b",
    "hf://datasets/ada/pg19@main": "hf://datasets/ada/pg19@main",
    "sqlite:////a/m.db": "sqlite:////a/m.db",
    "sqlite:///a#b.db?timeout=5": "sqlite:///a#b.db?timeout=5",
    "file:///srv/git/a?b": "file:///srv/git/a?b",
    "host:a?b": "host:a?b",
}


def test_repository_or_store_is_named_without_credentials() -> None:
    assert {url: without_credentials(url) for url in SHOWN} == SHOWN


def test_versions_are_those_that_run_and_need_no_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree on the path has no metadata."""

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    expected = versions()
    assert set(expected) == {"version.dist_mem", "version.python", "version.torch", "version.deepspeed"}
    assert expected["version.dist_mem"] == __version__
    # A wheel's version may lack the local part, as +cu130.
    assert str(torch.__version__).startswith(expected["version.torch"])
    monkeypatch.setattr("dist_mem.runtime.versions.version", unknown)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    del expected["version.deepspeed"]
    assert versions() == {**expected, "version.torch": str(torch.__version__)}


def test_commit_of_the_running_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the run is started."""
    root = Path(provenance.__file__).parent.parent
    if not (root / ".git").exists():
        pytest.skip("the tests do not run from a checkout")
    commit = git(root, "rev-parse", "HEAD")
    monkeypatch.chdir(tmp_path)
    assert git_state().tags[f"{GIT}commit"] == commit
