"""Run this process of a training job, from joining the other ranks to the exit code.

dist-mem train configs/demo.yaml
RANKS=2 launch/local.sh configs/demo.yaml
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dist_mem.checkpoint.finished_file import mark_finished
from dist_mem.checkpoint.finished_run import is_finished
from dist_mem.checkpoint.resume_source import find_resumption
from dist_mem.config import Config, WatchdogConfig
from dist_mem.doctor.preflight import before_joining, preflight
from dist_mem.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, DivergedError, run_error
from dist_mem.runtime import distributed
from dist_mem.runtime.distributed import World, announce, decide_on_rank0
from dist_mem.runtime.files import drop_empty, missing_folders
from dist_mem.runtime.signals import StopSignal
from dist_mem.supervision import timeline
from dist_mem.supervision.lease import Lease, refuse_if_taken_over
from dist_mem.supervision.timeline import Beginning
from dist_mem.supervision.watchdog import PATIENCE, beat, before_end, end_if_hung, watch
from dist_mem.tracking.start import check_sinks
from dist_mem.training.compiling import leave_if_interrupted
from dist_mem.training.garbage import agree_on_collections
from dist_mem.training.goodput import last_sign_of_life
from dist_mem.training.loop import train
from dist_mem.training.opening import open_run
from dist_mem.training.run_files import check_run_files
from dist_mem.training.stopping import Stopping, refuse_if_asked_to_stop


def hold_run_dir(run_dir: Path, world: World, stop_signal: StopSignal) -> Lease | None:
    """Return rank 0's lease on the run directory, None on other ranks.

    Raises:
        RunError: on every rank; another job holds the directory, or it cannot be used, or a signal has ended the wait
            for the end of another job.
    """
    leases: list[Lease] = []  # a lease belongs to its process, and is not sent to others

    def take() -> None:
        try:
            leases.append(Lease(run_dir, stop_signal.check))
        except OSError as error:
            raise run_error(error, f"run_dir {run_dir} cannot be used: {error}") from error

    decide_on_rank0(take)
    return leases[0] if leases else None


_STATUS = {EXIT_DONE: "FINISHED", EXIT_REQUEUE: "KILLED", EXIT_DIVERGED: "FAILED", EXIT_FAILED: "FAILED"}


def run_job(
    config: Config, world: World, stop_signal: StopSignal, allowed: Sequence[str] = (), begin: Beginning | None = None
) -> int:
    """Open the run in `config.run_dir`, new or from a checkpoint, and train; return the exit code.

    `begin` is that of this start; None: it begins now.
    """
    timeline.begin(begin or Beginning(time.time()))
    refuse_if_asked_to_stop(Path(config.run_dir), world)
    decide_on_rank0(lambda: check_sinks(config.tracking))
    decide_on_rank0(lambda: check_run_files(Path(config.run_dir)))
    beat("restoring")
    with announce(f"verifying the checkpoints of {config.run_dir}"):
        resumption = find_resumption(config, world, allowed)
    if resumption is not None and is_finished(config, world, resumption):
        return EXIT_DONE
    beat("opening")
    with announce("checking nodes, network and ranks (preflight)"):
        warnings = preflight(config, world) if config.preflight else []
    leave_if_interrupted(stop_signal)
    context, state = open_run(config, world, resumption, stop_signal)
    tracker = context.reporting.tracker
    for text in warnings:
        tracker.message(text)
    stopping = Stopping(
        context.run_dir,
        world,
        stop_signal,
        training_seconds=context.reporting.meter.training_seconds,
        save_seconds=context.saving.saver.longest_seconds,
    )
    code = EXIT_FAILED
    before_end(lambda: tracker.close(_STATUS[EXIT_FAILED]))
    try:
        context.saving.rehearse(state)
        with agree_on_collections(config.train.gc_every) as after_step:
            state, code = train(context, state, stopping, after_step)
        for text in context.reporting.stragglers.summary():
            tracker.message(text)
        if code == EXIT_DONE and world.rank == 0:
            with suppress(OSError):  # without the marker, the next start detects the end by itself
                mark_finished(context.run_dir, state.step, config.train)
    except DivergedError as error:
        tracker.message(f"error: {error}")
        context.reporting.tag(f"divergence.step_{error.step}", str(error))
        code = error.exit_code
    except RuntimeError:  # before anything that waits for the other ranks, or for MLflow
        end_if_hung()
        raise
    finally:
        context.feed.close()
        context.saving.end()
        before_end(None)
        tracker.close(_STATUS[code])
    return code


def _collective_seconds(watchdog: WatchdogConfig) -> float:
    """Return the timeout of collectives: longer than the watchdog's, which can name the missing ranks."""
    return max(1800.0, 2 * PATIENCE * (watchdog.seconds or 0.0))


def run(
    config: Config, *, allowed: Sequence[str] = (), early: StopSignal | None = None, began: float | None = None
) -> int:
    """Run this process of the job: join the other ranks, train, and shut down; return the exit code.

    Args:
        allowed: keys that may have changed since the checkpoint, given to `--allow`.
        early: the handler that has received a scheduler's signals until now.
        began: when this process began, seconds since 1970; None: now.

    Raises:
        UnusableError: on every rank; configuration, data, checkpoints or run directory cannot be used as they are.
    """
    began = time.time() if began is None else began
    stop_signal = StopSignal()
    stop_signal.received = stop_signal.received or (early.received if early is not None else None)
    with distributed.joining():
        # Keeps the store alive until all ranks have joined.
        meeting = before_joining(config.run_dir, config.watchdog, config.preflight, stop_signal.check)
        world = distributed.initialize(
            threads=config.train.threads,
            timeout_seconds=_collective_seconds(config.watchdog),
            binds=config.train.numa_binding,
            tf32=config.train.tf32,
        )
    del meeting
    run_dir = Path(config.run_dir)
    lease, new_folders = None, missing_folders(run_dir) if world.rank == 0 else []
    begin = Beginning(began, last_sign_of_life(run_dir) if world.rank == 0 else None)
    try:
        lease = hold_run_dir(run_dir, world, stop_signal)
        with watch(run_dir, world, config.watchdog.seconds):
            code = run_job(config, world, stop_signal, allowed, begin)
            distributed.shut_down(agreed=True)
        return code
    except RuntimeError:  # perhaps because rank 0 was suspended, another job took over, and the other ranks are gone
        with suppress(OSError):  # the disk is gone too
            refuse_if_taken_over(run_dir)
        raise
    finally:
        if lease is not None:
            lease.release()
        if world.rank == 0:
            drop_empty(new_folders)
        distributed.shut_down(agreed=False)
        stop_signal.restore()
