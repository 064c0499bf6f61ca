"""The jobs of a run: those that it records, compared with those that Slurm has under these numbers.

    RUN/slurm/jobs        NUMBER CLUSTER SUBMITTED NAME RUN_DIR, a line for each submission and start, oldest first;
                          of an array the number of the whole; the time is in UTC
    RUN/slurm/cancelled   NUMBER CLUSTER SUBMITTED of the jobs that `dist-mem cancel` ends: job.sh starts none of them

`dist-mem launch` writes the first line; job.sh adds the jobs submitted otherwise, those that it resubmits, and each
start, as a requeue changes the time. Slurm counts from 1 again when its state is lost, and a copy of a run directory
has the lines of the original: nothing is shown or cancelled by its number alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dist_mem.errors import UnfitError, UnusableError, run_error
from dist_mem.launch import slurm
from dist_mem.launch.slurm import Job
from dist_mem.runtime.files import open_regular, read_regular, write_text

JOBS = Path("slurm") / "jobs"  # in the run directory
CANCELLED = Path("slurm") / "cancelled"
_NUMBER = re.compile(r"\d+(_\d+)?")


class Record(NamedTuple):
    """A line of `JOBS`. Older versions have written only its first two words."""

    number: str
    cluster: str
    submitted: str = ""
    name: str = ""
    run_dir: str = ""

    def has_number_of(self, job: Job) -> bool:
        """Return whether the job, or the array of its tasks, has the number of this one."""
        is_task = job.number.startswith(f"{self.number}_")
        return job.cluster == self.cluster and (is_task or job.number == self.number)


class RunJobs(NamedTuple):
    """What Slurm has under the numbers that a run records, in their order."""

    jobs: list[Job]  # of the run
    others: list[str]  # of jobs that have not ended: why each is none of the run's


def record(run_dir: Path, number: str, cluster: str) -> None:
    """Append a submitted job to `JOBS`.

    Raises:
        OSError: the file cannot be written.
        UnfitError, UnusableError: Slurm does not answer.
    """
    job = next(iter(slurm.list_jobs([number], cluster)), None)
    facts = f" {job.submitted} {job.name} {run_dir.resolve()}" if job else ""
    with open_regular(run_dir / JOBS, "ab") as file:
        file.write(f"{number} {cluster}{facts}\n".encode())


def recorded_jobs(run_dir: Path) -> list[Record]:
    """Return the lines of `JOBS`, each once, oldest first; none without the file.

    Raises:
        UnusableError, UnfitError: the file cannot be read.
    """
    records = (Record(*line.split(" ", 4)) for line in dict.fromkeys(_lines(run_dir / JOBS)) if " " in line)
    return [record for record in records if _NUMBER.fullmatch(record.number)]


def _lines(path: Path) -> list[str]:
    try:
        return read_regular(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise run_error(error) from error


def look(run_dir: Path) -> RunJobs:
    """Return the jobs that Slurm has under the numbers of a run; it forgets those that ended minutes ago.

    Raises:
        UnusableError: all jobs are of clusters that cannot be reached from here.
        UnfitError: Slurm does not answer.
    """
    records = recorded_jobs(run_dir)
    found = RunJobs([], [])
    for job in sorted(
        _list_jobs(run_dir, records), key=lambda job: [record.has_number_of(job) for record in records[::-1]]
    ):
        reason = _reason_against(run_dir, job, [record for record in records if record.has_number_of(job)])
        if reason is None:
            found.jobs.append(job)
        elif not job.has_ended:
            found.others.append(reason)
    return found


def _list_jobs(run_dir: Path, records: list[Record]) -> Iterator[Job]:
    """Yield the jobs that have a recorded number."""
    here = slurm.cluster() if records else ""
    clusters = list(dict.fromkeys(record.cluster for record in records))
    for cluster in clusters:
        numbers = list(dict.fromkeys(record.number for record in records if record.cluster == cluster))
        try:
            yield from slurm.list_jobs(numbers, cluster)
        except UnfitError as error:
            if cluster == here:
                raise
            if here not in clusters:  # else the run was on the other one once
                known = f"{run_dir}: job {numbers[-1]} is of the cluster {cluster!r}, and this is {here!r}"
                raise UnusableError(f"{known}; use the command there ({error})") from None


def _reason_against(run_dir: Path, job: Job, records: list[Record]) -> str | None:
    """Return why a job is none of the run's, which records jobs of its number; None if it is."""
    same = [record for record in records if _is_same(run_dir, job, record)]
    if same:
        originals = [_original(run_dir, record) for record in same]
        return None if None in originals else f"job {job.number} belongs to {originals[0]}; {run_dir} is a copy of it"
    last = records[-1]
    if not last.submitted:
        known = f"an older version has recorded job {job.number} without the time of its submission"
        return f"{known}, and Slurm's job {job.number} does not run a script of {run_dir / 'slurm'}"
    now = f"job {job.number} is now another one ({job.name}, submitted {job.submitted} UTC)"
    return f"{now}; that of {run_dir} was {last.name}, submitted {last.submitted} UTC"


def _is_same(run_dir: Path, job: Job, record: Record) -> bool:
    """Return whether a record of the job's number is of this very job, which may have been requeued since."""
    if record.submitted == job.submitted:
        return True
    facts = slurm.facts(job.name_for_slurm, job.cluster)
    if not record.submitted:
        return facts.get("Command", "").startswith(f"{(run_dir / 'slurm').resolve()}{os.sep}")
    return record.name == job.name and record.submitted < job.submitted and facts.get("Restarts", "0") != "0"


def _original(run_dir: Path, record: Record) -> Path | None:
    """Return the run directory that wrote a record, if that is still there and this one is a copy of it; else None."""
    original = Path(record.run_dir)
    with suppress(OSError, UnfitError, UnusableError):
        if record.run_dir and not original.samefile(run_dir) and record in recorded_jobs(original):
            return original.relative_to(Path.cwd()) if original.is_relative_to(Path.cwd()) else original
    return None


def live(run_dir: Path) -> list[Job]:
    """Return the jobs of a run that are queued or running."""
    return [job for job in look(run_dir).jobs if not job.has_ended]


def logs_of(job: Job) -> list[Path]:
    """Return the logs of a job's batch script that are there: its output, and its errors if they have their own."""
    facts = slurm.facts(job.name_for_slurm, job.cluster)
    paths = dict.fromkeys(Path(facts[name]) for name in ("StdOut", "StdErr") if facts.get(name))
    return [path for path in paths if path.is_file()]


def read_cancelled(run_dir: Path) -> list[str]:
    """Return the lines of `CANCELLED`."""
    return _lines(run_dir / CANCELLED)


def read_failed_nodes(run_dir: Path) -> list[str]:
    """Return the nodes that failed the preflight or hung in starts of a run."""
    from dist_mem.supervision.hang_report import FAILED_NODES  # imports torch

    return list(dict.fromkeys(word for line in _lines(run_dir / FAILED_NODES) for word in line.split()))


def mark_cancelled(run_dir: Path, lines: Iterable[str], jobs: Iterable[Job] = ()) -> None:
    """Write `CANCELLED`: these lines, and those of jobs, so that job.sh starts none of them again."""
    records = recorded_jobs(run_dir)
    marks = [
        f"{record.number} {record.cluster} {job.submitted}"
        for job in jobs
        for record in records
        if record.has_number_of(job)
    ]
    write_text(run_dir / CANCELLED, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *marks])))
