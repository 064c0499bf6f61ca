"""A checkpoint as a model of an MLflow run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dist_mem.runtime.figures import finite_or_nan
from dist_mem.tracking.log import Entry
from dist_mem.tracking.names import in_group, valid_name, valid_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STEP_TAG = "dist_mem.step"
_EXTERNAL_TAG = "mlflow.model.isExternal"  # MLflow looks for no files then


def log_checkpoint(
    client: MlflowClient,
    run: Run,
    *,
    step: int,
    path: str | None,
    points: Sequence[Entry],
    log: Callable[[Sequence[Any]], None],
) -> None:
    """Create the model of a checkpoint, unless the run has it, and link metrics with it.

    Repeated calls have the result of one: the model is found by the run and its name, and a point that the run has
    already is the same point.

    Args:
        path: of the checkpoint; None: unknown.
        points: of the step, with the times under which the run has them.
        log: sends metrics to the run.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

    run_id, experiment_id, name = run.info.run_id, run.info.experiment_id, f"step-{step:08d}"
    wanted = f"source_run_id = '{run_id}' AND name = '{name}'"
    found = client.search_logged_models([experiment_id], filter_string=wanted, max_results=1)
    # Not mlflow.create_external_model, which sets the same tag: it uses the store of the process and not this client's,
    # and it uploads an MLmodel file for each checkpoint, with which a model without weights could be registered.
    model = found[0] if found else client.create_logged_model(experiment_id, name=name, source_run_id=run_id)
    tags = {STEP_TAG: str(step), _EXTERNAL_TAG: "true"} | ({"dist_mem.path": valid_text(path)} if path else {})
    client.set_logged_model_tags(model.model_id, tags)
    if model.status != LoggedModelStatus.READY:  # new, or its sender was killed
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    outputs = client.get_run(run_id).outputs  # logging one twice is an error
    if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=step)])
    metrics = [
        Metric(
            valid_name(in_group(name)),
            finite_or_nan(value),
            point.time,
            point.body["step"],
            model_id=model.model_id,
            run_id=run_id,
        )
        for point in points
        for name, value in point.body["metrics"].items()
    ]
    if metrics:
        log(metrics)
