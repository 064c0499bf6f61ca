"""A pretrained GPT-2 in training, at all ZeRO stages (so is a Llama): resumed without its folder, exported, read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dist_mem.config import change_config
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_scores import score
from dist_mem.hf.names import take_published
from dist_mem.runtime.distributed import World
from tests.support import llama_models
from tests.support.gpt2_models import LTM, SIZES, build, save_random_gpt2
from tests.support.jobs import checkpoint_content, difference, losses, train_here, write_config
from tests.support.ranks import Pools
from tests.support.tiny import run_steps, tiny_config, tiny_job

pytest.importorskip("transformers", reason="transformers is not installed")
BYTES = 257  # tokens of the tokenizer that `build_books` takes
LTM_ONLY: dict[str, Any] = {"pretrained": False, "lr": 1e-2}  # docs/howto/gpt2.md
MODEL = {"kind": "gpt2", **SIZES}
STICKY = {**LTM, "sampling": "sticky"}
MEMORY = {**STICKY, "num_samples": 32}  # of runs in segments of 16
CASES: dict[str, dict[str, Any]] = {
    "causal": {"kind": "causal"},
    "linear": LTM,
    "sticky": STICKY,
    "alibi": {"kind": "compressive", "mem_len": 8, "cmem_len": 8, "compression_rate": 2, "positions": "alibi"},
    "llama": {**STICKY, "over": {"kind": "transformer_xl", "mem_len": 8}},
}
LLAMA = {**llama_models.SIZES, "kind": "llama", "qk_norm": True, "sliding_window": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    save_random_gpt2(path, vocab_size=BYTES, std=0.05)
    return path


def five_losses(world: World, stage: int, case: str) -> list[float]:
    optimizer = {"kind": "adamw", "lr": 2e-3, "groups": [{"param_regex": "memory", "lr": 5e-3}]}
    model = LLAMA if case == "llama" else {**MODEL, "d_inner": 96}
    config = tiny_config({"model": model, "optimizer": optimizer, "train": {"micro_batch_size": 2}})
    config = change_config(config, {"memory": CASES[case]})
    return [
        outcome.totals.nll / outcome.totals.num_scored
        for outcome in run_steps(tiny_job(config, world, stage=stage), first=0, last=5)
    ]


NIGHTLY = {"causal", "linear"}  # the others go through the same attention and the same memory


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] if case in NIGHTLY else []) for case in CASES]
)
def test_losses_agree_across_zero_stages_and_ranks(rank_pool: Pools, case: str) -> None:
    (alone,) = rank_pool(1).run(five_losses, 0, case)
    assert len(set(alone)) == 5
    for stage in range(4):
        for found in rank_pool(2).run(five_losses, stage, case):
            assert found == pytest.approx(alone, abs=1e-5)


def write(path: Path, books: Path, run_dir: Path, pretrained: Path, **blocks: Any) -> Path:
    """A run of twelve steps that begins with the folder's weights."""
    base: dict[str, Any] = {
        "model": {**MODEL, "pretrained": str(pretrained)},
        "memory": MEMORY,
        "optimizer": {"groups": [LTM_ONLY]},
        "schedule": {"kind": "constant"},
    }
    config = OmegaConf.merge(OmegaConf.load(write_config(path, books, run_dir)), base, blocks)
    config.memory = blocks.get("memory", MEMORY)
    OmegaConf.save(config, path)
    return path


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 1, 2)] + [3])
def test_resumes_in_the_same_bits_without_the_folder(
    tmp_path: Path, books: Path, folder: Path, rank_pool: Pools, stage: int
) -> None:
    """Two ranks, dropout on, stopped after five of ten steps; the pretrained weights are gone by then."""
    zero = {"deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}}
    copy = tmp_path / "gpt2"
    shutil.copytree(folder, copy)
    for name in ("straight", "stopped"):
        write(tmp_path / f"{name}.yaml", books, tmp_path / name, copy, **zero)
    assert rank_pool(2).run(train_here, tmp_path / "straight.yaml", ["train.steps=10"]) == [0, 0]
    assert rank_pool(2).run(train_here, tmp_path / "stopped.yaml", ["train.steps=5"]) == [0, 0]
    shutil.rmtree(copy)
    assert rank_pool(2).run(train_here, tmp_path / "stopped.yaml", ["train.steps=10"]) == [0, 0]
    runs = [tmp_path / name for name in ("straight", "stopped")]
    ends = [checkpoint_content(run_dir / "checkpoints" / "step-00000010") for run_dir in runs]
    assert difference(*ends) is None
    assert losses(runs[0]) == losses(runs[1])
    with pytest.raises(AssertionError, match=r"config\.json"):  # a fresh run needs it
        rank_pool(2).run(train_here, tmp_path / "straight.yaml", [f"run_dir={tmp_path / 'new'}"])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_training_only_the_memory_leaves_gpt2_as_it_was(
    tmp_path: Path, books: Path, folder: Path, rank_pool: Pools, stage: int
) -> None:
    """Bit for bit, from the file of the pretrained weights to the export of the run, weight decay on."""
    groups = [LTM_ONLY, {"pretrained": True, "trainable": False}]
    zero = {"deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}}
    optimizer = {"optimizer": {"groups": groups}}
    write(tmp_path / "run.yaml", books, tmp_path / "run", folder, **optimizer, **zero)
    assert rank_pool(2).run(train_here, tmp_path / "run.yaml", ["train.steps=4"]) == [0, 0]
    assert export(tmp_path / "run", out=tmp_path / "hf", layout="transformers") == 0
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    own = {name for name in after if name.startswith("memory.")}
    assert len(own) == 6 * SIZES["num_layers"]
    assert after.keys() - own == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    untrained = build(load_model(tmp_path / "run").config, BYTES).state_dict()
    moved = [name for name in own if not torch.equal(after[name], untrained[name.removeprefix("memory.")])]
    assert set(moved) == own


def test_an_export_for_transformers_begins_another_run(
    tmp_path: Path, books: Path, folder: Path, rank_pool: Pools
) -> None:
    memory = {"memory": {"kind": "causal"}, "optimizer": {"groups": []}}
    write(tmp_path / "first.yaml", books, tmp_path / "first", folder, **memory)
    assert rank_pool(1).run(train_here, tmp_path / "first.yaml", ["train.steps=3"]) == [0]
    hf = tmp_path / "hf"
    assert export(tmp_path / "first", out=hf, layout="transformers") == 0
    trained = load_model(tmp_path / "first")
    write(tmp_path / "second.yaml", books, tmp_path / "second", hf, **memory)
    assert rank_pool(1).run(train_here, tmp_path / "second.yaml", ["train.steps=1", "optimizer.lr=1e-12"]) == [0]
    second = load_model(tmp_path / "second").model
    torch.testing.assert_close(second.state_dict(), trained.model.state_dict(), rtol=0, atol=1e-9)


def test_a_configuration_is_exported_as_it_would_begin(tmp_path: Path, books: Path, folder: Path) -> None:
    """Zero-shot: scored without a step of training, with the folder's weights, or with none."""
    config = write(tmp_path / "run.yaml", books, tmp_path / "run", folder, memory={"kind": "causal"})
    assert export(config, out=tmp_path / "zero", overrides=["optimizer.groups=[]"]) == 0
    assert not (tmp_path / "run").exists()
    opened = load_model(tmp_path / "zero")
    expected = build(opened.config, BYTES)
    assert take_published(expected, load_file(folder / "model.safetensors"), "file") == []
    assert difference(dict(opened.model.state_dict()), dict(expected.state_dict())) is None
    assert opened.config.model.pretrained is None, "a place of this machine"
    assert score(opened, "It was the best of times.").nll.isfinite().all()
