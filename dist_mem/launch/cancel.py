"""`dist-mem cancel`: end the jobs of a run for good, whatever their `launch.restart`.

A running job gets the signal of its time limit: all ranks save and end with exit code 85. job.sh finds the job in
RUN/slurm/cancelled and neither requeues nor resubmits it. The next look at the queue finds a requeue or resubmission
that was under way, and cancels it too. A job that only has the number of one of the run's is left alone (queue.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dist_mem.errors import EXIT_DONE, RunError, UnusableError, run_error
from dist_mem.launch import queue, slurm
from dist_mem.launch.slurm import Job

_LOOK_SECONDS = 2.0
_SIGNAL_SECONDS = 15.0  # until the signal is sent again: the first may arrive before the ranks have started


def run(run_dir: Path, *, now: bool) -> int:
    """Cancel all queued and running jobs of a run, and wait until they have ended.

    Args:
        now: do not save a checkpoint first.

    Raises:
        UnusableError: there is no Slurm or no job to cancel, or the job belongs to another user or another run.
        UnfitError: Slurm does not answer.
    """
    jobs = _find(run_dir)
    marks, seen = queue.read_cancelled(run_dir), dict[Job, None]()
    signalled: dict[str, float] = {}
    shown: dict[str, str] = {}
    while jobs:
        seen |= dict.fromkeys(jobs)
        _mark(run_dir, marks, seen)
        try:
            _end(jobs, signalled, now=now)
        except RunError:  # jobs that it has not signalled train on, and may start again
            _mark(run_dir, marks, [job for job in seen if job.number in signalled])
            raise
        for job in jobs:
            if shown.get(job.number) != job.state:
                print(f"job {job.number}: {_describe(job, now=now)}", flush=True)
                shown[job.number] = job.state
        time.sleep(_LOOK_SECONDS)
        jobs = queue.live(run_dir)
    print(f"{run_dir}: {', '.join(f'job {number}' for number in shown)} ended, and will not start again")
    return EXIT_DONE


def _find(run_dir: Path) -> list[Job]:
    recorded = queue.recorded_jobs(run_dir)
    if not recorded:
        raise UnusableError(
            f"{run_dir}: no Slurm job is recorded in {run_dir / queue.JOBS}; a training without "
            f"one saves and stops by: touch {run_dir / 'STOP'}"
        )
    if not slurm.is_here():
        raise UnusableError(f"{run_dir}: there is no Slurm (squeue) here; use a login node of the cluster")
    found = queue.look(run_dir)
    jobs = [job for job in found.jobs if not job.has_ended]
    if not jobs and found.others:
        raise UnusableError(f"{'; '.join(found.others)}. Nothing is cancelled; scancel ends a job by its number")
    if not jobs:
        number = recorded[-1].number
        raise UnusableError(f"{run_dir}: none of its jobs is queued or running; the newest one, {number}, has ended")
    return jobs


def _mark(run_dir: Path, marks: Sequence[str], jobs: Iterable[Job]) -> None:
    try:
        queue.mark_cancelled(run_dir, marks, jobs)
    except OSError as error:
        raise run_error(error) from error


def _end(jobs: Sequence[Job], signalled: dict[str, float], *, now: bool) -> None:
    """Cancel queued jobs, and signal running ones."""
    for job in jobs:
        number, cluster = job.name_for_slurm, job.cluster
        if job.waits:
            slurm.scancel(cluster, "--state=PENDING", number)
        elif job.state == "COMPLETING":
            continue
        elif now and job.number in signalled:
            slurm.scancel(cluster, number)  # still running after the signal
        elif now:
            slurm.scancel(cluster, "--signal=ALRM", number)  # ends ranks, without a core file; scancel alone: they save
            signalled[job.number] = time.monotonic()
        elif time.monotonic() - signalled.get(job.number, -_SIGNAL_SECONDS) >= _SIGNAL_SECONDS:
            slurm.scancel(cluster, "--signal=USR2", number)
            signalled[job.number] = time.monotonic()


def _describe(job: Job, *, now: bool) -> str:
    if job.waits:
        return f"queued ({job.reason}); cancelled"
    if job.state == "COMPLETING" or now:
        return f"{job.state.lower()} on {job.nodes}; waiting for its end"
    return (
        f"{job.state.lower()} on {job.nodes}; signalled to save and stop; waiting for its end (Ctrl-C ends only the "
        "waiting; --now cancels without saving)"
    )
