"""The Python API: a model out of a run, a text scored with memory, the memories of lanes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import build_books, train_here, write_config
from ranks import RankPool
from safetensors.torch import load_file

import dist_mem
from dist_mem.checkpoint.manifest import CheckpointError, step_dir
from dist_mem.data.shard import read_index
from dist_mem.evaluation.trained import TrainedModel

ROOT = Path(__file__).parent.parent
LANES = 8  # of the training, see jobs.write_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, rank_pool: Callable[[int], RankPool]) -> Path:
    """A run of two ranks in bf16, saved at steps 5 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "run.yaml", build_books(folder), folder / "run", {"train": {"steps": 8}})
    rank_pool(2).run(train_here, config, ["train.precision=bf16"])
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> TrainedModel:
    return dist_mem.load_model(run_dir)


@pytest.fixture
def text(run_dir: Path) -> str:
    return (run_dir.parent / "texts" / "test" / "0.txt").read_text(encoding="utf-8")


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, dist_mem; print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    assert not hasattr(dist_mem, "load_modle")


def test_a_text_scores_as_its_document_does_in_an_evaluation(trained: TrainedModel, text: str) -> None:
    from scored_library import ALONE

    from dist_mem.evaluation.evaluate import evaluate_checkpoint

    scores = dist_mem.score(trained, text)
    report = evaluate_checkpoint(trained.checkpoint, trained.config, split="test", world=ALONE)
    index = read_index(Path(trained.config.data.path) / "test")
    number = [entry.id for entry in index.documents].index("0")
    assert trained.tokenizer.decode(scores.tokens) == text
    assert len(scores.nll) == len(scores.tokens) == report.documents[number].num_scored
    assert float(scores.nll.double().sum()) == pytest.approx(report.documents[number].nll, rel=1e-6)
    assert dist_mem.score(trained, "").nll.shape == (0,)


def test_memory_is_carried_from_segment_to_segment(trained: TrainedModel, text: str) -> None:
    seg_len = trained.config.train.seg_len
    whole = dist_mem.score(trained, text)
    begin = dist_mem.score(trained, text[:seg_len])  # a byte is a token here
    assert torch.equal(begin.nll, whole.nll[:seg_len])
    assert begin.state.blocks[0].length.tolist() == [seg_len]
    with_memory, without = (dist_mem.score(trained, text, state=state).nll for state in (begin.state, None))
    assert not torch.allclose(with_memory, without)
    assert torch.equal(without, whole.nll)


def test_lanes_are_those_of_the_checkpoint(trained: TrainedModel, run_dir: Path, text: str) -> None:
    saved = [load_file(step_dir(run_dir, 8) / "lanes" / f"rank-{rank:05d}.safetensors") for rank in range(2)]
    hidden = {
        int(lane): part["blocks.1.hidden"][row] for part in saved for row, lane in enumerate(part["lane_ids"].tolist())
    }
    lanes = dist_mem.read_lanes(trained, [5, 2])
    assert torch.equal(lanes.blocks[1].hidden, torch.stack([hidden[5], hidden[2]]).float())
    one = dist_mem.read_lanes(trained, [5])
    assert len(dist_mem.score(trained, text, state=one).nll) == len(text)
    assert dist_mem.init_state(trained, [5, 2]).blocks[1].hidden.shape == lanes.blocks[1].hidden.shape
    with pytest.raises(CheckpointError, match=r"lanes \[8\] are not in this checkpoint"):
        dist_mem.read_lanes(trained, [LANES])


def test_step_precision_and_settings_can_be_chosen(run_dir: Path, text: str) -> None:
    early = dist_mem.load_model(run_dir, "eval.precision=bf16", "eval.seg_len=8", step=5)
    assert early.checkpoint.manifest["step"] == 5
    assert next(early.model.parameters()).dtype == early.dtype == torch.bfloat16
    assert dist_mem.score(early, text[:8]).state.blocks[0].length.tolist() == [8]
    with pytest.raises(ValueError, match=r"model\.d_model: is fixed by the checkpoint"):
        dist_mem.load_model(run_dir, "model.d_model=8")
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        dist_mem.load_model(run_dir, step=6)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_of_the_pages_runs(
    run_dir: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("demo", "mine"):
        (tmp_path / "runs" / name).symlink_to(run_dir)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
    assert len(names["nll"].shape) <= 1 and torch.isfinite(names["nll"]).all()
