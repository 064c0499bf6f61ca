"""Identify the running code: the state of its git checkout, and the versions of libraries.

The checkout is that of the package's files, not of the folder a run was started in. A repository that merely surrounds
an installed copy is ignored, such as that of a project with a virtual environment in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dist_mem.runtime.addresses import login_of
from dist_mem.runtime.environment import environment_of_git, node_name, slurm_job, user_name
from dist_mem.runtime.files import is_missing, read_regular
from dist_mem.runtime.terminal import short_digest
from dist_mem.runtime.versions import code_versions
from dist_mem.version import __version__

PACKAGE = Path(__file__).parent.parent
MAX_DIFF_CHARS = 1_000_000
UNKNOWN_TAG = "dist_mem.git.unknown"  # what is unknown, and why
UNTRACKED_TAG = "dist_mem.git.untracked"  # files of the package in neither the commit nor the diff
_SECONDS = 5.0  # time limit of a git command; a diff of the checkout is slow on a network disk


class GitState(NamedTuple):
    """State of the git checkout of the running code."""

    tags: dict[str, str]  # under MLflow's names
    diff: str  # `git diff HEAD` of the whole checkout, tracked files only; empty without changes


class GitError(Exception):
    """A git command failed; the message is the reason, in one line."""


def versions() -> dict[str, str]:
    """Return `code_versions` as tags."""
    return {f"version.{name.replace('-', '_')}": text for name, text in code_versions().items()}


def who_runs_what() -> dict[str, str]:
    """Return the tags that every MLflow client sets, with the user of this machine instead of MLflow's login name."""
    tags = {"mlflow.user": user_name() or "unknown", "mlflow.source.name": sys.argv[0], "mlflow.source.type": "LOCAL"}
    return {tag: value for tag, value in tags.items() if value}


def start_in_words(first_step: int) -> str:
    """Describe this start for the history of the run: `from step 500, job 12, restart 2, node[1-2], TIME`."""
    job = slurm_job()
    array = (
        f" (task {job['SLURM_ARRAY_TASK_ID']} of {job.get('SLURM_ARRAY_JOB_ID')})"
        if "SLURM_ARRAY_TASK_ID" in job
        else ""
    )
    where = (
        f"job {job['SLURM_JOB_ID']}{array}, restart {job['SLURM_RESTART_COUNT']}, {job.get('SLURM_JOB_NODELIST')}"
        if job
        else f"on {node_name()}"
    )
    return f"from step {first_step}, {where}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def git_state(package: Path = PACKAGE) -> GitState:
    """Return commit, branch, remote and uncommitted changes of the checkout that contains `package`; never raises.

    Unknown values are left out, with the reason in the tag `dist_mem.git.unknown`.
    """
    if kept := _read_kept(package):
        return GitState(kept["tags"], kept["diff"])
    try:
        _check_checkout(package)
    except GitError as error:
        return GitState({"version.dist_mem": __version__, UNKNOWN_TAG: str(error)}, "")
    queries: dict[str, Callable[[], str]] = {
        "mlflow.source.git.commit": lambda: _git(package, "log", "-1", "--no-show-signature", "--format=%H").strip(),
        "mlflow.source.git.branch": lambda: _branch(package),
        "mlflow.source.git.repoURL": lambda: _remote(package),
        UNTRACKED_TAG: lambda: ", ".join(_git(package, "ls-files", "--others", "--exclude-standard").splitlines()),
    }
    tags, reasons, diff = {}, [], ""
    for tag, find in queries.items():
        try:
            tags[tag] = find()
        except GitError as error:
            reasons.append(f"{tag.rpartition('.')[2]}: {error}")
    try:
        # The user's configuration may ask for other prefixes, colours, or another program altogether.
        plain = ("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false", "-c", "diff.relative=false")
        diff = _git(package, *plain, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")
        tags["mlflow.source.git.dirty"] = "true" if diff else "false"  # as in MLflow, untracked files do not count
    except GitError as error:
        reasons.append(f"dirty: {error}")
    if reasons:
        tags[UNKNOWN_TAG] = "; ".join(reasons)
    if len(diff) > MAX_DIFF_CHARS:
        cut = f"[cut here: {MAX_DIFF_CHARS:,} of {len(diff):,} characters]"
        diff = f"{diff[:MAX_DIFF_CHARS]}\n{cut}\n"
    return GitState({tag: value for tag, value in tags.items() if value}, diff)


def running_commit(package: Path = PACKAGE) -> str | None:
    """Return the commit of the running code, followed by `+` if files are changed; None if it is unknown."""
    if kept := _read_kept(package):
        commit: str | None = kept["commit"]
        return commit
    try:
        _check_checkout(package)
        return _git(package, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*").strip()
    except GitError:
        return None


def to_keep() -> dict[str, Any]:
    """Return the git state of the running code, to store with a copy that is no checkout (launch/code_snapshot.py)."""
    return {**git_state()._asdict(), "commit": running_commit()}


def _read_kept(package: Path) -> dict[str, Any] | None:
    """Return the result of `to_keep` stored beside a copy of the code; None for other code."""
    path = package.parent / "git.json"
    if is_missing(path):
        return None
    kept: dict[str, Any] = json.loads(read_regular(path))
    return kept


def code_differences(versions_then: Mapping[str, str], commit_then: str | None, commit_now: str | None) -> str:
    """List the differences between the code of a checkpoint and the running code: `torch 2.12 -> 2.13`; "" if none."""
    now = code_versions()
    pairs = {name: (then, now.get(name)) for name, then in versions_then.items()}
    if commit_then and commit_now:
        pairs["commit"] = (short_digest(commit_then), short_digest(commit_now))
    return ", ".join(f"{name} {then} -> {is_now}" for name, (then, is_now) in pairs.items() if then != is_now)


def _git(folder: Path, *arguments: str) -> str:
    """Run git and return its output. Raises GitError."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment_of_git(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            encoding="utf-8",
            errors="replace",  # a diff may hold text of any encoding
        )
    except FileNotFoundError:
        raise GitError("there is no git command") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} took more than {_SECONDS:g} s") from None
    except OSError as error:
        raise GitError(f"git cannot be run: {error}") from None
    if done.returncode:
        message = done.stderr.strip().partition("\n")[0] or f"git {arguments[0]} exits with {done.returncode}"
        raise GitError(message.removeprefix("fatal: ").removeprefix("error: "))
    return done.stdout


def _check_checkout(package: Path) -> None:
    """Raise GitError if a package is not part of a checkout."""
    if not _git(package, "ls-files", "__init__.py"):
        raise GitError(f"{package} is not part of a checkout, although one surrounds it")


def _branch(folder: Path) -> str:
    name = _git(folder, "branch", "--show-current").strip()
    if not name:
        raise GitError("HEAD is detached")
    return name


def _remote(folder: Path) -> str:
    """Return the URL of `origin`, else of the first remote; empty without remotes."""
    remotes = _git(folder, "remote").split()
    if not remotes:
        return ""
    name = "origin" if "origin" in remotes else remotes[0]
    try:
        return without_credentials(_git(folder, "config", "--get", f"remote.{name}.url").strip())
    except ValueError:
        raise GitError("its URL cannot be read") from None


def without_credentials(url: str) -> str:
    """Return the URL without user, password and query, which may have a password too, as of a database's socket.

    Paths, `git@host:path` and addresses of local files, as of SQLite, contain no secret and are unchanged.

    Raises:
        ValueError: the URL is malformed, as by an unmatched bracket.
    """
    parts = urlsplit(url)
    is_file = not parts.netloc and parts.scheme.partition("+")[0] in ("file", "sqlite")
    if not parts.scheme or "://" not in url or is_file:
        return url
    rest = url.partition("://")[2]
    place = re.split("[?#]", rest.removeprefix(login_of(parts.scheme, rest)))[0]
    return f"{parts.scheme}://{place}"
