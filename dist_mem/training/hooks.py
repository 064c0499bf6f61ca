"""Hooks of a job between its steps: record metrics, evaluate, save, and act on a divergence."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dist_mem.checkpoint.lane_states import Lanes
from dist_mem.checkpoint.manifest import TOKENIZER_DIR
from dist_mem.checkpoint.resume_choice import AUTO, choose_checkpoint
from dist_mem.checkpoint.snapshot import take_snapshot
from dist_mem.config import to_yaml
from dist_mem.config.resume_rules import checksums_to_keep
from dist_mem.data.shard import ShardError
from dist_mem.data.tokenizers.registry import tokenizer_files
from dist_mem.errors import CutShortError, TakenOverError
from dist_mem.evaluation.cut_short import stop_check
from dist_mem.evaluation.evaluate import evaluate_split
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.runtime.watchdog import beat
from dist_mem.training.divergence import METRICS, ROLLBACK, Decision, DivergedError
from dist_mem.training.resume import restore_into
from dist_mem.training.run import Job
from dist_mem.training.stopping import Stopping

_UNWRITTEN = (OSError, TakenOverError)  # on rank 0 only: the next step stops all ranks, and its save reports why


def record(job: Job, figures: Mapping[str, float]) -> Exception | None:
    """Record metrics of the current step; return the error if they could not be written."""
    beat("recording")
    try:
        job.tracker.log(job.step, figures)
    except _UNWRITTEN as error:
        return error
    return None


def is_multiple(step: int, every: int | None) -> bool:
    """Return whether something done every `every` steps is due at this step; None: never."""
    return every is not None and step % every == 0


def owes_evaluation(job: Job) -> bool:
    """Return whether this step's evaluation is due and not done yet: a stop skips it to save without delay."""
    is_made = job.validation is not None and job.validation["step"] == job.step
    return job.step > 0 and is_multiple(job.step, job.config.eval.every) and not is_made


def evaluate_if_owed(job: Job, stopping: Stopping, *, is_saved: bool) -> Exception | None:
    """Score the validation split if it is due, and `record` the metrics; a stop leaves the evaluation pending.

    Args:
        is_saved: the current step is saved; if not, it is saved before an error in scoring is raised.

    Returns:
        The error if the metrics could not be recorded.

    Raises:
        EvaluationError, ShardError: on every rank.
    """
    if not owes_evaluation(job):
        return None
    with job.meter.paused():
        try:
            return record(job, evaluate_now(job, stopping))
        except CutShortError:
            return None
        except (EvaluationError, ShardError):
            if not is_saved:
                save(job)
            raise


def save(job: Job) -> None:
    """Save the current step, in the background or synchronously; every rank calls it.

    Raises:
        AgreedError: on every rank, if this save or the previous one could not be written.
    """
    beat("saving")
    job.saver.wait()  # at most one save in flight, and one copy in memory
    began = time.perf_counter()
    facts = {
        "time": time.time(),
        "commit": job.commit,
        "zero_stage": job.engine.stage,
        "mlflow_run_id": job.tracker.run_id,
        "points": job.tracker.num_points,
        "data_fingerprint": job.index.fingerprint,
        "tokenizer_fingerprint": job.tokenizer.fingerprint,
        "meter": job.meter.state(),  # the sums are equal on all ranks; the times are rank 0's
        "divergence": job.divergence.state(),
        "validation": job.validation,
        "environment": checksums_to_keep(job.config),
    }
    lanes = Lanes(job.lane_ids, job.cursors, job.states)
    texts = {"config.yaml": to_yaml(job.config), **job.sources}
    small_files = {name: text.encode() for name, text in texts.items()}
    # In every checkpoint, not once per run, so that a checkpoint copied elsewhere can be loaded there.
    small_files |= {f"{TOKENIZER_DIR}/{name}": content for name, content in tokenizer_files(job.tokenizer).items()}
    snapshot = take_snapshot(step=job.step, engine=job.engine, lanes=lanes, small_files=small_files, metadata=facts)
    job.saver.save(snapshot, began=began)


def tell_saved(job: Job) -> None:
    """Report the checkpoints written since the last step, and those removed."""
    for saved in job.saver.finished():
        job.meter.note(saved.figures())
        for message in (str(saved), *saved.written.messages):
            job.tracker.message(message)


def end_saving(job: Job) -> None:
    """Wait for pending saves at the end of a run; a failure is reported, and does not hide why the run ends."""
    beat("saving")
    try:
        job.saver.close()
    except TakenOverError:  # `run` reports it
        return
    except RuntimeError as error:  # AgreedError, or the other ranks are gone
        job.tracker.message(f"error: {error}")
    tell_saved(job)


def evaluate_now(job: Job, stopping: Stopping) -> dict[str, float]:
    """Return the metrics of the validation split, scored with fresh lanes; the state of the training is unaffected.

    Raises:
        CutShortError: on every rank; there is a reason to stop.
    """
    engine = job.engine
    beat("evaluating")
    engine.train(False)

    check = stop_check(stopping.has_reason, job.world)

    def forward(*tensors: Any, **state: Any) -> Any:
        beat("evaluating")
        check()
        return engine(*tensors, **state)

    report = evaluate_split(
        forward,
        engine.init_state,
        config=job.config,
        split=job.config.eval.split,
        tokenizer=job.tokenizer,
        world=job.world,
    )
    engine.train(True)
    job.validation = {"step": job.step, "loss": report.nll / report.num_scored}
    return report.figures()


def carry_out(job: Job, decision: Decision) -> Exception | None:
    """Carry out and report the decision about a divergence; return the error if it could not be recorded.

    Raises:
        DivergedError: on every rank; there is no checkpoint to roll back to.
    """
    job.tracker.message(decision.message)
    if decision.action == ROLLBACK:
        _roll_back(job, decision)
    try:
        if decision.action == ROLLBACK:
            job.tracker.rewind(job.step)
        step = job.step if decision.action == ROLLBACK else job.step + 1  # else the step of the skipped update
        job.tracker.log(step, {METRICS[decision.action]: job.divergence.counts[decision.action]})
    except _UNWRITTEN as error:
        return error
    return tag_divergence(job, decision.step, decision.message)


def tag_divergence(job: Job, step: int, message: str) -> Exception | None:
    """Tag the run with a divergence at `step`; return the error if it could not be recorded."""
    try:
        job.tracker.log_tags({f"dist_mem.divergence.step_{step}": message})
    except _UNWRITTEN as error:
        return error
    return None


def tell_stragglers(job: Job, slots: Sequence[float]) -> Exception | None:
    """Report ranks that became slow or recovered; return the error if it could not be recorded.

    Args:
        slots: those of `Stragglers.mine`, summed over all ranks.
    """
    messages = job.stragglers.hear(slots)
    for message in messages:
        job.tracker.message(f"step {job.step}: {message}")
    if job.stragglers.worst is not None:
        job.meter.note({"straggler/ratio": job.stragglers.worst})
    try:
        if messages:
            job.tracker.log_tags({f"dist_mem.straggler.step_{job.step}": "; ".join(messages)})
    except _UNWRITTEN as error:
        return error
    return None


def _roll_back(job: Job, decision: Decision) -> None:
    """Roll back to the newest checkpoint that verifies. The segments up to the current update are read, not trained."""
    beat("restoring")
    job.saver.wait()
    choice = choose_checkpoint(AUTO, job.run_dir, job.world)
    if choice is None:
        raise DivergedError(f"{decision.message}, but there is no checkpoint yet")
    restore_into(job, choice.directory)
    job.saver.set_aside(choice.broken)
    job.divergence.roll_back(choice.manifest.get("divergence", {}), first_trained=decision.step + 1)
    job.validation = choice.manifest.get("validation")
    for reason in choice.passed_over:
        job.tracker.message(f"passed over: {reason}")
    job.tracker.message(
        f"rolled back to {choice.directory}; the segments of steps {job.step} to {decision.step} are read, and not "
        "trained on"
    )
