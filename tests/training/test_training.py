"""The order of decision of one update, and what must not change training."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from mlflow import MlflowClient
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import read_index
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.training.divergence import DivergedError
from dist_mem.training.meter import Meter
from tests.support.jobs import checkpoint_content, difference, losses, train_here, write_config
from tests.support.ranks import Pools
from tests.support.tiny import full_parameters, memory_of, run_steps, tiny_config, tiny_job, update_of_rank

ADAM = {"optimizer": {"kind": "adamw", "lr": 1e-2}, "train": {"micro_batch_size": 2}}


def one_update_without_targets(world: World, stage: int) -> dict[str, Any]:
    job = tiny_job(tiny_config(ADAM), world, stage=stage)
    run_steps(job, first=0, last=1)
    before, memory_before = full_parameters(job), memory_of(job)
    update = update_of_rank(job.config, world, step=1)
    silent = [batch._replace(targets=torch.full_like(batch.targets, IGNORE)) for batch in update.batches]
    outcome = job.train(update._replace(batches=silent, scored=[0, 0]), [0, 0])
    found = {
        "overflows": outcome.overflows,
        "nll": outcome.totals.nll,
        "parameters": difference(before, full_parameters(job)),
        "memory is as before": difference(memory_before, memory_of(job)) is None,
        "cursors": job.cursors.tolist(),
    }
    (after,) = run_steps(job, first=2, last=3)
    return found | {"next loss is finite": after.totals.nll > 0}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_update_without_targets_moves_memory_and_cursors_only(rank_pool: Pools, stage: int) -> None:
    expected = {"overflows": 0, "nll": 0.0, "parameters": None, "memory is as before": False}
    expected |= {"cursors": [[1, 1, 1]] * 4, "next loss is finite": True}
    assert rank_pool(2).run(one_update_without_targets, stage) == [expected] * 2


def metrics_of_a_silent_update(world: World, stage: int) -> list[dict[str, float]]:
    """After one that was made."""
    job = tiny_job(tiny_config(), world, stage=stage)
    update = update_of_rank(job.config, world, step=0)
    silent = [batch._replace(targets=torch.full_like(batch.targets, IGNORE)) for batch in update.batches]
    meter, points = Meter(lane_segments_per_update=8), []
    for read in (update, update._replace(batches=silent, scored=[0, 0])):
        outcome = job.train(read, read.scored)
        meter.add(outcome.totals, epoch=0.0, is_read_only=outcome.is_read_only)
        points.append(meter.read(job.engine))
    return points


@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_that_is_only_read_has_no_norm_and_no_rate(rank_pool: Pools, stage: int) -> None:
    """Those of the update before it were logged; at the start, the peak rate before a warmup."""
    ((made, read),) = rank_pool(1).run(metrics_of_a_silent_update, stage)
    assert made["lr"] == 0.5 and made["grad_norm"] > 0.0
    assert made.keys() - read.keys() == {"grad_norm", "lr"}


def fp16_steps(world: World, initial_scale_power: int) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    # DeepSpeed claims fp16 only for CPUs with fast fp16 products; the slow ones do for three steps.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = tiny_config(ADAM, {"train": {"precision": "fp16"}, "optimizer": {"lr": 1e-3}})
    block = {"fp16": {"initial_scale_power": initial_scale_power, "hysteresis": 1}}
    job = tiny_job(config, world, stage=2, block=block)
    applied, nll = [], []
    for step in range(3):
        update = update_of_rank(config, world, step=step)
        outcome = job.train(update, [150, 150])
        applied += [False] * outcome.overflows + [True]
        nll.append(outcome.totals.nll)
    return nll, applied, memory_of(job)


def test_fp16_overflow_feeds_the_same_segments_again(rank_pool: Pools) -> None:
    """A run that overflows at first is the run that started with the smaller loss scale."""
    for (nll, applied, memory), (calm_nll, calm_applied, calm_memory) in zip(
        rank_pool(2).run(fp16_steps, 30), rank_pool(2).run(fp16_steps, 8), strict=True
    ):
        assert not applied[0]
        assert calm_applied == [True] * 3
        assert nll[0] == calm_nll[0]
        assert nll == pytest.approx(calm_nll, rel=1e-3)
        for name, value in memory.items():
            torch.testing.assert_close(value, calm_memory[name], rtol=2e-2, atol=2e-2)


def overflowing_update(world: World, fp16: dict[str, Any], action: str, stop_after: int) -> tuple[Any, ...]:
    """An update whose gradient overflows at every scale; return why it ended, how often it was repeated, its step."""
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = tiny_config(ADAM, {"train": {"precision": "fp16"}, "divergence": {"action": action}})
    job = tiny_job(config, world, stage=1, block={"fp16": fp16})
    job.engine.module.final_norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before, asked = full_parameters(job), list[int]()

    def asks_to_stop() -> bool:
        asked.append(world.rank)
        return world.rank == 1 and len(asked) >= stop_after

    try:
        outcome = job.train(update_of_rank(config, world, step=0), [150, 150], asks_to_stop=asks_to_stop)
        reason = outcome.decision.message if outcome.decision else None
    except DivergedError as error:
        reason = str(error)
    assert difference(before, full_parameters(job)) is None
    return reason, len(asked), job.step


@pytest.mark.parametrize(
    ("fp16", "scale"),
    [({"loss_scale": 8}, 8), ({"initial_scale_power": 0}, 1), ({"initial_scale_power": 5, "min_loss_scale": 4}, 4)],
)
@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_overflow_at_a_scale_that_cannot_shrink_is_a_divergence(
    rank_pool: Pools, fp16: dict[str, Any], scale: int, action: str
) -> None:
    for reason, _, step in rank_pool(2).run(overflowing_update, {**fp16, "hysteresis": 2}, action, 1000):
        assert reason.startswith("step 1: not finite: the gradient") and f"loss scale is {scale} and" in reason
        assert step == (action == "skip")


def test_a_stop_ends_the_repetitions_of_an_overflow(rank_pool: Pools) -> None:
    block = {"initial_scale_power": 30, "hysteresis": 1}
    assert rank_pool(2).run(overflowing_update, block, "stop", 6) == [(None, 6, 0)] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_training_is_bit_identical_with_and_without_evaluation(
    tmp_path: Path, books: Path, rank_pool: Pools, stage: int
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 6}})
    ends = []
    for name, every in (("with", "2"), ("without", "null")):
        run_dir = tmp_path / name
        changes = [f"run_dir={run_dir}", f"eval.every={every}", f"deepspeed.zero_optimization.stage={stage}"]
        assert rank_pool(2).run(train_here, config, changes) == [0, 0]
        ends.append((losses(run_dir), checkpoint_content(run_dir / "checkpoints" / "step-00000006")))
    points = read_points(tmp_path / "with" / METRICS_FILE)
    assert sum("validation/word_perplexity" in point.metrics for point in points) == 3
    assert difference(*ends) is None


def test_mlflow_gets_points_facts_and_configuration_of_one_run(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Two jobs of one run directory, three steps each, on two ranks."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"schedule": {"kind": "constant"}})
    for steps in (3, 6):
        changes = [f"train.steps={steps}", "tracking.mlflow=true", f"tracking.uri={store}"]
        assert rank_pool(2).run(train_here, config, changes) == [0, 0]
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("dist_mem")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/loss")) == [*range(1, 7)]
    assert run.data.params["memory.mem_len"] == "24"
    assert int(run.data.params["model.num_parameters"]) > int(run.data.params["model.state_bytes_per_lane"]) > 0
    models = client.search_logged_models([experiment.experiment_id])
    assert {(model.name, model.source_run_id) for model in models} >= {("step-00000006", run.info.run_id)}
    assert run.data.tags["world_size"] == "2" and "version.torch" in run.data.tags
    (data,) = [given.dataset for given in run.inputs.dataset_inputs]
    assert (data.name, data.digest) == ("tiny/train", read_index(books / "train").fingerprint[:12])
    written = Path(client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path)))
    assert "mem_len: 24" in written.read_text()
