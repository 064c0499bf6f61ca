"""What a run says about itself: its figures, its speed and FLOPs, and the same figures after a stop or a kill."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.data.batch import IGNORE, Batch
from dist_mem.errors import EXIT_REQUEUE
from dist_mem.estimate import step_time
from dist_mem.estimate.counting import Flops
from dist_mem.model import MemoryLM
from dist_mem.runtime.devices import Device, gpu_of
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import read_points
from dist_mem.training import reporting
from dist_mem.training.goodput import PARTS
from dist_mem.training.meter import Meter, Totals
from dist_mem.training.mfu import Utilisation, measured_flops, peak_flops
from tests.support.clock import Clock
from tests.support.jobs import build_books, figures, finish, start_ranks, stop_after_one_step, train_here, write_config
from tests.support.limits import wait_until
from tests.support.ranks import Pools
from tests.support.tiny import VOCAB, Gradients, ragged_segments, tiny_config, tiny_job, update_of_rank


def test_loss_and_speed_are_those_since_the_last_point(clock: Clock) -> None:
    engine = Gradients()
    meter = Meter(lane_segments_per_update=4)
    for nll in (30.0, 10.0):
        clock.now += 2.0
        meter.add(Totals(nll=nll, aux=8.0, num_scored=10, documents=2, documents_skipped=1), epoch=0.5)
    with meter.pause():
        clock.now += 50.0
    found = meter.read(engine)
    assert found["loss"] == 2.0
    assert found["tokens_per_second"] == 5.0
    assert found["step_seconds"] == 2.0
    assert found["aux_loss"] == 2.0
    assert "recall_perplexity" not in found
    assert (found["documents"], found["documents_skipped"], found["epoch"]) == (4, 2, 0.5)
    meter.add(Totals(nll=10.0, aux=8.0, num_scored=10), epoch=0.6)
    meter.add(Totals(documents=0), epoch=0.6)  # one that was skipped
    clock.now += 1.0
    assert meter.read(engine)["aux_loss"] == 2.0
    clock.now += 1.0
    meter.add(Totals(nll=7.0, num_scored=7, recall_nll=0.0, num_recall=2, documents=1), epoch=0.6)
    found = meter.read(engine)
    assert (found["loss"], found["recall_perplexity"]) == (1.0, 1.0)
    assert (found["documents"], found["documents_skipped"]) == (5, 2)
    assert "aux_loss" not in found


def test_meter_goes_on_where_its_saved_state_stood(clock: Clock) -> None:
    """The time between two jobs is nobody's."""
    engine = Gradients()
    straight, first = (Meter(lane_segments_per_update=4) for _ in range(2))
    clock.now += 1.0
    for meter in (straight, first):
        meter.add(Totals(num_tokens=30), epoch=0.2)
        meter.read(engine)
    clock.now += 0.7
    for meter in (straight, first):
        meter.add(Totals(0.1, 0.7, 0.3, 7, 3, 2, 1, num_read=3, num_tokens=12), epoch=0.3, logs={"share": 0.7})
    saved = json.loads(json.dumps(first.state()))
    second = Meter(lane_segments_per_update=4, saved=saved)
    for meter in (straight, second):
        meter.add(Totals(0.2, 0.1, 0.1, 9, 1, 1, 0, num_read=1), epoch=0.4, logs={"share": 0.2})
    clock.now += 0.3
    found, expected = second.read(engine), straight.read(engine)
    assert found.pop("peak_memory_gb") <= expected.pop("peak_memory_gb")
    assert found == expected
    assert expected["step_seconds"] == pytest.approx(0.5)
    assert expected["memory/share"] == pytest.approx(0.225)
    assert second.state()["tokens_read"] == straight.state()["tokens_read"] == 42, "since the start of the run"
    assert "tokens_read" not in Meter(lane_segments_per_update=4, saved={"steps": 1.0}).state(), "of an older version"
    clock.now += 1.0
    assert "memory/share" not in straight.read(engine)


def test_waiting_for_data_is_a_share_of_the_time(clock: Clock) -> None:
    def slow() -> Iterator[Any]:
        clock.now += 1.0
        yield "update"

    meter = Meter(lane_segments_per_update=1)
    assert meter.time_next(slow()) == "update"
    clock.now += 3.0
    assert meter.read(Gradients())["data_wait_share"] == 0.25


def test_what_passes_before_the_first_update_or_in_a_pause_is_in_no_figure(clock: Clock) -> None:
    """The fetch of the first segments was a share of 4.95; a save was saved with the wait for the one before it."""

    def slow() -> Iterator[Any]:
        while True:
            clock.now += 32.0
            yield "update"

    for saved in ({}, {"waited": 1.0, "seconds": 2.0}):
        meter, reader = Meter(lane_segments_per_update=1, saved=saved), slow()
        meter.time_next(reader)
        meter.begin()
        clock.now += 1.0
        before = meter.state()
        with meter.pause(), meter.pause():
            meter.time_next(reader)
            assert meter.state() == before
        assert meter.state() == before
        assert (before["waited"], before["seconds"]) == (saved.get("waited", 0.0), saved.get("seconds", 0.0) + 1.0)
        assert meter.read(Gradients())["data_wait_share"] == before["waited"] / before["seconds"]


def test_reading_counts_tokens_that_are_not_scored(clock: Clock) -> None:
    """Of 30 tokens read in 2 s, 20 have a backward and 10 are scored: 10 x 2 + 20 x 6 FLOPs of 100 in a second."""
    meter = Meter(lane_segments_per_update=1, utilisation=Utilisation(Flops(2, 6), 100.0))
    clock.now += 2.0
    meter.add(Totals(nll=1.0, num_scored=10, num_tokens=30, num_learned=20), epoch=0.1)
    found = meter.read(Gradients())
    assert (found["tokens_per_second"], found["tokens_read_per_second"], found["mfu"]) == (5.0, 15.0, 0.7)


def train_with_peaks(world: World, config_file: Path) -> int:
    """A job whose ranks use 1 and 2 GB, and whose allocators have tried again once and twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "peak_memory_gb", lambda: world.rank + 1.0)
        patch.setattr(reporting, "allocator_counts", lambda: {"num_alloc_retries": world.rank + 1, "num_ooms": 0})
        return train_here(world, config_file)


def test_a_point_has_the_memory_of_the_largest_rank_and_the_use_of_all(tmp_path: Path, rank_pool: Pools) -> None:
    books, run_dir = build_books(tmp_path / "books"), tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"tracking": {"every": 5}})
    assert rank_pool(2).run(train_with_peaks, config) == [0, 0]
    points = [point.metrics for point in read_points(run_dir / "metrics.jsonl")]
    assert [point["peak_memory_gb"] for point in points] == [2.0] * 3
    assert [(point["num_alloc_retries"], point["num_ooms"]) for point in points] == [(3.0, 0.0)] * 3
    for point in points:
        assert point["mfu"] > 0
        assert point["tokens_read_per_second"] >= point["tokens_per_second"]
        assert sum(point[f"goodput/{part}"] for part in PARTS) == pytest.approx(1.0)


def with_recall(batch: Batch) -> Batch:
    """The batch with a third of its positions said to refer back, those that are not scored among them."""
    return batch._replace(recall=batch.tokens * (batch.tokens % 3 == 0))


def recall_of(batch: Batch) -> torch.Tensor:
    return (batch.tokens % 3 == 0) & (batch.targets != IGNORE)


def recall_totals(world: World) -> Totals:
    """What two ranks count of one update."""
    config = tiny_config({"train": {"micro_batch_size": 2}})
    update = update_of_rank(config, world, step=0)
    num_recall = sum(int(recall_of(batch).sum()) for batch in update.batches)
    update = update._replace(batches=[with_recall(batch) for batch in update.batches], num_recall=num_recall)
    return tiny_job(config, world, stage=2).train(update, [300, *[0] * (len(update.batches) - 1)]).totals


def test_recall_perplexity_is_that_of_the_scored_recall_tokens_of_all_ranks(rank_pool: Pools) -> None:
    config = tiny_config()
    torch.manual_seed(config.train.seed)
    model = MemoryLM(model_spec(config, VOCAB))
    (batch,) = ragged_segments(config, step=0)
    state = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    nll = model(batch.tokens, batch.targets, batch.valid_len, state=state).nll.detach()[recall_of(batch)]
    for totals in rank_pool(2).run(recall_totals):
        assert totals.num_recall == len(nll)
        assert totals.recall_nll == pytest.approx(float(nll.sum()), rel=1e-5)


def test_points_logged_after_a_kill_and_stops_are_those_of_a_straight_run(tmp_path: Path, rank_pool: Pools) -> None:
    """Killed and stopped between two logged points: loss and counts cover the same steps as if nothing had been."""
    books, changes = build_books(tmp_path / "books"), {"tracking": {"every": 4}, "schedule": {"kind": "constant"}}
    endless = {"train": {"steps": 5000}, "checkpoint": {"every": 3}}
    broken = write_config(tmp_path / "broken.yaml", books, tmp_path / "broken", changes, endless)
    straight = write_config(tmp_path / "straight.yaml", books, tmp_path / "straight", changes)
    processes = start_ranks(["train", str(broken)], world_size=2, cwd=tmp_path)
    wait_until((tmp_path / "broken" / "checkpoints" / "step-00000006").is_dir, "the checkpoint of step 6")
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish(processes)
    for _ in range(2):
        assert rank_pool(2).run(stop_after_one_step, broken) == [EXIT_REQUEUE] * 2
    for config in (broken, straight):
        assert rank_pool(2).run(train_here, config, ["train.steps=24", "checkpoint.every=null"]) == [0, 0]

    found, expected = figures(tmp_path / "broken"), figures(tmp_path / "straight")
    assert found == expected
    assert [step for step, _ in found] == [4, 8, 12, 16, 20, 24]
    assert found[-1][1]["documents"] > found[0][1]["documents"]


GPU_WORLD = World(0, 1, 0, 1, torch.device("cuda"))
CPU_WORLD = World(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", False, 66.9e12),
        ("NVIDIA H100 80GB HBM3", "fp32", True, 494.7e12),
        ("Tesla V100-SXM2-32GB", "fp32", True, 15.7e12),
        ("Tesla V100-SXM2-32GB", "bf16", False, None),
        ("Some GPU of 2030", "bf16", False, None),
    ],
)
def test_peak_of_a_gpu_is_that_of_its_name_and_precision(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tf32: bool, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high" if tf32 else "highest")
    assert peak_flops(tiny_config({"train": {"precision": precision}}).train, GPU_WORLD) == pytest.approx(expected)
    if expected is not None:
        train = tiny_config({"train": {"precision": precision, "tf32": tf32}}).train
        assert step_time.peak_flops(train, cast(Device, gpu_of(name))) == pytest.approx(expected), "that of an estimate"
    given = tiny_config({"train": {"precision": precision, "peak_tflops": 2.5}})
    assert peak_flops(given.train, GPU_WORLD) == peak_flops(given.train, CPU_WORLD) == 2.5e12


def test_peak_of_a_processor_is_measured_once_without_drawing_random_numbers() -> None:
    before = torch.get_rng_state()
    first = measured_flops(torch.float32, 1)
    assert first > 1e8 and measured_flops(torch.float32, 1) == first
    assert torch.equal(torch.get_rng_state(), before)
