"""Whole runs of two ranks in which something diverges: skipped, rolled back or stopped, and resumed in between."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dist_mem.checkpoint import resume_source
from dist_mem.checkpoint.manifest import verify
from dist_mem.checkpoint.resume_choice import ResumeChoice, choose_checkpoint
from dist_mem.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_REQUEUE
from dist_mem.memory.base import map_state
from dist_mem.recompute.settings import read_recorded
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import METRICS_FILE, find_entries, read_points
from dist_mem.tracking.tracker import Tracker
from dist_mem.training import loop, resume
from dist_mem.training import step as update
from dist_mem.training.agreement import Agreement, Forward
from dist_mem.training.divergence import Divergence
from dist_mem.training.step import StepContext
from tests.support.faults import flip
from tests.support.jobs import checkpoint_content, difference, figures, logged_steps, train_here, write_config
from tests.support.messages import said_line
from tests.support.ranks import Pools
from tests.support.saving import names
from tests.support.tracked import history

KILLED, STOPPED = "killed", "stopped"


def broken_memory(forward: Forward) -> Forward:
    broken = [map_state(lambda part: part * torch.nan if part.is_floating_point() else part, state)
              for state in forward.states]  # fmt: skip
    return forward._replace(states=broken, memory_is_finite=torch.tensor(False))


def with_loss(forward: Forward, factor: float) -> Forward:
    return forward._replace(sums=dataclasses.replace(forward.sums, nll=forward.sums.nll * factor))


FAULTS: dict[str, Callable[[Forward], Forward]] = {
    "loss": lambda forward: with_loss(forward, torch.nan),
    "spike": lambda forward: with_loss(forward, 50.0),
    "memory": broken_memory,
}


def train_with_faults(
    world: World, config: Path, changes: list[str], faults: Mapping[int, str], first_trained: int = 0
) -> int | str:
    """A job in which something is wrong on rank 1, at these steps; returns its exit code.

    Args:
        faults: step -> loss, spike or memory; killed; stopped, by a signal while segments are only read.
        first_trained: the job begins as one that has rolled back: until this step segments are only read.
    """
    accumulate_gradients, agree, begin = update.accumulate_gradients, update.begin, Divergence.__init__
    begin_step, steps = loop.begin_step, [0]

    def note(step: int) -> None:
        steps[0] = step
        begin_step(step)

    def accumulate(context: StepContext, *arguments: Any) -> Agreement:
        what = faults.get(steps[0], "")
        if what == KILLED:
            raise ConnectionAbortedError
        if what == STOPPED and steps[0] < context.divergence.first_trained:
            os.kill(os.getpid(), signal.SIGTERM)
        return accumulate_gradients(context, *arguments)

    def agree_on_faults(forward: Forward, *arguments: Any) -> Agreement:
        what = faults.get(steps[0], "")
        return agree(FAULTS[what](forward) if what in FAULTS and world.rank == 1 else forward, *arguments)

    def begin_reading(self: Divergence, *arguments: Any) -> None:
        begin(self, *arguments)
        self.first_trained = max(self.first_trained, first_trained)

    with (
        mock.patch.object(update, "accumulate_gradients", accumulate),
        mock.patch.object(update, "begin", agree_on_faults),
        mock.patch.object(loop, "begin_step", note),
        mock.patch.object(Divergence, "__init__", begin_reading),
    ):
        try:
            return train_here(world, config, changes)
        except ConnectionAbortedError:
            return KILLED


def configure(tmp_path: Path, books: Path, name: str, *changes: str) -> tuple[Path, list[str]]:
    """A job of twelve steps that saves every five; a constant learning rate lets it stop before its end."""
    run_dir = tmp_path / name
    config = write_config(tmp_path / f"{name}.yaml", books, run_dir, {"schedule": {"kind": "constant"}})
    return config, ["divergence.spike_z=20", "divergence.window=8", *changes]


def end_of(run_dir: Path) -> tuple[dict[str, Any], Any]:
    """The last checkpoint, and what it has counted."""
    directory = run_dir / "checkpoints" / "step-00000012"
    return checkpoint_content(directory), json.loads((directory / "manifest.json").read_text())["divergence"]


def floats(content: Any) -> list[Tensor]:
    parts = content.values() if isinstance(content, dict) else [content]
    return [found for part in parts for found in (floats(part) if isinstance(part, dict) else [part])]


def metrics(run_dir: Path, name: str) -> list[tuple[int, float]]:
    points = read_points(run_dir / METRICS_FILE)
    return [(point.step, point.metrics[name]) for point in points if name in point.metrics]


def test_run_with_skipped_updates_resumes_bitwise_after_a_kill(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Skipped once before the checkpoint and twice after it; the window of losses spans the kill."""
    faults = {2: "loss", 6: "memory", 10: "spike"}
    for name, kills in (("straight", []), ("killed", [8, 11])):
        for kill in [*kills, None]:
            config, changes = configure(tmp_path, books, name, "divergence.action=skip")
            ended = rank_pool(2).run(train_and_listen, config, changes, faults | ({kill: KILLED} if kill else {}))
            assert [code for code, _ in ended] == [KILLED if kill else EXIT_DONE] * 2
        if not kills:
            said_line(ended[0][1], "step 3: ", "(1 of at most 3 times)")
    straight, killed = end_of(tmp_path / "straight"), end_of(tmp_path / "killed")
    assert difference(straight, killed) is None
    assert difference(metrics(tmp_path / "straight", "loss")[3:6], metrics(tmp_path / "killed", "loss")[3:6]) is None
    content, counted = straight
    assert (counted["skip"], counted["rollback"], len(counted["losses"])) == (3, 0, 8)
    assert all(bool(torch.isfinite(part).all()) for part in floats(content) if part.is_floating_point())
    assert metrics(tmp_path / "straight", "divergence/skipped") == [(3, 1), (7, 2), (11, 3)]
    assert metrics(tmp_path / "killed", "divergence/skipped") == metrics(tmp_path / "straight", "divergence/skipped")


def test_rollback_continues_as_from_the_checkpoint_with_the_bad_segments_only_read(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config, changes = configure(tmp_path, books, "rolled", "train.seg_len=64", "divergence.action=rollback")
    (code, text), again = rank_pool(2).run(train_and_listen, config, changes, {7: "loss"})
    assert code == EXIT_DONE and again == (code, text)
    for named in ("(1 of at most 3 times)", "step-00000005; the segments of steps 6 to 8"):
        said_line(text, named)
    other, changes = configure(tmp_path, books, "reference", "train.seg_len=64")
    assert rank_pool(2).run(train_with_faults, other, changes, {5: KILLED}) == [KILLED] * 2
    assert rank_pool(2).run(train_with_faults, other, changes, {7: "loss"}, 8) == [EXIT_DONE] * 2

    (content, counted), (expected, also_counted) = end_of(tmp_path / "rolled"), end_of(tmp_path / "reference")
    assert difference(content, expected) is None
    assert also_counted | {"rollback": 1} == counted
    rolled, reference = (
        [(step, found) for step, found in figures(tmp_path / name) if "loss" in found]
        for name in ("rolled", "reference")
    )
    for name in ("grad_norm", "lr"):
        assert [step for step, found in rolled if name not in found] == [6, 7, 8], "steps that were only read"
    assert repr(rolled) == repr(reference), "nan is nan"
    assert rolled[4][1]["documents"] < rolled[7][1]["documents"], "nothing that a rollback must not count twice"
    assert metrics(tmp_path / "rolled", "divergence/rollbacks") == [(5, 1)]
    assert sorted({step for step, _ in metrics(tmp_path / "rolled", "loss")}) == list(range(1, 13))
    assert logged_steps(tmp_path / "rolled") == [*range(1, 6), *range(5, 13)], "each step once, and the rollback"


@pytest.mark.parametrize(("interruption", "code"), [({9: KILLED}, KILLED), ({6: STOPPED}, EXIT_REQUEUE)])
def test_rolled_back_run_resumes_bitwise(
    tmp_path: Path, books: Path, rank_pool: Pools, interruption: dict[int, str], code: int | str
) -> None:
    """Killed before it has saved, so that it rolls back anew; stopped with a save amid the steps that are only read."""
    for name, jobs in (("straight", [{}]), ("interrupted", [interruption, {}])):
        for more in jobs:
            config, changes = configure(tmp_path, books, name, "divergence.action=rollback")
            codes = rank_pool(2).run(train_with_faults, config, changes, {8: "spike", **more})
            assert codes == [code if more else EXIT_DONE] * 2
    assert difference(end_of(tmp_path / "straight"), end_of(tmp_path / "interrupted")) is None


def train_past_a_damaged_checkpoint(world: World, config: Path, changes: list[str], damaged: Path) -> int | str:
    """A job that diverges in its last step, and finds this checkpoint damaged when it rolls back."""

    def choose(*arguments: Any) -> ResumeChoice | None:
        if world.rank == 0:
            flip(damaged / "engine.json", 100)
        return choose_checkpoint(*arguments)

    with mock.patch.object(resume, "choose_checkpoint", choose):
        return train_with_faults(world, config, changes, {11: "loss"})


def test_a_rollback_past_a_damaged_checkpoint_saves_its_step_again(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config, changes = configure(tmp_path, books, "run", "divergence.action=rollback")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000010"
    assert rank_pool(2).run(train_past_a_damaged_checkpoint, config, changes, damaged) == [EXIT_DONE] * 2
    kept = ["latest", "step-00000005", "step-00000010", "step-00000010.broken", "step-00000012"]
    assert names(tmp_path / "run") == kept
    assert verify(damaged)["step"] == 10


def train_while_a_checkpoint_cannot_be_read_at_the_start(
    world: World, config: Path, changes: list[str], damaged: Path
) -> int | str:
    """A job that begins from the checkpoint before, and rolls back when this one can be read again."""

    def choose(*arguments: Any) -> ResumeChoice | None:
        if world.rank == 0:
            flip(damaged / "engine.json", 100)
        choice = choose_checkpoint(*arguments)
        if world.rank == 0:  # after all ranks have read it
            flip(damaged / "engine.json", 100)
        return choice

    with mock.patch.object(resume_source, "choose_checkpoint", choose):
        return train_with_faults(world, config, changes, {7: "loss"})


def test_a_rollback_never_goes_forward(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    config, changes = configure(tmp_path, books, "run", "divergence.action=rollback")
    assert rank_pool(2).run(train_with_faults, config, changes, {11: KILLED}) == [KILLED] * 2
    ahead = tmp_path / "run" / "checkpoints" / "step-00000010"
    codes = rank_pool(2).run(train_while_a_checkpoint_cannot_be_read_at_the_start, config, changes, ahead)
    assert codes == [EXIT_DONE] * 2
    assert metrics(tmp_path / "run", "divergence/rollbacks") == [(5, 1)]
    assert f"{ahead.name}.broken" in names(tmp_path / "run")


def train_and_listen(world: World, *arguments: Any) -> tuple[int | str, str]:
    """`train_with_faults`, and what this rank has to say; of all ranks, users see rank 0's."""
    heard: list[str] = []
    with mock.patch.object(Tracker, "message", lambda _, text: heard.append(text)):
        return train_with_faults(world, *arguments), "\n".join(text for text in heard if "saved" not in text)


def test_run_stops_when_it_has_diverged_too_often_or_cannot_roll_back(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config, changes = configure(tmp_path, books, "often", "divergence.action=rollback", "divergence.max_times=1")
    often = rank_pool(2).run(train_and_listen, config, changes, {7: "loss", 9: "memory"})
    config, changes = configure(tmp_path, books, "early", "divergence.action=rollback")
    early = rank_pool(2).run(train_and_listen, config, changes, {3: "loss"})
    assert not (tmp_path / "early" / "checkpoints" / "step-00000005").exists()
    for (code, text), (other_code, other_text) in (often, early):
        assert code == other_code == EXIT_DIVERGED
        assert text == other_text
        assert ": not finite: the loss of rank [1]; loss nan; rolling back (1 of at most " in text
    assert "; the segments of steps 6 to 8 are read, and not trained on" in often[0][1]
    said_line(early[0][1], "(1 of at most 3 times)", "no checkpoint")
    said_line(often[0][1], "the memory of rank [1]", "divergence.max_times = 1")


def test_a_run_from_a_checkpoint_of_another_counts_its_own_divergences(
    tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    """It ended at its first one; and `batch` had its first point begin at step 1, or with the branch, at step 6."""
    config, changes = configure(tmp_path, books, "other", "divergence.action=skip", "divergence.max_times=1")
    changes.append("tracking.every=3")
    assert rank_pool(2).run(train_with_faults, config, changes, {3: "loss"}) == [EXIT_DONE] * 2
    begin = tmp_path / "other" / "checkpoints" / "step-00000005"
    branch = [f"resume={begin}", f"run_dir={tmp_path / 'branch'}", "train.steps=11"]
    assert rank_pool(2).run(train_with_faults, config, [*changes, *branch], {8: "loss"}) == [EXIT_DONE] * 2
    assert end_of(tmp_path / "other")[1]["skip"] == 1
    assert metrics(tmp_path / "branch", "divergence/skipped")[-1][1] == 1.0
    assert [(point.first, point.last) for point in read_recorded(tmp_path / "branch")] == [(4, 6), (7, 9), (10, 11)]


def test_mlflow_is_reported_of_every_decision_and_of_superseded_steps(
    tmp_path: Path, books: Path, rank_pool: Pools, sqlite_uri: str, client: Any
) -> None:
    tracked = ["tracking.mlflow=true", f"tracking.uri={sqlite_uri}", "tracking.system_metrics=false"]
    config, changes = configure(
        tmp_path, books, "reported", "divergence.action=rollback", "divergence.max_times=1", *tracked
    )
    assert rank_pool(2).run(train_with_faults, config, changes, {7: "loss", 10: "memory"}) == [EXIT_DIVERGED] * 2
    run_id = (tmp_path / "reported" / "mlflow_run_id").read_text().strip()
    tags = client.get_run(run_id).data.tags
    assert "the loss of rank [1]; loss nan; rolling back (1 of at most 1 times)" in tags["dist_mem.divergence.step_8"]
    assert "the memory of rank [1]" in tags["dist_mem.divergence.step_11"]
    assert "divergence.max_times = 1 is used up" in tags["dist_mem.divergence.step_11"]
    (branch,) = find_entries(tmp_path / "reported" / METRICS_FILE, "branch")
    first, again = [
        entry.time for entry in find_entries(tmp_path / "reported" / METRICS_FILE, "point") if entry.body["step"] == 7
    ]
    assert first < branch.body["before"] <= again
    assert history(client, run_id, "divergence/rollbacks") == [(5, 1.0)]
    assert sorted(step for step, _ in history(client, run_id, "loss")) == list(range(1, 11)), "each step once"
