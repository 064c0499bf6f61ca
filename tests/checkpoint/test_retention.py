"""Which checkpoints stay: what the rules promise, over any history of saves, damage and set-backs."""

import errno
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_mem.checkpoint import retention
from dist_mem.checkpoint.manifest import list_steps, step_dir, verify
from dist_mem.checkpoint.retention import Validation, prune
from dist_mem.config import CheckpointConfig, ConfigError, load_config
from dist_mem.errors import CheckpointError
from dist_mem.evaluation import trained_model
from tests.support.messages import refused, said
from tests.support.saving import commit_small, names, newest_verified

COUNTS = st.none() | st.integers(1, 4)
RULES = st.builds(CheckpointConfig, keep_last=st.integers(1, 4), keep_every=COUNTS, keep_best=COUNTS)
LOSSES = st.sampled_from([1.0, 2.0, 3.0, math.inf, math.nan])


class Save(NamedTuple):
    gap: int  # steps since the one before
    loss: float | None  # of an evaluation made at this step
    measure: str  # of that evaluation
    damaged: bool  # afterwards, before the next one


SAVES = st.builds(Save, st.integers(1, 5), st.none() | LOSSES, st.sampled_from("ab"), st.booleans())
HISTORIES = st.lists(SAVES, min_size=1, max_size=12)


@pytest.fixture(scope="module")
def no_fsync() -> Iterator[None]:
    """Names are what matters here, and not what a power failure leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.mark.usefixtures("no_fsync")
@settings(deadline=None)
@given(history=HISTORIES, rules=RULES)
def test_the_rules_hold_over_any_history(
    tmp_path_factory: pytest.TempPathFactory, history: list[Save], rules: CheckpointConfig
) -> None:
    """After every save exactly the checkpoints that the rules keep exist; a damaged one neither counts nor goes."""
    run_dir = tmp_path_factory.mktemp("run")
    step, validation = 0, None
    good: dict[int, Validation | None] = {}
    damaged: set[int] = set()
    for save in history:
        step += save.gap
        validation = Validation(step, save.loss, save.measure) if save.loss is not None else validation
        directory = commit_small(run_dir, step, None if validation is None else validation._asdict())
        good[step] = validation
        messages = prune(run_dir, step, rules)

        left = set(list_steps(run_dir))
        deleted = good.keys() - left
        assert sorted(messages) == sorted(
            f"deleted {step_dir(run_dir, old)}, which checkpoint.keep_* do not keep" for old in deleted
        )
        wanted = set(sorted(good)[-(rules.keep_last or 0) :])
        wanted |= {old for old in good if rules.keep_every and old % rules.keep_every == 0}
        made = {found for found in good.values() if found is not None and not math.isnan(found.loss)}
        for measure in "ab":  # losses of two measures are never compared
            alike = [found for found in made if found.measure == measure]
            best = sorted(alike, key=lambda found: (found.loss, found.step))[: rules.keep_best or 0]
            wanted |= {min(old for old, found in good.items() if found == one) for one in best}
        assert left == wanted | damaged
        assert newest_verified(run_dir)[0] == directory
        good = {old: good[old] for old in wanted}
        if save.damaged:
            (directory / "manifest.json").write_text("{}")
            damaged.add(step)
            del good[step]
    assert not [path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]


def test_checkpoints_past_the_newest_do_not_count_and_stay(tmp_path: Path) -> None:
    """A run that was set back: what lies ahead is broken or of another branch, and must not push out what is good."""
    for step in (5, 10, 15):
        commit_small(tmp_path, step)
    step_dir(tmp_path, 15).rename(step_dir(tmp_path, 15).with_name("step-00000015.broken"))
    commit_small(tmp_path, 20)
    commit_small(tmp_path, 7)
    messages = prune(tmp_path, 7, CheckpointConfig(keep_last=1))
    assert messages == [f"deleted {step_dir(tmp_path, 5)}, which checkpoint.keep_* do not keep"]
    assert list_steps(tmp_path) == [7, 10, 20]
    assert step_dir(tmp_path, 15).with_name("step-00000015.broken").is_dir()


def test_a_folder_that_cannot_be_listed_after_the_commit_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is committed: an error would end the job on all ranks as if it were not."""
    commit_small(tmp_path, 5)

    def fail(run_dir: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(retention, "list_steps", fail)
    (message,) = prune(tmp_path, 5, CheckpointConfig(keep_last=1))
    said(message, tmp_path / "checkpoints", "Stale file handle")


def test_rules_that_would_do_nothing_are_refused() -> None:
    with refused(ConfigError, "checkpoint.keep_every", "checkpoint.keep_last", "checkpoint.keep_best", "eval.every"):
        load_config(["train.steps=1", "checkpoint.keep_every=2", "checkpoint.keep_best=1", "memory.kind=none"])


def test_a_checkpoint_is_gone_for_readers_before_any_file_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the deletion is cut off in the middle; the next save removes what is left, and so does a start."""
    for step in (5, 10):
        commit_small(tmp_path, step)

    def cut_off(directory: Path) -> None:
        assert list_steps(tmp_path) == [10]
        assert directory.name.startswith(".")
        assert directory.name.endswith(".partial")
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", cut_off)
        messages = prune(tmp_path, 10, CheckpointConfig(keep_last=1))
    assert messages == [f"cannot delete {step_dir(tmp_path, 5)}: [Errno 5] Input/output error"]
    assert list_steps(tmp_path) == [10]
    (message,) = prune(tmp_path, 10, CheckpointConfig(keep_last=1))
    said(message, "deleted", "step-00000005")
    assert names(tmp_path) == ["step-00000010"], "the next save tries again"


def test_a_checkpoint_that_the_running_job_deletes_while_it_is_read_gives_way_to_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoint.keep_last=1; the message was that no checkpoint verifies, and to start over."""
    commit_small(tmp_path, 5)

    def read_slowly(directory: Path) -> dict[str, Any]:
        if directory.name.endswith("5"):
            commit_small(tmp_path, 10)
            shutil.rmtree(directory)
        return verify(directory)

    monkeypatch.setattr(trained_model, "verify", read_slowly)
    found = trained_model.find_checkpoint(tmp_path)
    assert found.directory == step_dir(tmp_path, 10) and found.remarks == []
    (step_dir(tmp_path, 10) / "content").unlink()
    with refused(CheckpointError, "no checkpoint verifies", "content: missing"):
        trained_model.find_checkpoint(tmp_path)
