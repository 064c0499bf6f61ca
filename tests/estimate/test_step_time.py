"""What an update sends and computes beside forward and backward: by optimizer, ZeRO stage and windows."""

import pytest
import torch

from dist_mem.config import load_config
from dist_mem.engine.muon import orthogonal_flops
from dist_mem.estimate.counting import MicroBatchCost
from dist_mem.estimate.step_time import StepTime, UpdateTraffic, checkpoint_cost, effective_block, step_time, transfer
from dist_mem.estimate.zero import ModelSizes, TrainingJob, job_of, sizes_of
from dist_mem.memory import memory_options
from dist_mem.runtime.devices import device_named
from tests.support.paths import ROOT

NUM_RANKS, RING = 4, 3 / 4


def job_with(*changes: str, stage: int = 0) -> tuple[TrainingJob, ModelSizes]:
    files = [str(ROOT / "configs/demo.yaml"), f"deepspeed.zero_optimization.stage={stage}", *changes]
    config = load_config(files, memory_options=memory_options)
    job = job_of(config, 1_000, world_size=NUM_RANKS, on_gpu=True)
    return job, sizes_of(job.spec, torch.float32, job.optimizer)


def sent_by(job: TrainingJob, sizes: ModelSizes) -> UpdateTraffic:
    zero = effective_block(job, sizes).get("zero_optimization") or {}
    return transfer(job.spec.train, job.spec.model, sizes, zero, job.batch)


def time_of(job: TrainingJob, sizes: ModelSizes) -> StepTime:
    return step_time(job, sizes, MicroBatchCost(0, 0, []), device_named("h100"), gpus_per_node=8)


def test_a_checkpoint_has_frozen_weights_too_in_their_precision() -> None:
    job, sizes = job_with("train.precision=bf16")
    trained = checkpoint_cost(job.spec.train, sizes, world_size=1, disk_rate=1e9).num_bytes
    frozen = sizes._replace(trained=sizes.trained - 1_000, moments=sizes.moments - 2_000)
    assert checkpoint_cost(job.spec.train, frozen, world_size=1, disk_rate=1e9).num_bytes == trained - 10_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_sends_every_matrix_to_a_rank_and_back_unless_all_ranks_have_it(stage: int) -> None:
    plain, with_muon = (
        (sent_by(*found), found[1])
        for found in (job_with(f"optimizer.kind={kind}", stage=stage) for kind in ("adamw", "muon"))
    )
    matrices = with_muon[1].matrices
    moves = 1 if stage == 0 else 2
    assert plain[1].matrices == () and len(matrices) == 12
    assert with_muon[0].num_collectives - plain[0].num_collectives == moves * len(matrices)
    numbers = sum(rows * columns for rows, columns in matrices)
    assert with_muon[0].num_bytes - plain[0].num_bytes == pytest.approx(RING * 4 * moves * numbers, abs=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_products_of_muon_are_divided_among_the_ranks(precision: str) -> None:
    job, sizes = job_with("optimizer.kind=muon", f"optimizer.muon={{precision: {precision}, steps: 7}}")
    without = sizes._replace(matrices=())
    rate = 0.7 * device_named("h100").flops[precision]  # the share of the data sheet that products reach
    seconds = orthogonal_flops(sizes.matrices, 7) / NUM_RANKS / rate
    assert time_of(job, sizes).update - time_of(job, without).update == pytest.approx(seconds)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_segments_that_are_computed_again_gather_the_weights_a_third_time_at_stage_3_alone(stage: int) -> None:
    """For each segment of a window; stage 2 reduces gradients as often, at stage 1 nothing changes."""
    keys = ["memory={kind: infini}", "train.segments_per_update=8", "train.bptt_segments=4", "train.precision=fp32"]
    kept, (job, sizes) = (
        job_with(*keys, f"train.activation_checkpointing={value}", stage=stage) for value in ("none", "segments")
    )
    windows, num_values = kept[0].batch.windows, sizes.parameters
    assert sizes.trained == num_values and job.batch.backwards == 4 * windows
    gathers = {1: (1, 1), 2: (1, 1), 3: (2 * windows, 3 * 4 * windows)}[stage]
    reductions = (2, 2) if stage == 1 else (windows, 4 * windows)
    for found, gathered, reduced in zip((sent_by(*kept), sent_by(job, sizes)), gathers, reductions, strict=True):
        assert found.num_bytes == int(RING * 4 * num_values * (gathered + reduced))
