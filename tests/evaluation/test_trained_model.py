"""A model out of a run, a text scored with memory, the memories of lanes; the Python of the pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import dist_mem
from dist_mem.checkpoint.manifest import describe_file, files_in, read_manifest, step_dir, write_manifest
from dist_mem.checkpoint.rank_file import RankFile, rank_file
from dist_mem.errors import CheckpointError
from dist_mem.evaluation.trained_model import TrainedModel, init_state, load_model, read_lanes
from dist_mem.generation.reading import start_from
from dist_mem.generation.text_scores import score
from tests.support.jobs import build_books, train_here, write_config
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

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
    return load_model(run_dir)


@pytest.fixture
def text(run_dir: Path) -> str:
    return (run_dir.parent / "texts" / "test" / "0.txt").read_text(encoding="utf-8")


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, dist_mem; print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    assert not hasattr(dist_mem, "load_modle")


def test_lanes_are_those_of_the_checkpoint(trained: TrainedModel, run_dir: Path, text: str) -> None:
    saved = [RankFile(step_dir(run_dir, 8) / rank_file(rank), "lanes").read() for rank in range(2)]
    hidden = {
        int(lane): part["blocks.1.hidden"][row] for part in saved for row, lane in enumerate(part["lane_ids"].tolist())
    }
    lanes = read_lanes(trained, [5, 2])
    assert torch.equal(lanes.blocks[1].hidden, torch.stack([hidden[5], hidden[2]]).float())
    one = start_from(trained, read_lanes(trained, [5]), [trained.tokenizer.bos_id])
    assert len(score(trained, text, after=one).nll) == len(text)
    assert init_state(trained, [5, 2]).blocks[1].hidden.shape == lanes.blocks[1].hidden.shape
    with refused(CheckpointError):
        read_lanes(trained, [LANES])


def test_step_precision_and_settings_can_be_chosen(run_dir: Path, text: str) -> None:
    early = load_model(run_dir, "eval.precision=bf16", "eval.seg_len=8", step=5)
    assert early.checkpoint.manifest["step"] == 5
    assert next(early.model.parameters()).dtype == early.dtype == torch.bfloat16
    assert score(early, text[:8]).reading.state.blocks[0].length.tolist() == [8]
    with refused(ValueError, "model.d_model"):
        load_model(run_dir, "model.d_model=8")
    with refused(CheckpointError):
        load_model(run_dir, step=6)


def test_a_wrong_path_or_override_is_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    wrong: list[Any] = [(tmp_path / "nope",), (tmp_path,), (3,), (run_dir, 400)]
    for arguments in wrong:
        with refused(TypeError if isinstance(arguments[-1], int) else CheckpointError, arguments[-1]):
            load_model(*arguments)


def test_a_checkpoint_is_loaded_where_its_data_is_not(
    run_dir: Path, trained: TrainedModel, text: str, tmp_path: Path
) -> None:
    """Issue 15: the tokenizer was asked of the data directory, which had to be built. A damaged one is refused."""
    copied = Path(shutil.copytree(step_dir(run_dir, 8), tmp_path / "taken"))
    settings = OmegaConf.load(copied / "config.yaml")
    settings.data.path = str(tmp_path / "nothing")
    OmegaConf.save(settings, copied / "config.yaml")
    manifest = {key: value for key, value in read_manifest(copied).items() if key != "sha256"}
    files = {path.relative_to(copied).as_posix(): describe_file(path) for path in files_in(copied)}
    write_manifest(copied, {**manifest, "files": files})
    again = load_model(copied)
    assert again.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert torch.equal(score(again, text).nll, score(trained, text).nll)
    (copied / "tokenizer" / "tokenizer.json").write_text("{}")
    with refused(CheckpointError, "tokenizer.json"):
        load_model(copied)


@pytest.mark.parametrize("page", ["README.md", "docs/start/python.md"])
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
        if "dist_mem.train(" in snippet:
            continue  # trains on what the demo has built: test_documented_commands.py
        exec(snippet, names)
    assert len(names["nll"].shape) <= 1 and torch.isfinite(names["nll"]).all()
