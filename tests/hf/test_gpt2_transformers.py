"""Exports, opened by Hugging Face's transformers: the same figures, and `generate()` carries the memory."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.checkpoint.manifest import describe_file, read_manifest, write_manifest
from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_scores import score
from tests.support import llama_models
from tests.support.gpt2_models import LTM, SIZES
from tests.support.jobs import difference, write_config
from tests.support.messages import refused
from tests.support.remote_code import open_hub

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.usefixtures("own_modules")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
SEG_LEN = 16
LLAMA = {**llama_models.SIZES, "kind": "llama"}
WITHOUT = {"memory": {"kind": "causal"}, "train": {"seg_len": 60}}
CACHE = {"kind": "transformer_xl", "mem_len": SEG_LEN}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_positions": 16}
MODELS: dict[str, dict[str, Any]] = {  # by the class that transformers makes of them
    "MemoryGPT2": {"model": {"kind": "gpt2", **SIZES}, "memory": {**LTM, "sampling": "sticky"}},
    "MemoryQwen2": {"model": {**LLAMA, "qkv_bias": True}, "memory": {**llama_models.LTM, "over": CACHE}},
    "GPT2LMHeadModel": {"model": {"kind": "gpt2", **SIZES, "num_positions": 64}, **WITHOUT},
    "MemoryMistral": {"model": {**LLAMA, "sliding_window": SEG_LEN}, "memory": CACHE},
    "LlamaForCausalLM": {"model": {**LLAMA, "rope": LLAMA3}, **WITHOUT},
    "Qwen3ForCausalLM": {"model": {**LLAMA, "qk_norm": True, "d_head": 8}, **WITHOUT},
}
Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Returns an untrained model with large weights, as dist_mem and as transformers export it, made once."""
    root = tmp_path_factory.mktemp("export")
    (root / "book.txt").write_text(TEXT, encoding="utf-8")
    documents = [SourceDocument(id="1", title="t", source=root / "book.txt")]
    tokenizer = train_byte_pairs([TEXT], vocab_size=280)
    build_dataset({"train": documents}, root / "data", name="x", tokenizer=tokenizer)

    @cache
    def made(name: str) -> tuple[Path, Path]:
        folder = root / name
        config = OmegaConf.load(write_config(root / "run.yaml", root / "data", root / "run"))
        config.train = OmegaConf.merge(config.train, MODELS[name].get("train", {}))
        config.model, config.memory = {**MODELS[name]["model"], "init_std": 0.3}, MODELS[name]["memory"]
        OmegaConf.save(config, root / "run.yaml")
        assert export(root / "run.yaml", out=folder / "ours") == 0
        assert export(root / "run.yaml", out=folder / "theirs", layout="transformers") == 0
        return folder / "ours", folder / "theirs"

    return made


def ids_of(folder: Path, text: str) -> Tensor:
    """Ids of a document: GPT-2's own tokenizer adds no token in front of it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    start = "<|endoftext|>" if type(tokenizer).__name__.startswith("GPT2") else ""
    return tokenizer(start + text, return_tensors="pt").input_ids


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_ours(folders_of: Folders, name: str) -> None:
    """Over many segments, in one call and in calls of any length. Names and layout are exact in both directions."""
    ours, theirs = folders_of(name)
    has_memory = name.startswith("Memory")
    text = TEXT if has_memory else TEXT[:50]
    trained, opened, ids = load_model(ours), open_hub(theirs), ids_of(theirs, text)
    assert type(opened).__name__ == name
    own = [key for key in load_file(theirs / "model.safetensors") if key.startswith("memory.")]
    assert bool(own) == ("infinite" in str(MODELS[name]["memory"]))
    assert difference(dict(trained.model.state_dict()), dict(load_model(theirs).model.state_dict())) is None
    expected = score(trained, text).nll
    assert ids.shape[1] == len(expected) + 1 and (ids.shape[1] > 5 * SEG_LEN) == has_memory
    cache, parts = None, []
    with torch.no_grad():
        whole = opened(ids).logits
        for part in ids.tensor_split([1, 8, 18, 60, 85] if has_memory else [1, 8], dim=1):
            output = opened(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
    for logits in (whole, torch.cat(parts, dim=1)):
        found = -logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("below", [False, True])
def test_a_program_that_a_folder_names_as_its_memory_is_not_run(
    folders_of: Folders, tmp_path: Path, below: bool
) -> None:
    from dist_mem.generation.transformers_model import MemoryGPT2

    folder = Path(shutil.copytree(folders_of("MemoryGPT2")[1], tmp_path / "model"))
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\n", encoding="utf-8")
    settings = OmegaConf.load(folder / "config.yaml")
    program = {"kind": f"{folder / 'mine.py'}:Mine"}
    settings.memory = {**LTM, "over": program} if below else program
    OmegaConf.save(settings, folder / "config.yaml")
    manifest = read_manifest(folder)
    manifest["files"]["config.yaml"] = describe_file(folder / "config.yaml")
    write_manifest(folder, manifest)
    with refused(ValueError, "mine.py"):
        MemoryGPT2.from_pretrained(folder)
    assert not (tmp_path / "marker").exists()
