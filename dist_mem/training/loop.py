"""The training loop: `run` runs this process of a job, `train` is the loop.

dist-mem train configs/demo.yaml
RANKS=2 launch/local.sh configs/demo.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dist_mem.checkpoint.finished import is_finished, mark_finished
from dist_mem.checkpoint.resume_source import find_resumption
from dist_mem.data.batch import Update
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import ShardError
from dist_mem.doctor.preflight import before_joining, preflight
from dist_mem.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    EXIT_TAKEN_OVER,
    TakenOverError,
    UnusableError,
)
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.runtime import distributed
from dist_mem.runtime.distributed import AgreedError, World, announced, on_all_ranks, sum_over_ranks
from dist_mem.runtime.lease import Lease, LeaseError, refuse_if_taken_over
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.watchdog import PATIENCE, UNWATCHED, beat, before_end, begin_step, end_if_hung, watched
from dist_mem.training.divergence import ROLLBACK, DivergedError
from dist_mem.training.hooks import (
    carry_out,
    end_saving,
    evaluate_if_owed,
    is_multiple,
    owes_evaluation,
    record,
    save,
    tag_divergence,
    tell_saved,
    tell_stragglers,
)
from dist_mem.training.run import Job, leave_if_interrupted, open_job
from dist_mem.training.step import Flags, Outcome, train_step
from dist_mem.training.stopping import Stopping, refuse_if_told_to_stop


def train(job: Job, stop_signal: StopSignal) -> int:
    """Train to the last step, or until any rank is asked to stop; return the exit code."""
    stopping = Stopping(job, stop_signal)
    trouble = evaluate_if_owed(job, stopping, is_saved=True)  # rank 0's recording error: no rank may raise alone
    if owes_evaluation(job):
        return stopped(job, stopping)
    if job.step >= job.total_steps:
        agreed(trouble)
        job.tracker.message(f"step {job.step} of {job.total_steps}: nothing is left to train")
        return EXIT_DONE
    with announced("reading the first segments"):
        update, num_scored = first_update(job)
    while True:
        begin_step(job.step)
        ahead = trouble or read_ahead(job)
        next_scored = ahead.num_scored if isinstance(ahead, Update) else 0
        stop = stopping.is_asked_for() or not isinstance(ahead, Update)
        flags = Flags(stop=stop, save=job.saver.is_due(), save_failed=job.saver.failed())
        outcome = step_until_no_overflow(job, update, num_scored, next_scored, flags)
        if outcome.decision is not None:
            trouble = carry_out(job, outcome.decision) or trouble
            if outcome.decision.action == ROLLBACK:
                update, num_scored = first_update(job)
                continue
        job.step += 1
        job.meter.add(outcome.totals, epoch=update.epoch, logs=outcome.logs)
        trouble = tell_stragglers(job, outcome.slots) or trouble
        if job.step == job.total_steps or job.step % job.config.tracking.every == 0:
            trouble = record(job, job.meter.read(job.engine)) or trouble
        if job.step == job.total_steps or not outcome.flags.stop:
            trouble = evaluate_if_owed(job, stopping, is_saved=False) or trouble
        stops = outcome.flags.stop or owes_evaluation(job)
        is_last = stops or job.step == job.total_steps
        if outcome.flags.save_failed:
            job.saver.wait()  # raises on all ranks, as the flag is agreed
        if is_last or outcome.flags.save or is_multiple(job.step, job.config.checkpoint.every):
            with job.meter.paused():
                save(job)
        if is_last:
            job.saver.wait()
        tell_saved(job)
        if job.step == job.total_steps and not owes_evaluation(job):
            agreed(trouble)
            return EXIT_DONE
        if stops:
            agreed(trouble or (None if job.step == job.total_steps else ahead))
            return stopped(job, stopping)
        assert isinstance(ahead, Update), "a rank that cannot read on stops all ranks"
        update, num_scored = ahead, outcome.next_scored


def stopped(job: Job, stopping: Stopping) -> int:
    """Report why this run stopped, after its current step is saved; return the exit code."""
    job.tracker.message(f"step {job.step}: {stopping.told()}; all is saved, start the same command to go on")
    return EXIT_REQUEUE


def step_until_no_overflow(job: Job, update: Update, num_scored: int, next_scored: int, flags: Flags) -> Outcome:
    """Repeat `train_step` until the loss scale of fp16 is small enough."""
    slots = job.stragglers.mine()
    while (outcome := train_step(job, update, num_scored, next_scored, flags, slots)).again:
        job.tracker.message(f"step {job.step}: fp16 overflow, the same segments again with a smaller loss scale")
    return outcome


def first_update(job: Job) -> tuple[Update, int]:
    """Return the first update of the reader, and its number of scored targets on all ranks."""
    # The first shards of all lanes may be fetched now; the fetch has its own time limits.
    beat(UNWATCHED if is_remote(job.config.data.path) else "reading data")
    update = agreed(read_ahead(job))
    return update, int(sum_over_ranks([update.num_scored], job.world.device)[0])


def read_ahead(job: Job) -> Update | Exception:
    """Return the next update, or the error if it cannot be read."""
    try:
        return job.meter.timed_next(job.reader)
    except (ShardError, OSError) as error:
        return error


ResultT = TypeVar("ResultT")


def agreed(ahead: ResultT | Exception) -> ResultT:
    """Return `ahead` if no rank has an error; otherwise every rank raises UnusableError."""

    def unwrap() -> ResultT:
        if isinstance(ahead, Exception):
            raise ahead
        return ahead

    return on_all_ranks(unwrap, "going on to the next update")


def hold_run_dir(run_dir: Path, world: World) -> Lease | None:
    """Return rank 0's lease on the run directory, None on other ranks.

    Raises:
        LeaseError: on every rank; another job holds the directory, or it cannot be used.
    """
    lease, refusal = None, None
    if world.rank == 0:
        try:
            lease = Lease(run_dir)
        except LeaseError as error:
            refusal = error
        except OSError as error:
            refusal = LeaseError(f"run_dir {run_dir} cannot be used: {error}")
    refusal = distributed.from_rank0(refusal)
    if refusal is not None:
        raise refusal
    return lease


def _missing_folders(path: Path) -> list[Path]:
    """Return the folders that must be created for this one to exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _drop_empty(folders: Sequence[Path]) -> None:
    """Remove the empty folders that a refused start created."""
    with suppress(OSError):  # one is not empty, or does not exist: then those around it stay too
        for folder in folders:
            folder.rmdir()


_STATUS = {EXIT_DONE: "FINISHED", EXIT_REQUEUE: "KILLED", EXIT_DIVERGED: "FAILED", EXIT_FAILED: "FAILED"}


def run_job(config: Any, world: World, stop_signal: StopSignal, allowed: Sequence[str] = ()) -> int:
    """Open the run in `config.run_dir`, new or from a checkpoint, and train; return the exit code."""
    refuse_if_told_to_stop(Path(config.run_dir), world)
    beat("restoring")
    with announced(f"verifying the checkpoints of {config.run_dir}"):
        resumption = find_resumption(config, world, allowed)
    if resumption is not None and is_finished(config, world, resumption):
        return EXIT_DONE
    beat("opening")
    with announced("checking nodes, network and ranks (preflight)"):
        warnings = preflight(config, world) if config.preflight else []
    leave_if_interrupted(stop_signal)
    job = open_job(config, world, resumption, stop_signal)
    for text in warnings:
        job.tracker.message(text)
    code = EXIT_FAILED
    before_end(lambda: job.tracker.close(_STATUS[EXIT_FAILED]))
    try:
        code = train(job, stop_signal)
        for text in job.stragglers.summary():
            job.tracker.message(text)
        if code == EXIT_DONE and world.rank == 0:
            with suppress(OSError):  # without the marker, the next start detects the end by itself
                mark_finished(job.run_dir, job.step, config.train)
    except DivergedError as error:
        job.tracker.message(f"error: {error}")
        tag_divergence(job, job.step, str(error))
        code = EXIT_DIVERGED
    except RuntimeError:  # before anything that waits for the other ranks, or for MLflow
        end_if_hung()
        raise
    finally:
        job.reader.close()
        end_saving(job)
        before_end(None)
        job.tracker.close(_STATUS[code])
    return code


def _takeover(run_dir: Path) -> TakenOverError | None:
    """Return the error if another job took over the run while rank 0 was suspended and the other ranks ended."""
    try:
        refuse_if_taken_over(run_dir)
    except TakenOverError as error:
        return error
    except OSError:  # the disk is gone too
        return None
    return None


def _collective_seconds(config: Any) -> float:
    """Return the timeout of collectives: longer than the watchdog's, which can name the missing ranks."""
    return max(1800.0, 2 * PATIENCE * (config.watchdog.seconds or 0.0))


def run(config: Any, *, allowed: Sequence[str] = (), early: StopSignal | None = None) -> int:
    """Run this process of the job: join the other ranks, train, and shut down; return the exit code.

    Args:
        allowed: keys that may have changed since the checkpoint, given to `--allow`.
        early: the handler that has received a scheduler's signals until now.

    Raises:
        UnusableError: on every rank; configuration, data, checkpoints or run directory cannot be used as they are.
    """
    stop_signal = StopSignal()
    stop_signal.received = early.received if early is not None else None
    try:
        with announced("waiting until all ranks have started"):
            meeting = before_joining(config)  # keeps the store alive until all ranks have joined
            world = distributed.initialize(threads=config.train.threads, timeout_seconds=_collective_seconds(config))
    except ValueError as error:  # a launcher's variables are incomplete
        raise UnusableError(str(error)) from error
    del meeting
    lease, new_folders = None, _missing_folders(Path(config.run_dir))
    try:
        lease = hold_run_dir(Path(config.run_dir), world)
        with watched(Path(config.run_dir), world, config.watchdog.seconds):
            code = run_job(config, world, stop_signal, allowed)
            distributed.shut_down(agreed=True)
        return code
    except (RuntimeError, EvaluationError) as error:
        reason = _takeover(Path(config.run_dir)) or error
        if not isinstance(reason, (AgreedError, EvaluationError, TakenOverError)):
            raise
        if world.rank == 0:
            print(f"error: {reason}", file=sys.stderr)
        return EXIT_TAKEN_OVER if isinstance(reason, TakenOverError) else EXIT_FAILED
    finally:
        if lease is not None:
            lease.release()
        if world.rank == 0:
            _drop_empty(new_folders)
        distributed.shut_down(agreed=False)
        stop_signal.restore()
