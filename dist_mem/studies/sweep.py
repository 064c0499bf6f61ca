"""The sweep command: estimate, train and evaluate every combination of a grid, several at one time, or submit them."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dist_mem.config import Config
from dist_mem.data.batch_plan import counted
from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE, UnusableError
from dist_mem.launch.submit import submit_array
from dist_mem.runtime.files import free_name, write_text
from dist_mem.runtime.ranks import names_of_gpus
from dist_mem.runtime.signals import StopSignal
from dist_mem.studies import estimate
from dist_mem.studies.command import locked, run_table
from dist_mem.studies.fingerprint import keep_settings
from dist_mem.studies.grid import SCALE, load_sweep
from dist_mem.studies.job import Job, Place, StoppedError, places
from dist_mem.studies.one_run import build, left_to_measure
from dist_mem.studies.row_check import check_rows
from dist_mem.studies.runs import all_runs, train_words
from dist_mem.studies.tables import Table

_RESTARTS = 3  # of a run that died


def run(
    path: Path,
    *,
    out: Path | None,
    jobs: int,
    ranks: int,
    extra: Sequence[str],
    max_runs: int,
    estimates: bool,
    only_estimate: bool,
) -> int:
    """Run the sweep of a file and return the exit code of the process; the same call continues a stopped one.

    Args:
        out: folder of runs and results; None: runs/sweep/NAME.
        jobs: trainings at the same time.  ranks: processes per training.
        extra: key=value overrides for every training.
        max_runs: more are refused.
        estimates: say first what it will take.  only_estimate: and end then.

    Raises:
        UnusableError: the sweep or its configurations are invalid, or a row cannot start.
    """
    table, folder = load_sweep(path, max_runs=max_runs), _folder(path, out)
    check_rows(table, table.scales[SCALE], extra)  # what is refused leaves no folder behind
    with locked(folder), StopSignal() as signal:
        job = _job(table, folder, ranks, extra, signal)
        return run_job(job, name=path.stem, jobs=jobs, estimates=estimates, only_estimate=only_estimate)


def run_job(
    job: Job,
    *,
    name: str,
    jobs: int,
    estimates: bool,
    only_estimate: bool,
    write_more: Callable[[], list[Path]] = list,
) -> int:
    """Run the runs of a job, several at one time; see `run`, and for `write_more` see `run_table`."""
    everywhere = places(jobs, job.ranks, num_cores=os.cpu_count() or 1, gpus=names_of_gpus(torch.cuda.device_count()))
    rows, seeds = counted(len(job.scale.rows), "row"), counted(len(job.scale.seeds), "seed")
    print(f"{rows} with {seeds}: {counted(len(job.runs), 'run')}", file=sys.stderr)
    begin, seconds = time.monotonic(), None
    if estimates:
        try:
            seconds = _estimate(job, everywhere)
        except StoppedError:
            return EXIT_REQUEUE
        begin = time.monotonic()
    if only_estimate:
        return EXIT_DONE
    code = run_table(job, name=name, places=everywhere, restarts=_RESTARTS, write_more=write_more)
    if code == EXIT_DONE and seconds is not None:
        took = estimate.duration(time.monotonic() - begin)
        print(f"took {took}; the estimate was {estimate.duration(seconds)}")
    return code


def submit(path: Path, config: Config, *, out: Path | None, jobs: int, extra: Sequence[str], max_runs: int) -> int:
    """Submit all runs that are not finished as a job array, one job each, and return the exit code of the process.

    Once they have ended, `run` measures them and writes the table.

    Args:
        config: of the site, for its block `launch`.
        jobs: jobs at the same time.
        max_runs: more are refused.

    Raises:
        UnusableError: as `run`, or sbatch refuses the array.
        UnfitError: Slurm does not answer.
    """
    table, folder = load_sweep(path, max_runs=max_runs), _folder(path, out)
    check_rows(table, table.scales[SCALE], extra)
    with locked(folder), StopSignal() as signal:
        return submit_runs(_job(table, folder, 1, extra, signal), config, name=path.stem, at_once=jobs)


def submit_runs(job: Job, config: Config, *, name: str, at_once: int) -> int:
    """Submit the runs of a job that are not finished; see `submit`."""
    left = [item for item in job.runs if left_to_measure(job, item)]
    if not left:
        raise UnusableError(f"{job.out}: all runs are finished; `{job.table.source}` prints the table")
    for item in left:
        build(job, item, print)
    commands = [shlex.join(train_words(job.scale, item, job.extra)) for item in left]
    list_of_runs = free_name(job.out / "slurm" / "runs.txt")
    list_of_runs.parent.mkdir(parents=True, exist_ok=True)
    write_text(list_of_runs, "".join(f"{command}\n" for command in commands))
    return submit_array(list_of_runs, config, num_tasks=len(left), at_once=at_once, name=name)


def _folder(path: Path, out: Path | None) -> Path:
    return out or Path("runs") / "sweep" / path.stem


def _job(table: Table, out: Path, ranks: int, extra: Sequence[str], signal: StopSignal) -> Job:
    scale = table.scales[SCALE]
    keep_settings(table, scale, out, extra)
    return Job(table, scale, out, all_runs(scale, out, scale.seeds, list(scale.rows)), ranks, list(extra), signal)


def _estimate(job: Job, everywhere: Sequence[Place]) -> float | None:
    """Print what the sweep will take; return its seconds, None if all is finished."""
    found, errors = estimate.estimate(job, everywhere)
    if errors:
        raise UnusableError(f"{errors[0]}; nothing else was started")
    if not found:
        return None
    device = "GPU" if torch.cuda.is_available() else "CPU"
    print("\n".join(estimate.report(found, num_places=len(everywhere), ranks=job.ranks, device=device)), flush=True)
    return estimate.finish_seconds([one.seconds for one in found], len(everywhere))
