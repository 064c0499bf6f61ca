"""Faults of `dist-mem evaluate`: checkpoint, data, and the place of the report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import step_dir
from dist_mem.data.tokenizers.registry import train_sentencepiece
from tests.support.faults import assert_says, flip, small_disk
from tests.support.jobs import train_here, write_config
from tests.support.messages import said_line
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Callable[[int], RankPool]) -> Path:
    """A run with two checkpoints, at steps 5 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "run.yaml", books, folder / "run", {"train": {"steps": 6}})
    assert rank_pool(2).run(train_here, config) == [0, 0]
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path, single_process: None) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def no_checkpoint(run_dir: Path) -> list[str]:
    shutil.rmtree(run_dir / "checkpoints")
    return []


def all_damaged(run_dir: Path) -> list[str]:
    for step in (5, 6):
        flip(step_dir(run_dir, step) / "ranks" / "rank-00000.safetensors", 9)
    return []


def other_tokenizer(run_dir: Path) -> list[str]:
    train_sentencepiece(["a b c d e f g h i j k l m n o"], run_dir.parent / "other", vocab_size=290)
    return [f"data.path={run_dir.parent / 'other'}"]


UNUSABLE = {
    "no run": (lambda run_dir: shutil.rmtree(run_dir) or [], "no checkpoint; give a run directory or one checkpoint"),
    "no checkpoint": (no_checkpoint, "checkpoints: no checkpoint; give a run directory or one checkpoint in it"),
    "all damaged": (all_damaged, "no checkpoint verifies:"),
    "other step": (lambda run_dir: ["--checkpoint", "7"], "step-00000007: there is no such checkpoint; "),
    "other tokenizer": (other_tokenizer, "point data.path at data built with that tokenizer"),
    "no data": (lambda run_dir: ["data.path=nowhere"], "nowhere/tokenizer.json is missing"),
    "no split": (
        lambda run_dir: ["--split", "tset"],
        "has no split 'tset': it has test, train, validation; did you mean test?",
    ),
    "fixed key": (lambda run_dir: ["model.d_model=8"], "model.d_model: is fixed by the checkpoint"),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_what_cannot_be_evaluated_is_an_error_of_its_own(
    run_dir: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    spoil, message = UNUSABLE[fault]
    assert main(["evaluate", str(run_dir), *spoil(run_dir)]) == 2
    error = capfd.readouterr().err
    assert_says(error, message)
    assert error.count("error: ") == 1
    if fault == "other step":
        assert error.endswith(f"{run_dir} has steps 5, 6\n")
    assert not (run_dir / "evaluations").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_with_the_reason(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flip(step_dir(run_dir, 6) / "ranks" / "rank-00001.safetensors", 200)
    assert main(["evaluate", str(run_dir)]) == 0
    reported = capfd.readouterr()
    said_line(0, reported.err, "passed over: ", "rank-00001.safetensors", "SHA-256")
    assert str(step_dir(run_dir, 5)) in reported.out


def test_a_report_that_cannot_be_written_is_shown_all_the_same(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "evaluations").write_text("a file in the way")
    assert main(["evaluate", str(run_dir)]) == 2
    reported = capfd.readouterr()
    said_line(2, reported.err, "error: ", "[Errno 17]", f"'{run_dir / 'evaluations'}'")
    assert "4 documents" in reported.out
    (run_dir / "evaluations").unlink()
    with small_disk(run_dir / "evaluations", "size=4k"):
        assert main(["evaluate", str(run_dir)]) == 1
        assert_says(capfd.readouterr().err, "[Errno 28] No space left on device: '")
        assert not list((run_dir / "evaluations").glob("*.partial"))
