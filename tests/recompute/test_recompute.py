"""`dist-mem recompute` computes steps again, bit for bit, and names what differs from the recorded ones."""

import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UnfitError
from dist_mem.recompute.compare_step import refuse_other_machine
from dist_mem.recompute.recompute import change_within
from dist_mem.recompute.settings import read_recorded
from dist_mem.runtime.distributed import World
from dist_mem.runtime.gpu import set_arithmetic
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.training.history import read_history
from tests.support.curricula import make_data
from tests.support.forked_ranks import Program
from tests.support.jobs import finish, logged_steps, run_ranks, start_ranks, train_here, write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said, said_line
from tests.support.paths import EXAMPLES
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools
from tests.support.recording import found_by, planted_spike
from tests.support.run_memories import carries_gradient, every_memory, small_memory
from tests.support.tracked import log_points

CONSTANT = {"schedule": {"kind": "constant"}}  # so that a run may end at different steps


def content_of(run_dir: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path.is_file()}


def train_diverging(world: World, config: Path, at: int) -> int:
    with planted_spike(at):
        return train_here(world, config)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_steps_are_equal_bit_for_bit_and_nothing_is_written(
    tmp_path: Path, books: Path, rank_pool: Pools, stage: int
) -> None:
    """Two segments an update, a point every three steps, and checkpoints between the points."""
    zero = {"deepspeed": {"zero_optimization": {"stage": stage}}}
    changes = {"train": {"steps": 8, "segments_per_update": 2}, "tracking": {"every": 3}, "checkpoint": {"every": 4}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", zero, changes)
    assert rank_pool(2).run(train_here, config) == [EXIT_DONE] * 2
    before = content_of(tmp_path / "run")
    for step, point in ((2, "step 3, mean of steps 1 to 3"), (5, "step 6, mean of steps 4 to 6"), (8, "step 8")):
        (code, found, lines), (other, *_) = rank_pool(2).run(found_by, tmp_path / "run", step)
        assert (code, other) == (EXIT_DONE, EXIT_DONE), lines
        assert any(line.startswith(f"recorded at {point}") for line in lines), lines
        assert [lane.lane for lane in found.lanes] == list(range(8))
        nll, num_scored = (sum(getattr(lane, name) for lane in found.lanes) for name in ("nll", "num_scored"))
        assert nll / num_scored == pytest.approx(found.loss, rel=1e-6)
    assert content_of(tmp_path / "run") == before


def products_of_a_recomputation(world: World, run_dir: Path) -> bool:
    """Whether products of float32 may use TF32 where a step is computed again."""
    try:
        found_by(world, run_dir, 1)
        return torch.backends.cuda.matmul.allow_tf32
    finally:
        set_arithmetic(tf32=False)


def test_a_step_is_computed_again_with_the_products_of_the_training(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    """It multiplied exactly, which on a GPU gives other metrics than the recorded ones of a run with train.tf32."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 1, "tf32": True}})
    assert rank_pool(1).run(train_here, config) == [EXIT_DONE]
    assert rank_pool(1).run(products_of_a_recomputation, tmp_path / "run") == [True]


def test_metrics_and_programs_of_own_sinks_are_left_out(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Each was a difference, and a sink that had been moved refused the step."""
    sink = Path(shutil.copy(EXAMPLES / "csv_sink.py", tmp_path))
    changes = {"train": {"steps": 2}, "tracking": {"sinks": [f"{sink}:CsvSink"]}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    assert rank_pool(2).run(train_here, config) == [EXIT_DONE] * 2
    assert read_recorded(tmp_path / "run")[-1].metrics["bits_per_token"] > 0.0
    sink.unlink()
    code, _, lines = rank_pool(2).run(found_by, tmp_path / "run", 2)[0]
    assert code == EXIT_DONE and not any("bits_per_token" in line for line in lines), lines


def test_a_step_without_targets_is_computed_again(tmp_path: Path, rank_pool: Pools) -> None:
    """As in the recall tasks, whose documents are scored at their end: here in the second segment."""
    data = make_data(tmp_path / "data", [32] * 8, num_scored=2)
    config = write_config(tmp_path / "run.yaml", data, tmp_path / "run", {"train": {"steps": 2}})
    assert rank_pool(2).run(train_here, config) == [EXIT_DONE] * 2
    code, found, lines = rank_pool(2).run(found_by, tmp_path / "run", 1)[0]
    assert code == EXIT_DONE and math.isnan(found.loss), lines
    assert not any(lane.num_scored for lane in found.lanes)


MEMORIES = {
    **every_memory(),
    "infinite, sticky, over compressive": small_memory("infinite", sampling="sticky", over=small_memory("compressive")),
    "infinite, stratified, by moments": small_memory("infinite", sampling="stratified", density="softmax_moments"),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_is_computed_again_bit_for_bit(tmp_path: Path, books: Path, rank_pool: Pools, name: str) -> None:
    """From an empty memory and from the checkpoint of step 4, under ZeRO-2 on two ranks, with dropout.

    Where gradients flow through the state, in windows whose segments the backward computes again.
    """
    carries = carries_gradient(MEMORIES[name])
    windows: dict[str, Any] = {"bptt_segments": 2, "activation_checkpointing": "segments"} if carries else {}
    run_dir, changes = tmp_path / "run", {"train": {"steps": 8, "segments_per_update": 2}, "checkpoint": {"every": 4}}
    config = write_config(tmp_path / "run.yaml", books, run_dir, changes, {"train": windows}, memory=MEMORIES[name])
    assert rank_pool(2).run(train_here, config) == [EXIT_DONE] * 2
    before = content_of(run_dir)
    for step, others in ((3, 2), (7, 2)):
        for code, found, lines in rank_pool(2).run(found_by, run_dir, step):
            assert code == EXIT_DONE, lines
            assert len(found.points) == others + 1
    assert content_of(run_dir) == before


def test_steps_on_changing_ranks_are_computed_on_those_that_made_them(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    run_dir = tmp_path / "run"
    for ranks, steps in ((2, 7), (1, 14)):
        config = write_config(tmp_path / "run.yaml", books, run_dir, CONSTANT, {"train": {"steps": steps}})
        assert rank_pool(ranks).run(train_here, config) == [EXIT_DONE] * ranks
    assert [(part.step, part.ranks) for part in read_history(run_dir)] == [(0, 2), (7, 1)]
    for step, ranks in ((3, 2), (7, 2), (8, 1), (12, 1)):
        results = rank_pool(ranks).run(found_by, run_dir, step)
        assert [code for code, *_ in results] == [EXIT_DONE] * ranks, results[0][2]
    shutil.rmtree(run_dir / "checkpoints" / "step-00000007")  # as retention may do
    (text,) = rank_pool(1).run(error_of, found_by, run_dir, 8)
    said(text, "UnusableError", "--step", "checkpoint.keep_")


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_steps_around_a_divergence_are_equal(tmp_path: Path, books: Path, rank_pool: Pools, action: str) -> None:
    """The spike at the eighth update is planted. After a rollback to step 5, steps 6 to 8 are only read."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"divergence": {"action": action}})
    assert rank_pool(2).run(train_diverging, config, 8) == [EXIT_DONE] * 2
    is_back = action == "rollback"
    found = [(part.step, part.first_trained) for part in read_history(run_dir)]
    assert found == ([(0, 0), (5, 8)] if is_back else [(0, 0)])
    for step in (5, 6, 8, 9, 11, 12) if is_back else (5, 7, 11, 12):
        (code, _, lines), _ = rank_pool(2).run(found_by, run_dir, step)
        assert code == EXIT_DONE, lines


def test_a_planted_difference_is_named_with_both_values(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"train": {"steps": 8}})
    assert rank_pool(1).run(train_here, config) == [EXIT_DONE]
    points = [point._asdict() for point in read_points(run_dir / METRICS_FILE)]
    recorded = points[6]["metrics"]["loss"]
    points[6]["metrics"]["loss"] = recorded + 1e-9
    log_points(run_dir / METRICS_FILE, points)
    ((code, _, lines),) = rank_pool(1).run(found_by, run_dir, 7)
    assert code == EXIT_FAILED
    assert f"  loss: recorded {recorded + 1e-9!r}, computed again {recorded!r}: differs by -1e-09" in lines
    assert any(line.startswith("  grad_norm: ") and line.endswith("equal bit for bit") for line in lines)
    ((code, _, lines),) = rank_pool(1).run(found_by, run_dir, 8)
    assert code == EXIT_FAILED
    assert any(line.startswith("step 7: loss") and line.endswith("differs") for line in lines), lines
    ((code, _, lines),) = rank_pool(1).run(found_by, run_dir, 6)
    assert code == EXIT_DONE
    log_points(run_dir / METRICS_FILE, [])
    ((code, found, lines),) = rank_pool(1).run(found_by, run_dir, 7)
    assert code == EXIT_DONE
    assert found.loss == recorded
    assert any("there is nothing to compare" in line for line in lines)
    codes, text = run_ranks(["recompute", str(run_dir), "--step", "3"], world_size=2, cwd=tmp_path)
    assert codes == [EXIT_USAGE] * 2
    said_line(text, "error: step 3 ")


def test_a_killed_run_is_replayed_by_one_command(tmp_path: Path, books: Path) -> None:
    """Kill -9 twice; the command then starts two ranks by itself, also while a lease is left behind."""
    run_dir = tmp_path / "run"
    changes = {"train": {"steps": 24}, "checkpoint": {"every": 4}}
    write_config(tmp_path / "run.yaml", books, run_dir, changes)
    for last in (6, 14):
        processes = start_ranks(["train", "run.yaml"], world_size=2, cwd=tmp_path)
        wait_until(lambda last=last: (run_dir / "metrics.jsonl").exists() and last in logged_steps(run_dir), "a step")
        for process in processes:
            process.send_signal(signal.SIGKILL)
        finish(processes)
    codes, text = run_ranks(["train", "run.yaml"], world_size=2, cwd=tmp_path)
    assert codes == [EXIT_DONE] * 2, text
    assert len(read_history(run_dir)) > 1
    before = content_of(run_dir)
    for step in (3, 10, 23):
        assert replay_alone(tmp_path, run_dir, step) == EXIT_DONE
    assert content_of(run_dir) == before


def replay_alone(tmp_path: Path, run_dir: Path, step: int) -> int:
    """Run the command as a user does, without a launcher."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = Program(["recompute", str(run_dir), "--step", str(step)], cwd=tmp_path, environment=environment)
    process.communicate(timeout=limit(120))
    return int(process.returncode or 0)


def test_other_ranks_than_this_machine_has_are_refused(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 1}})
    assert rank_pool(1).run(train_here, config) == [EXIT_DONE]
    (part,) = read_history(tmp_path / "run")
    assert (part.ranks, part.threads, part.device) == (1, 1, "cpu")
    with refused(UnfitError, "512 ranks"):
        refuse_other_machine(part._replace(ranks=512, device="cuda"))
    again = part._replace(step=10)
    assert change_within([part, again], 1, 20) is None
    assert change_within([part, again._replace(ranks=3)], 1, 20) == "at step 10 the run went from 1 to 3 ranks"
    assert change_within([part, again._replace(ranks=3)], 1, 10) is None
