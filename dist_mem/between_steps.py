"""What is done to a job between its steps: record figures, evaluate, save."""

from __future__ import annotations

from collections.abc import Mapping

from dist_mem.checkpoint import Lanes, save_checkpoint
from dist_mem.config import to_yaml
from dist_mem.data.shard import ShardError
from dist_mem.evaluate import evaluate_split
from dist_mem.job import Job
from dist_mem.scoring import EvaluationError


def record(job: Job, figures: Mapping[str, float]) -> OSError | None:
    """Record figures of the present step; returns what kept them from being written."""
    try:
        job.tracker.log(job.step, figures)
    except OSError as error:
        return error
    return None


def evaluate_or_save(job: Job) -> OSError | None:
    """Score the validation split and record the figures, as `record`; what cannot be scored stops a run that is saved.

    Raises:
        EvaluationError, ShardError: on every rank.
    """
    try:
        return record(job, evaluate_now(job))
    except (EvaluationError, ShardError):
        save(job)
        raise


def save(job: Job) -> None:
    """Write the checkpoint of the present step; every rank calls it."""
    facts = {
        "mlflow_run_id": job.tracker.run_id,
        "data_fingerprint": job.index.fingerprint,
        "tokenizer_fingerprint": job.tokenizer.fingerprint,
        "meter": job.meter.state(),  # the same sums on every rank; the times are rank 0's
    }
    lanes = Lanes(job.lane_ids, job.cursors, job.states)
    path = save_checkpoint(
        job.run_dir,
        step=job.step,
        engine=job.engine,
        lanes=lanes,
        texts={"config.yaml": to_yaml(job.config), **job.sources},
        world=job.world,
        facts=facts,
    )
    job.tracker.message(f"step {job.step}: saved {path}")


def evaluate_now(job: Job) -> dict[str, float]:
    """Figures of the validation split, scored with fresh lanes; training goes on as if it had not happened."""
    engine = job.engine
    engine.train(False)
    report = evaluate_split(
        engine,
        engine.init_state,
        config=job.config,
        split=job.config.eval.split,
        tokenizer=job.tokenizer,
        world=job.world,
    )
    engine.train(True)
    return report.figures()
