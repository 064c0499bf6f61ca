"""The jobs of a run, and their state in Slurm.

    RUN/slurm/jobs        one line per job: its number (for an array, that of the whole) and its cluster, oldest first
    RUN/slurm/cancelled   the same, for the jobs that `dist-mem cancel` ends: job.sh starts none of them again

`dist-mem launch` writes the first line; job.sh adds the jobs submitted otherwise, and those that it resubmits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.environment import environment_of_slurm
from dist_mem.runtime.files import open_regular, read_regular, write_text

JOBS = Path("slurm") / "jobs"  # in the run directory
CANCELLED = Path("slurm") / "cancelled"
_NUMBER = re.compile(r"\d+(_\d+)?")
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
    since: str  # actual or expected start; N/A: unknown
    nodes: str  # as node[1-2]; empty before the start
    reason: str  # why it is pending

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state."""
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        """Whether the job is queued."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def is_here() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def record(run_dir: Path, job: str) -> None:
    """Append a submitted job to `JOBS`. Raises OSError."""
    with open_regular(run_dir / JOBS, "ab") as file:
        file.write(f"{job} {cluster()}\n".encode())


def recorded(run_dir: Path) -> list[str]:
    """Return the lines of `JOBS`, each once, oldest first; none without the file."""
    try:
        lines = read_regular(run_dir / JOBS).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in dict.fromkeys(lines) if _NUMBER.fullmatch(line.partition(" ")[0])]


def recorded_here(run_dir: Path) -> list[str]:
    """Return the lines of `recorded` for this cluster; a number from another one may be an unrelated job here.

    Raises:
        UnusableError: all jobs are of other clusters.
    """
    lines = recorded(run_dir)
    here = [line for line in lines if line.partition(" ")[2] == cluster()]
    if lines and not here:
        number, _, owner = lines[-1].partition(" ")
        raise UnusableError(
            f"{run_dir}: job {number} is of the cluster {owner!r}, and this is {cluster()!r}; use the command there"
        )
    return here


def numbers_here(run_dir: Path) -> list[str]:
    """Return the job numbers of `recorded_here`."""
    return [line.partition(" ")[0] for line in recorded_here(run_dir)]


@cache
def cluster() -> str:
    """Return the cluster's name, which its jobs see as SLURM_CLUSTER_NAME."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else ""


def look(numbers: Iterable[str]) -> list[Job]:
    """Return these jobs as squeue lists them, without those that Slurm has forgotten, minutes after their end."""
    wanted = ",".join(numbers)
    if not wanted:
        return []
    text = _ask("squeue", "--noheader", f"--jobs={wanted}", "--states=all", "--format=%i|%T|%S|%N|%r")
    return [Job(*line.split("|", 4)) for line in text.splitlines() if line.count("|") >= 4]


def live(run_dir: Path) -> list[Job]:
    """Return the jobs of a run that are queued or running on this cluster."""
    return [job for job in look(numbers_here(run_dir)) if not job.has_ended]


def log_of(number: str) -> Path | None:
    """Return the log of a job's batch script; None if Slurm has forgotten the job."""
    text = _ask("scontrol", "show", "job", number, "--oneliner")
    found = re.search(r" StdOut=(.*?)(?: [A-Z]\w*=|$)", text, re.MULTILINE)
    return Path(found[1]) if found else None


def mark_cancelled(run_dir: Path, lines: Iterable[str]) -> None:
    """Write `CANCELLED`, so that job.sh starts none of these jobs again; lines as in `JOBS`."""
    write_text(run_dir / CANCELLED, "".join(f"{line}\n" for line in lines))


def scancel(*options: str) -> None:
    """Call scancel; a job that has already ended is no error.

    Raises:
        UnusableError: the job belongs to another user.
        UnfitError: Slurm does not answer.
    """
    _ask("scancel", *options)


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
