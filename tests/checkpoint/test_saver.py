"""Saving beside the training: no half checkpoint, and a failure that all ranks learn of at once."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.checkpoint import commit
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.checkpoint.saver import Saver
from dist_mem.checkpoint.snapshot import Snapshot, take_snapshot
from dist_mem.errors import DivergedError
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.training import saving
from dist_mem.training.context import Context
from dist_mem.training.state import TrainState
from tests.support.jobs import logged_steps, train_here, write_config
from tests.support.limits import limit, wait_until
from tests.support.messages import described, said
from tests.support.ranks import Pools
from tests.support.saving import before_writing, names, newest_verified

init_state = TransformerXL.init_state


def train_reporting(world: World, config: Path) -> str:
    try:
        return f"ended with {train_here(world, config)}"
    except Exception as error:
        return described(error)


def with_wide_numbers(memory: TransformerXL, *arguments: Any) -> Any:
    state = init_state(memory, *arguments)
    return state._replace(**{state._fields[0]: state[0].to(torch.complex128)})


def train_where_the_first_save_would_fail(world: World, config: Path, what: str) -> str:
    """Train where a rank's file cannot be written, or rank 0 cannot describe the checkpoint, or read what it wrote."""

    def fail(path: Path) -> None:
        if what == "a file" and path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device", str(path))

    with before_writing(fail, is_rehearsal=True) as patch:
        if what == "the manifest":
            patch.setattr(commit, "code_versions", lambda: {"torch": object()})
        if what == "a dtype":
            patch.setattr(TransformerXL, "init_state", with_wide_numbers)
        if what == "what is read":
            patch.setattr(commit, "code_versions", lambda: {"torch": 2})
        return train_reporting(world, config)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a file", ["UnfitError", "rank 1: OSError", "rank-00001.safetensors"]),
        ("the manifest", ["UnfitError"]),
        ("a dtype", ["UnusableError, exit code 2", "hidden is torch.complex128"]),
        ("what is read", ["CheckpointError, exit code 2", "manifest.json", "versions"]),
    ],
)
def test_a_save_that_must_fail_is_found_before_the_first_step(
    what: str, named: list[str], tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 4}})
    ends = rank_pool(2).run(train_where_the_first_save_would_fail, config, what)
    assert set(ends) == {ends[0]}, "one message on every rank"
    said(ends[0], tmp_path / "run" / "checkpoints", *named)
    assert logged_steps(tmp_path / "run") == []
    assert names(tmp_path / "run") == []


def train_while_the_writer_is_held_up(world: World, config: Path, run_dir: Path) -> str:
    def hold_up(path: Path) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if ".step-00000005" in str(path):
            wait_until(lambda: 10 in logged_steps(run_dir), "step 10", seconds=20)
            time.sleep(0.2)
            assert 11 not in logged_steps(run_dir), "the save of step 10 waits for that of step 5"
            assert list_steps(run_dir) == []

    def take(*, step: int, **others: Any) -> Snapshot:
        if not others["is_rehearsal"]:
            assert list_steps(run_dir) == [5, 10][: step // 5 - 1], "two copies of the state in memory"
        return take_snapshot(step=step, **others)

    with before_writing(hold_up) as patch:
        patch.setattr(saving, "take_snapshot", take)
        return train_reporting(world, config)


def test_training_goes_on_while_a_checkpoint_is_written_until_the_next_is_due(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 15}})
    reported = rank_pool(2).run(train_while_the_writer_is_held_up, config, tmp_path / "run")
    assert reported == ["ended with 0"] * 2
    assert list_steps(tmp_path / "run") == [5, 10, 15]
    points = [point.metrics for point in read_points(tmp_path / "run" / METRICS_FILE)]
    first, _ = [point for point in points if "checkpoint/bytes" in point]
    assert first["checkpoint/bytes"] > 10_000
    assert first["checkpoint/seconds"] > 0.2
    assert first["checkpoint/stall_seconds"] > 0.1


def train_with_a_failing_write(world: World, config: Path, failing: Sequence[int]) -> str:
    """The write of step 10 fails on these ranks; rank 1 makes step 14 when it knows, rank 0 goes on without looking."""
    from dist_mem.training import loop

    begin_step, failed, steps = loop.begin_step, Saver.has_failed, [0]

    def note(step: int) -> None:
        steps[0] = step
        begin_step(step)

    def fail(path: Path) -> None:
        if world.rank in failing and ".step-00000010" in str(path) and path.parent.name == "ranks":
            raise OSError(28, "No space left on device", str(path))

    def look(saver: Saver) -> bool:
        if steps[0] == 13 and world.rank == 1:
            wait_until(lambda: failed(saver), "the failure")
        return failed(saver)

    with before_writing(fail) as patch:
        patch.setattr(loop, "begin_step", note)
        patch.setattr(Saver, "has_failed", look)
        return train_reporting(world, config)


@pytest.mark.parametrize(("failing", "steps"), [([0], 10**6), ([1], 10**6), ([0, 1], 10**6), ([1], 10)])
def test_a_failed_write_stops_all_ranks_within_one_step_and_leaves_nothing(
    tmp_path: Path, books: Path, rank_pool: Pools, failing: list[int], steps: int
) -> None:
    """The write of the last step too: the run has not succeeded then."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "run.yaml", books, run_dir, {"train": {"steps": steps}})
    reported = rank_pool(2).run(train_with_a_failing_write, config, failing)
    assert reported[0] == reported[1]
    said(reported[0], "UnfitError", "step-00000010", *(f"rank {rank}: OSError: [Errno 28]" for rank in failing))
    assert logged_steps(run_dir)[-1] <= 14
    assert names(run_dir) == ["latest", "step-00000005"]
    assert newest_verified(run_dir) == (step_dir(run_dir, 5), [])


def diverge_while_the_writer_is_held_up(world: World, config: Path, fails: bool) -> tuple[str, list[str]]:
    """Return how the training ended, and its messages."""
    from dist_mem.training import loop as train

    train_step, has_diverged = train.train_step, threading.Event()
    messages: list[str] = []

    def hold_up(path: Path) -> None:
        assert has_diverged.wait(limit(20))
        if fails:
            raise OSError(28, "No space left on device")

    def diverge(context: Context, state: TrainState, *arguments: Any, **options: Any) -> Any:
        if state.step == 7:
            has_diverged.set()
            raise DivergedError("for this test")
        return train_step(context, state, *arguments, **options)

    with before_writing(hold_up) as patch:
        patch.setattr(train, "train_step", diverge)
        patch.setattr("dist_mem.tracking.tracker.Tracker.message", lambda self, text: messages.append(text))
        return train_reporting(world, config), messages


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_in_an_error_waits_for_its_checkpoint(
    tmp_path: Path, books: Path, rank_pool: Pools, fails: bool
) -> None:
    """The first error decides how the run ends, even if the checkpoint fails too."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 12}})
    for ended, messages in rank_pool(2).run(diverge_while_the_writer_is_held_up, config, fails):
        assert ended == "ended with 3"
        assert any("No space left" in message for message in messages) == fails
        assert any(message.startswith("step 5: saved") for message in messages) != fails
    assert list_steps(tmp_path / "run") == ([] if fails else [5])


def test_the_clock_of_rank_0_saves_at_the_same_step_everywhere(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """A billionth of a minute: every step is due."""
    changes = {"train": {"steps": 4}, "checkpoint": {"every": None, "every_minutes": 1e-9}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    assert rank_pool(2).run(train_here, config) == [0, 0]
    assert list_steps(tmp_path / "run") == [1, 2, 3, 4]


def test_a_run_keeps_its_last_and_its_best_checkpoints(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Across a restart too. Loss falls all the time here, so that the best is the newest evaluated one."""
    rules = {"every": 2, "keep_last": 1, "keep_every": 5, "keep_best": 1}
    for steps in (6, 13):
        changes = {"train": {"steps": steps}, "schedule": {"kind": "constant"}, "checkpoint": rules}
        config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes, {"eval": {"every": 4}})
        assert rank_pool(2).run(train_here, config) == [0, 0]
    assert list_steps(tmp_path / "run") == [10, 12, 13]
    kept = json.loads((step_dir(tmp_path / "run", 13) / "manifest.json").read_text())["validation"]
    assert kept["step"] == 12
    assert 2 < kept["loss"] < 6
    assert kept["measure"].startswith("validation, T ") and "; data " in kept["measure"]
