"""`dist-mem cancel`: end the jobs of a run for good, whatever their `launch.restart`.

A running job gets the signal of its time limit: all ranks save and end with exit code 85. job.sh finds the job in
RUN/slurm/cancelled and neither requeues nor resubmits it. The next look at the queue finds a requeue or resubmission
that was under way, and cancels it too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.launch import queue
from dist_mem.launch.queue import Job
from dist_mem.runtime.files import is_missing, read_regular

_LOOK_SECONDS = 2.0
_SIGNAL_SECONDS = 15.0  # until the signal is sent again: the first may arrive before the ranks have started


def run(run_dir: Path, *, now: bool) -> int:
    """Cancel all queued and running jobs of a run, and wait until they have ended.

    Args:
        now: do not save a checkpoint first.

    Raises:
        UnusableError: there is no Slurm or no job to cancel, or the job belongs to another user.
        UnfitError: Slurm does not answer.
    """
    jobs = _find(run_dir)
    unmarked = _read_marks(run_dir)
    signalled: dict[str, float] = {}
    shown: dict[str, str] = {}
    while jobs:
        queue.mark_cancelled(run_dir, dict.fromkeys([*unmarked, *queue.recorded_here(run_dir)]))
        try:
            _end(run_dir, jobs, signalled, now=now)
        except UnusableError:
            queue.mark_cancelled(run_dir, unmarked)
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
    recorded = queue.recorded(run_dir)
    if not recorded:
        raise UnusableError(
            f"{run_dir}: no Slurm job is recorded in {run_dir / queue.JOBS}; a training without "
            f"one saves and stops by: touch {run_dir / 'STOP'}"
        )
    if not queue.is_here():
        raise UnusableError(f"{run_dir}: there is no Slurm (squeue) here; use a login node of the cluster")
    jobs = queue.live(run_dir)
    if not jobs:
        number = recorded[-1].partition(" ")[0]
        raise UnusableError(f"{run_dir}: none of its jobs is queued or running; the newest one, {number}, has ended")
    return jobs


def _read_marks(run_dir: Path) -> list[str]:
    path = run_dir / queue.CANCELLED
    return [] if is_missing(path) else read_regular(path).decode(errors="replace").splitlines()


def _end(run_dir: Path, jobs: Sequence[Job], signalled: dict[str, float], *, now: bool) -> None:
    """Cancel queued jobs, and signal running ones."""
    numbers = queue.numbers_here(run_dir)
    if any(job.waits for job in jobs):
        queue.scancel("--state=PENDING", *numbers)
    for job in jobs:
        if job.waits or job.state == "COMPLETING":
            continue
        if now and job.number in signalled:
            queue.scancel(job.number)  # still running after the signal
        elif now:
            queue.scancel("--signal=ALRM", job.number)  # ends ranks, without a core file; scancel alone has them save
            signalled[job.number] = time.monotonic()
        elif time.monotonic() - signalled.get(job.number, -_SIGNAL_SECONDS) >= _SIGNAL_SECONDS:
            queue.scancel("--signal=USR2", job.number)
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
