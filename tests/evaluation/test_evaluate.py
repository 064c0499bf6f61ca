"""The evaluate command: which checkpoint, which settings, where the report goes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import step_dir
from dist_mem.data.shard import Index, read_index
from dist_mem.errors import EXIT_DONE
from dist_mem.evaluation import evaluate, job
from dist_mem.evaluation.scores import read_report
from dist_mem.evaluation.scoring import score_split
from dist_mem.tracking import progress
from tests.support.saving import FACTS
from tests.support.scored_library import (
    ALONE,
    MEM_LEN,
    TOKENIZER,
    assert_same,
    make_config,
    make_model,
    save_weights,
    score,
    write_other,
)


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    config = make_config(data={"path": str(library)}, model={"init_std": 0.3}, tracking={"mlflow": True})
    for step in (3, 12):
        save_weights(tmp_path / "run", make_model(), config, step=step)
    return tmp_path / "run"


@pytest.mark.usefixtures("single_process")
def test_the_command_scores_the_newest_checkpoint_and_tells_everyone(
    run_dir: Path, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported: dict[str, Any] = {}
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: reported.update(given))
    assert evaluate.run(run_dir, split="test", overrides=["eval.batch_size=3"]) == 0
    report = read_report(run_dir / "evaluations" / "test-step-00000012.json")
    assert_same(report, score(index, make_model()))
    assert reported["step"] == 12
    assert reported["metrics"] == report.metrics()
    assert "9 documents" in capsys.readouterr().out


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("options", [[], ["eval.layout=stream"], ["--sweep", "mem_len=4,8"]])
def test_progress_is_shown_and_never_in_the_table(
    run_dir: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert main(["evaluate", str(run_dir), "--split", "test", "tracking.mlflow=false", *options]) == EXIT_DONE
    output = capsys.readouterr()
    assert "scoring test: 260 of 260 tokens  " in output.err
    assert "scoring" not in output.out
    assert ("row 2 of 2: run, eval.mem_len=8" in output.err) == ("--sweep" in options)


@pytest.mark.usefixtures("single_process")
def test_one_checkpoint_can_be_named_by_step_or_by_path(run_dir: Path) -> None:
    quiet = ["tracking.mlflow=false", "eval.max_document_len=20"]
    assert evaluate.run(run_dir, split="test", checkpoint=3, overrides=quiet) == 0
    assert evaluate.run(step_dir(run_dir, 12), split="test", overrides=quiet) == 0
    assert sorted(path.name for path in (run_dir / "evaluations").glob("*.csv")) == [
        "test-step-00000003-first20.csv",
        "test-step-00000012-first20.csv",
    ]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("command", [[], ["--sweep", "mem_len=4,8"]], ids=["figures", "sweep"])
def test_other_data_leave_files_and_figures_of_the_own_alone(
    run_dir: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do a quick look, another precision, another protocol: the own report, and its metrics in MLflow."""
    reported: list[dict[str, float]] = []
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: reported.append(given["metrics"]))
    paths = [write_other(tmp_path / str(number) / "books", number) for number in range(2)]
    others = {tag: [f"data.path={path}"] for path, tag in paths}
    if not command:
        others |= {"-first20": ["eval.max_document_len=20"], "-bf16": ["eval.precision=bf16"]}
        others |= {"-M24-stream3": ["eval.mem_len=24", "eval.layout=stream", "eval.batch_size=3"]}
    assert main(["evaluate", str(run_dir), "--split", "test", *command]) == 0
    files = {path: path.read_bytes() for path in (run_dir / "evaluations").iterdir()}
    for overrides in others.values():
        assert main(["evaluate", str(run_dir), "--split", "test", *overrides, *command]) == 0
    assert all(path.read_bytes() == content for path, content in files.items())
    added = {path.stem for path in (run_dir / "evaluations").iterdir()} - {path.stem for path in files}
    head = "sweep-test-mem_len" if command else "test-step-00000012"
    assert added == {f"{head}{tag}" for tag in others}
    heads = [{figure.partition("/")[0] for figure in figures} for figures in reported]
    assert heads == ([] if command else [{"test"}, *({f"test{tag}"} for tag in others)])


@pytest.mark.usefixtures("single_process")
def test_the_own_data_may_move(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(shutil.copytree(library, tmp_path / "moved"))
    shutil.copytree(moved / "test", moved / "train")
    monkeypatch.setitem(FACTS, "data_fingerprint", f"first-stage {read_index(moved / 'train').fingerprint}")
    run_dir = tmp_path / "run"
    save_weights(run_dir, make_model(), make_config(data={"path": "data/before"}), step=12)
    assert evaluate.run(run_dir, split="test", overrides=[f"data.path={moved}"]) == 0
    assert [path.stem for path in (run_dir / "evaluations").glob("*.csv")] == ["test-step-00000012"]


@pytest.mark.usefixtures("single_process")
def test_a_run_that_keeps_its_best_checkpoints_can_be_evaluated(library: Path, tmp_path: Path) -> None:
    """Which of them is best asks for evaluations amid training, which an evaluation does not have."""
    keeping = {"checkpoint": {"keep_last": 2, "keep_best": 1}, "eval": {"every": 3}}
    save_weights(tmp_path / "run", make_model(), make_config(data={"path": str(library)}, **keeping), step=3)
    assert evaluate.run(tmp_path / "run", split="test") == 0


def test_a_split_is_scored_as_the_configuration_says(library: Path) -> None:
    model = make_model()
    config = make_config(data={"path": str(library)}, eval={"batch_size": 3, "seg_len": 4, "max_document_len": 30})
    seen: list[Sequence[int]] = []

    def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(tokens.shape))
        return model(tokens, *args, **kwargs)

    report = score_split(
        forward,
        lambda lane_ids: model.init_state(lane_ids, "cpu", torch.float32),
        config=config,
        index=read_index(library / "test"),
        tokenizer=TOKENIZER,
        world=ALONE,
    )
    assert set(seen) == {(2, 4), (1, 4)}  # of three lanes, two in a forward, as long as they read
    assert (report.seg_len, report.mem_len, report.max_document_len) == (4, MEM_LEN, 30)
