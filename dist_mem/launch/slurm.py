"""Slurm's commands: what a cluster says of jobs, and ending them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.slurm_variables import environment_of_slurm

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
_GONE = re.compile(r"Invalid job id|already complet(ing|ed)", re.IGNORECASE)
_DENIED = re.compile(r"denied|permission", re.IGNORECASE)
_SECONDS = 120.0  # a busy controller is slow; squeue itself gives up earlier


class Job(NamedTuple):
    """A job, or some tasks of an array, as squeue lists it."""

    number: str  # as 12, 12_3, 12_[4-10%1]
    state: str  # as PENDING, RUNNING, COMPLETING, FAILED
    since: str  # actual or expected start, of this host's clock; N/A: unknown
    nodes: str  # as node[1-2]; empty before the start
    reason: str  # why it is pending
    submitted: str  # in UTC; a requeue changes it
    name: str  # with _ for white space
    cluster: str

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        """Whether the job is queued."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def name_for_slurm(self) -> str:
        """The number as other commands take it: of waiting tasks, that of their array."""
        return self.number.partition("_[")[0]


def is_here() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


@cache
def cluster() -> str:
    """Return this cluster's name, which its jobs see as SLURM_CLUSTER_NAME."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else ""


def list_jobs(numbers: Iterable[str], of: str) -> list[Job]:
    """Return these jobs of a cluster as squeue lists them, without those that ended minutes ago, which it forgets."""
    wanted = ",".join(numbers)
    columns = "--format=%i|%T|%S|%N|%r|%V|%j"
    text = _ask("squeue", *_cluster_option(of), "--noheader", f"--jobs={wanted}", "--states=all", columns)
    lines = [line.split("|", 6) for line in text.splitlines() if line.count("|") >= 6]
    return [
        Job(number, state, _local(since), nodes, reason, submitted, re.sub(r"\s", "_", name), of)
        for number, state, since, nodes, reason, submitted, name in lines
    ]


def _local(time: str) -> str:
    """Return a time in UTC as one of this host; unchanged if it is none, as N/A."""
    try:
        return datetime.fromisoformat(time).replace(tzinfo=UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return time


def facts(number: str, of: str) -> dict[str, str]:
    """Return what scontrol shows of a job, or of the first of several tasks; empty if Slurm has forgotten it."""
    text = _ask("scontrol", *_cluster_option(of), "show", "job", number, "--oneliner").partition("\n")[0]
    return dict(re.findall(r"(?:^| )([A-Z]\w*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", text))


def scancel(of: str, *options: str) -> None:
    """Call scancel for a cluster; a job that has already ended is no error.

    Raises:
        UnusableError: the job belongs to another user.
        UnfitError: Slurm does not answer.
    """
    _ask("scancel", *_cluster_option(of), *options)


def _cluster_option(of: str) -> list[str]:
    return [] if of == cluster() else [f"--clusters={of}"]


def _ask(*command: str) -> str:
    """Return the output of a Slurm command; empty if Slurm no longer knows the job."""
    if shutil.which(command[0]) is None:
        raise UnusableError(f"there is no {command[0]} here; use a login node of the cluster")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment_of_slurm(), timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnfitError(f"{command[0]} does not answer within {_SECONDS:.0f} s; try again") from None
    complaint = (done.stderr or done.stdout).strip()
    if done.returncode == 0:
        return done.stdout
    if _GONE.search(complaint):
        return ""
    if _DENIED.search(complaint):
        raise UnusableError(f"{' '.join(command)}: {complaint}; only the owner of a job may do this")
    raise UnfitError(f"{' '.join(command)} (exit code {done.returncode}): {complaint}; try again")
