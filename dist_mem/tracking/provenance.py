"""Which code is running: the state of the git checkout it was imported from, and the versions beside it.

The checkout is that of the package's own files, not of the folder a run was started in; and nothing is taken from a
repository that merely surrounds an installed copy, as that of a project with a virtual environment in it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from dist_mem import __version__
from dist_mem.runtime.environment import environment_of_git, node_name, slurm_job, user_name

PACKAGE = Path(__file__).parent.parent
MAX_DIFF_CHARS = 1_000_000
UNKNOWN_TAG = "dist_mem.git.unknown"  # what could not be found out, and why
UNTRACKED_TAG = "dist_mem.git.untracked"  # files of the package that neither the commit nor the diff has
_SECONDS = 5.0  # for one answer of git; on a network disk a diff of the checkout takes a while


class GitState(NamedTuple):
    """What git says of the running code."""

    tags: dict[str, str]  # under MLflow's own names
    diff: str  # `git diff HEAD` of the whole checkout, tracked files only; empty if nothing is changed


class GitError(Exception):
    """Git does not answer a question; the message is its reason, in one line."""


def versions() -> dict[str, str]:
    """Versions of dist_mem, Python, torch and DeepSpeed as tags, without importing any."""
    found = {"version.dist_mem": __version__, "version.python": platform.python_version()}
    for name in ("torch", "deepspeed"):
        try:
            found[f"version.{name}"] = version(name)
        except PackageNotFoundError:  # put on the path by hand
            continue
    return found


def who_runs_what() -> dict[str, str]:
    """The tags that every MLflow client sets. The user is that of this machine: MLflow's own takes the login's name."""
    tags = {"mlflow.user": user_name() or "unknown", "mlflow.source.name": sys.argv[0], "mlflow.source.type": "LOCAL"}
    return {tag: value for tag, value in tags.items() if value}


def start_in_words(first_step: int) -> str:
    """This start of a run, for the history of its starts: `from step 500, job 12, restart 2, node[1-2], TIME`."""
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
    """The commit, branch, remote and uncommitted changes of the checkout that holds `package`; never raises.

    What cannot be known is left out, with the reason in the tag `dist_mem.git.unknown`.
    """
    if kept := _kept(package):
        return GitState(kept["tags"], kept["diff"])
    try:
        if not _git(package, "ls-files", "__init__.py"):
            raise GitError(f"{package} is no part of a checkout, although one surrounds it")
    except GitError as error:
        return GitState({"version.dist_mem": __version__, UNKNOWN_TAG: str(error)}, "")
    facts: dict[str, Callable[[Path], str]] = {
        "mlflow.source.git.commit": _commit,
        "mlflow.source.git.branch": _branch,
        "mlflow.source.git.repoURL": _remote,
        UNTRACKED_TAG: _untracked,
    }
    tags, reasons, diff = {}, [], ""
    for tag, find in facts.items():
        try:
            tags[tag] = find(package)
        except GitError as error:
            reasons.append(f"{tag.rpartition('.')[2]}: {error}")
    try:
        diff = _diff(package)
        tags["mlflow.source.git.dirty"] = "true" if diff else "false"  # as MLflow has it: untracked files do not count
    except GitError as error:
        reasons.append(f"dirty: {error}")
    if reasons:
        tags[UNKNOWN_TAG] = "; ".join(reasons)
    return GitState({tag: value for tag, value in tags.items() if value}, _cut(diff))


def running_commit(package: Path = PACKAGE) -> str | None:
    """The commit of the running code, with `+` behind it where files are changed; None if git cannot tell."""
    if kept := _kept(package):
        commit: str | None = kept["commit"]
        return commit
    try:
        if not _git(package, "ls-files", "__init__.py"):
            return None
        return _git(package, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*").strip()
    except GitError:
        return None


def to_keep() -> dict[str, Any]:
    """What git says of the running code, for a copy of it, which is no checkout (launch/code_snapshot.py)."""
    return {**git_state()._asdict(), "commit": running_commit()}


def _kept(package: Path) -> dict[str, Any] | None:
    path = package.parent / "git.json"
    if not path.is_file():
        return None
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def code_differences(versions_then: Mapping[str, str], commit_then: str | None, commit_now: str | None) -> str:
    """What differs between the code that wrote a checkpoint and the running one, as `torch 2.12 -> 2.13`; or ""."""
    now = {tag.removeprefix("version.").replace("_", "-"): text for tag, text in versions().items()}
    pairs = {name: (then, now.get(name)) for name, then in versions_then.items()}
    if commit_then and commit_now:
        pairs["commit"] = (commit_then, commit_now)
    return ", ".join(f"{name} {then} -> {is_now}" for name, (then, is_now) in pairs.items() if then != is_now)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints. Raises GitError."""
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
        complaint = done.stderr.strip().partition("\n")[0] or f"git {arguments[0]} exits with {done.returncode}"
        raise GitError(complaint.removeprefix("fatal: ").removeprefix("error: "))
    return done.stdout


def _commit(folder: Path) -> str:
    return _git(folder, "log", "-1", "--no-show-signature", "--format=%H").strip()


def _branch(folder: Path) -> str:
    name = _git(folder, "branch", "--show-current").strip()
    if not name:
        raise GitError("HEAD is detached")
    return name


def _remote(folder: Path) -> str:
    """The URL of `origin`, else of the first remote there is; empty without one."""
    remotes = _git(folder, "remote").split()
    if not remotes:
        return ""
    name = "origin" if "origin" in remotes else remotes[0]
    return without_credentials(_git(folder, "config", "--get", f"remote.{name}.url").strip())


def without_credentials(url: str) -> str:
    """The URL without user, password and query; `git@host:path` names no secret and stays."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a stray bracket
        raise GitError("its URL cannot be read") from None
    if not (parts.scheme and parts.netloc):
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _untracked(folder: Path) -> str:
    """Names of the package's files that git does not have and does not ignore; empty if there are none."""
    return ", ".join(_git(folder, "ls-files", "--others", "--exclude-standard").splitlines())


def _diff(folder: Path) -> str:
    # The user's configuration may ask for other prefixes, colours, or another program altogether.
    plain = ("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false", "-c", "diff.relative=false")
    return _git(folder, *plain, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")


def _cut(diff: str) -> str:
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    return f"{diff[:MAX_DIFF_CHARS]}\n[cut here: {MAX_DIFF_CHARS:,} of {len(diff):,} characters]\n"
