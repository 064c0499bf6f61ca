"""All ranks go on from the same checkpoint: the one that `resume` means, or the newest that is whole on every rank."""

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.checkpoint import lane_states, manifest, resume_choice
from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.checkpoint.rank_file import RankFile
from dist_mem.runtime import files
from dist_mem.runtime.distributed import World
from tests.support.faults import flip
from tests.support.jobs import checkpoint_content, difference, logged_steps, losses, train_here, write_config
from tests.support.messages import said, said_line
from tests.support.ranks import Pools
from tests.support.restoring import open_two, opened, refusal, step_and_messages
from tests.support.saving import rewrite_manifest

STEPS = 9  # saved every 3
SAVED = ("step-00000003", "step-00000006", "step-00000009")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Path:
    """A run of two ranks with checkpoints of steps 3, 6 and 9; copied by those who change it."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {"train": {"steps": STEPS}, "schedule": {"kind": "constant"}, "checkpoint": {"every": 3}}
    config = write_config(folder / "run.yaml", books, folder / "run", changes)
    assert rank_pool(2).run(train_here, config) == [0, 0]
    return folder


@pytest.fixture
def copied(tmp_path: Path, trained: Path) -> Path:
    """The configuration of a copy of that run, in `tmp_path / run`."""
    shutil.copytree(trained / "run", tmp_path / "run")
    text = (trained / "run.yaml").read_text().replace(str(trained), str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path / "run.yaml"


# What `resume` means.


def test_by_default_the_newest_is_taken_and_never_takes_none(copied: Path, tmp_path: Path, rank_pool: Pools) -> None:
    step, text = open_two(rank_pool, copied)
    assert step == STEPS
    assert f"resuming from {step_dir(copied.with_suffix(''), STEPS)}" in text
    assert "warning" not in text
    assert "moved" not in text
    assert open_two(rank_pool, copied, "resume=never", f"run_dir={tmp_path / 'fresh'}")[0] == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["resume=never"], SAVED),
        (["resume=4"], ["step-00000004", *SAVED]),
        (["resume=6"], ["config.yaml: SHA-256 differs"]),
        (["resume=elsewhere"], ["elsewhere", *SAVED]),
        (["resume=EMPTY", "run_dir=nowhere"], ["no manifest.json"]),
        (["memory.mem_len=16", "train.global_batch_size=4"], ["ConfigError", "memory.mem_len", "train.global_batch"]),
    ],
)
def test_what_a_run_cannot_go_on_from_is_refused_whatever_is_allowed(
    copied: Path, rank_pool: Pools, changes: list[str], named: Sequence[str]
) -> None:
    """The checkpoint of step 6 is damaged."""
    run_dir = copied.with_suffix("")
    flip(step_dir(run_dir, 6) / "config.yaml", 3)
    (empty := copied.parent / "empty").mkdir()
    given = [change.replace("EMPTY", str(empty)) for change in changes]
    said(refusal(rank_pool, copied, *given, allow=("train", "model")), *named)
    assert list_steps(run_dir) == [3, 6, 9]


def test_earlier_step_is_taken_and_what_came_after_it_is_set_aside(copied: Path, rank_pool: Pools) -> None:
    """Else the next start would jump from the new history to the end of the old one."""
    run_dir = copied.with_suffix("")
    before = checkpoint_content(step_dir(run_dir, STEPS))
    assert rank_pool(2).run(train_here, copied, ("resume=3", "train.steps=7")) == [0, 0]
    assert list_steps(run_dir) == [3, 6, 7]
    assert difference(before, checkpoint_content(run_dir / "checkpoints" / "step-00000009.superseded")) is None
    assert logged_steps(run_dir)[-4:] == [4, 5, 6, 7]
    # The very same command again, as a scheduler gives it: on from step 7, not again from 3.
    step, _ = open_two(rank_pool, copied, "resume=3", "train.steps=7")
    assert step == 7
    assert open_two(rank_pool, copied, "train.steps=7")[0] == 7
    # Another request is another matter.
    assert open_two(rank_pool, copied, "resume=6")[0] == 6
    assert list_steps(run_dir) == [3, 6]


def test_a_damaged_checkpoint_is_kept_whatever_keep_last_says(copied: Path, rank_pool: Pools) -> None:
    run_dir = copied.with_suffix("")
    flip(step_dir(run_dir, STEPS) / "ranks" / "rank-00000.safetensors", -1)
    changes = ("checkpoint.every=5", "checkpoint.keep_last=1", "train.steps=11")  # the damaged step is not saved again
    assert rank_pool(2).run(train_here, copied, changes) == [0, 0]
    assert list_steps(run_dir) == [11]
    assert (run_dir / "checkpoints" / f"step-{STEPS:08d}.broken").is_dir()


def test_the_same_command_goes_on_when_the_step_it_asks_for_is_no_longer_kept(copied: Path, rank_pool: Pools) -> None:
    """Issue 5: `resume: STEP` and `checkpoint.keep_last`, and the scheduler starts the job again."""
    changes = ("resume=3", "train.steps=7", "checkpoint.keep_last=1")
    assert rank_pool(2).run(train_here, copied, changes) == [0, 0]
    assert list_steps(copied.with_suffix("")) == [7]
    assert open_two(rank_pool, copied, *changes)[0] == 7
    assert "there is no " in refusal(rank_pool, copied, "resume=4"), "nobody has asked for that before"


@pytest.mark.parametrize("form", ["run", "checkpoint"])
def test_run_goes_on_from_another_runs_checkpoint(trained: Path, tmp_path: Path, rank_pool: Pools, form: str) -> None:
    """In a run directory of its own; the other is left as it is, and the next start stays here."""
    other, steps = trained / "run", 11
    path = other if form == "run" else step_dir(other, 6)
    changes = (f"resume={path}", f"run_dir={tmp_path / 'branch'}", f"train.steps={steps}")
    begun = STEPS if form == "run" else 6
    step, text = open_two(rank_pool, trained / "run.yaml", *changes)
    assert step == begun
    assert "a checkpoint of another run" in text
    assert rank_pool(2).run(train_here, trained / "run.yaml", changes) == [0, 0]
    assert list_steps(other) == [3, 6, 9]
    assert list_steps(tmp_path / "branch")[-1] == steps
    assert open_two(rank_pool, trained / "run.yaml", *changes)[0] == steps
    text = refusal(rank_pool, trained / "run.yaml", f"resume={step_dir(other, 3)}", *changes[1:])
    assert "of its own: give the run that resumes from there another run_dir" in text


# Agreement.


def unreadable(*arguments: Any, **_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error", str(arguments[0]))


def unreadable_lanes(path: Path, part: str) -> RankFile:
    with manifest.reading(path):
        raise OSError(errno.EIO, "Input/output error", str(path))


def of_the_newest(instead: Callable[[Path], str]) -> Callable[[Path], str]:
    """The checksum of a file; something else where it is of the newest checkpoint."""
    return lambda path: instead(path) if f"step-{STEPS:08d}" in path.parts else files.sha256_of(path)


def unthought_of(*_: Any) -> None:
    raise ZeroDivisionError("nobody has thought of this")


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "EIO": (manifest, "sha256_of", of_the_newest(unreadable)),
    "other bytes": (manifest, "sha256_of", of_the_newest(lambda path: "0" * 64)),
    "failing disk": (manifest, "sha256_of", unreadable),
    "lanes": (lane_states, "RankFile", unreadable_lanes),  # which were verified a moment ago
    "engine": (EngineReader, "read", unreadable),
    "any error": (resume_choice, "verify_file", unthought_of),
}


def opened_with_fault(world: World, config_file: Path, rank: int, fault: str) -> Any:
    """Open the job while one rank alone cannot read, or reads something else."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == rank:
            patch.setattr(*FAULTS[fault])
        return opened(world, config_file, (), (), step_and_messages)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fault", "phrase"), [("EIO", "Input/output error"), ("other bytes", "SHA-256 differs")])
def test_damage_that_one_rank_alone_sees_is_passed_over_by_all(
    copied: Path, rank_pool: Pools, rank: int, fault: str, phrase: str
) -> None:
    (first, text), (second, _) = rank_pool(2).run(opened_with_fault, copied, rank, fault)
    assert first == second == 6
    said_line(text, "passed over: ", phrase, f"(seen by rank {rank} of 2)")
    assert step_dir(copied.with_suffix(""), STEPS).is_dir(), "it is kept for inspection"


@pytest.mark.parametrize(
    ("fault", "error", "named", "times"),
    [
        ("any error", "CheckpointError", "ZeroDivisionError: nobody has thought of this (seen by rank 1 of 2)", 3),
        ("lanes", "UnfitError", "Input/output error", 1),  # another start may succeed
        ("failing disk", "UnreadableError", "no checkpoint verifies:", 1),
    ],
)
def test_what_one_rank_cannot_read_stops_all_ranks_with_one_kind_of_error(
    copied: Path, rank_pool: Pools, fault: str, error: str, named: str, times: int
) -> None:
    """A disk that reads no checkpoint does not end a chain of jobs."""
    for reported in rank_pool(2).run(opened_with_fault, copied, 1, fault):
        said(reported, f"{error}, ")
        assert reported.count(named) == times


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_that_one_rank_cannot_read_stop_all_ranks(copied: Path, rank_pool: Pools, stage: int) -> None:
    """No rank waits in the exchange of weights for one that has none."""
    text = copied.read_text().replace("stage: 2", f"stage: {stage}")
    copied.write_text(text)
    for reported in rank_pool(2).run(opened_with_fault, copied, 1, "engine"):
        assert isinstance(reported, str) and "Input/output error" in reported


# Rules.


def test_what_needs_to_be_allowed_is_refused_until_it_is(copied: Path, rank_pool: Pools) -> None:
    text = refusal(rank_pool, copied, "model.dropout=0.5", "optimizer.betas=[0.5,0.9]")
    assert "model.dropout: is 0.5, but the run began with 0.2; set it back, add --allow model.dropout" in text
    assert "--allow optimizer.betas" in text
    changes = ("model.dropout=0.5", "optimizer.betas=[0.5,0.9]")
    step, text = open_two(rank_pool, copied, *changes, allow=("model.dropout", "optimizer"))
    assert step == STEPS
    changed = "model.dropout 0.2 -> 0.5, optimizer.betas[0] 0.9 -> 0.5, optimizer.betas[1] 0.999 -> 0.9"
    assert f"changed since then: {changed}" in text.splitlines(), "and nothing of places, which may hold a password"


def test_an_option_that_a_memory_has_got_since_is_no_change(copied: Path, tmp_path: Path, rank_pool: Pools) -> None:
    """Issue 5: newer code reads older files. Left out, an option has its default, as it had then."""
    text = copied.read_text().replace("kind: transformer_xl", "kind: infinite").replace("mem_len: 24", "num_basis: 4")
    copied.write_text(text.replace(f"{tmp_path}/run", f"{tmp_path}/old"))
    assert rank_pool(2).run(train_here, copied, ("train.steps=1",)) == [0, 0]
    directory = step_dir(tmp_path / "old", 1)
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("  density: affine\n", ""))
    rewrite_manifest(directory)
    assert open_two(rank_pool, copied)[0] == 1
    said(refusal(rank_pool, copied, "memory.density=softmax_moments"), "memory.density", "affine")


def test_precision_may_change_where_it_is_allowed(copied: Path, tmp_path: Path, rank_pool: Pools) -> None:
    """The optimizer works on fp32 weights whatever the model's are; memories are rounded once."""
    assert "add --allow train.precision" in refusal(rank_pool, copied, "train.precision=bf16")
    for precision, steps in (("bf16", 11), ("fp32", 13)):
        changes = (f"train.precision={precision}", f"train.steps={steps}")
        assert rank_pool(2).run(train_here, copied, changes, ("train.precision",)) == [0, 0]
    assert rank_pool(2).run(train_here, copied, ("train.steps=13", f"run_dir={tmp_path / 'straight'}")) == [0, 0]
    straight, changed = (torch.tensor(losses(tmp_path / name)) for name in ("straight", "run"))
    assert torch.equal(straight[:STEPS], changed[:STEPS])
    assert not torch.equal(straight, changed)
    torch.testing.assert_close(changed, straight, rtol=0.02, atol=0)


def test_other_code_is_reported(copied: Path, rank_pool: Pools) -> None:
    directory = step_dir(copied.with_suffix(""), STEPS)
    rewrite_manifest(
        directory, versions={**manifest.read_manifest(directory)["versions"], "torch": "1.0"}, commit="abc"
    )
    _, text = open_two(rank_pool, copied)
    assert "warning: step-00000009 was written by other code: torch 1.0 -> " in text
    assert ", commit abc -> " in text


def test_mlflow_is_reported_where_a_run_came_from_and_gets_a_new_one(
    copied: Path, tmp_path: Path, sqlite_uri: str, client: Any, rank_pool: Pools
) -> None:
    tracked = ("tracking.mlflow=true", f"tracking.uri={sqlite_uri}", "tracking.system_metrics=false")
    assert rank_pool(2).run(train_here, copied, (*tracked, "train.steps=10")) == [0, 0]
    asked = step_dir(copied.with_suffix(""), 10)
    branch = tmp_path / "branch"
    changes = (*tracked, f"resume={asked}", f"run_dir={branch}", "train.steps=11")
    assert rank_pool(2).run(train_here, copied, changes) == [0, 0]
    first, second = ((folder / "mlflow_run_id").read_text().strip() for folder in (copied.with_suffix(""), branch))
    assert first != second
    assert client.get_run(second).data.tags["dist_mem.resumed_from"] == str(asked)
    assert "dist_mem.resumed_from" not in client.get_run(first).data.tags
