"""A GPT-2 with memory, opened by Hugging Face's transformers: the same figures, and `generate()` carries the memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.checkpoint.manifest import describe_file, read_manifest, write_manifest
from dist_mem.data.tokenizers.byte_pairs import train_byte_pairs
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_scores import score
from tests.support.gpt2_models import LTM, SIZES
from tests.support.jobs import difference, write_config
from tests.support.messages import refused

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
SEG_LEN = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One untrained model with large weights and sticky memories, as dist_mem and as transformers export it."""
    root = tmp_path_factory.mktemp("export")
    (root / "book.txt").write_text(TEXT, encoding="utf-8")
    documents = [SourceDocument(id="1", title="t", source=root / "book.txt")]
    tokenizer = train_byte_pairs([TEXT], vocab_size=280)
    build_dataset({"train": documents}, root / "data", name="x", tokenizer=tokenizer)
    config = OmegaConf.load(write_config(root / "run.yaml", root / "data", root / "run"))
    config.model = {"kind": "gpt2", **SIZES, "init_std": 0.3}
    config.memory = {**LTM, "sampling": "sticky"}
    OmegaConf.save(config, root / "run.yaml")
    assert export(root / "run.yaml", out=root / "ours") == 0
    assert export(root / "run.yaml", out=root / "theirs", layout="transformers") == 0
    return root / "ours", root / "theirs"


@pytest.fixture
def opened(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    return transformers.AutoModelForCausalLM.from_pretrained(folders[1], trust_remote_code=True)


def ids_of(folder: Path, text: str) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(f"<|endoftext|>{text}", return_tensors="pt").input_ids


def test_losses_are_ours(folders: tuple[Path, Path], opened: Any) -> None:
    """Over many segments, in one call and in calls of any length."""
    trained = load_model(folders[0])
    expected = score(trained, TEXT).nll
    ids = ids_of(folders[1], TEXT)
    assert ids.shape[1] == len(expected) + 1 > 5 * SEG_LEN
    cache, parts = None, []
    with torch.no_grad():
        whole = opened(ids).logits
        for part in ids.split([1, 30, 7, 50, ids.shape[1] - 88], dim=1):
            output = opened(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
    for logits in (whole, torch.cat(parts, dim=1)):
        found = -logits[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_generate_carries_the_memory(folders: tuple[Path, Path], opened: Any) -> None:
    """Figures of every drawn token are those of a text read anew, and depend on what is far behind."""
    ids = ids_of(folders[1], TEXT)
    torch.manual_seed(0)
    options = {"do_sample": True, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    drawn = opened.generate(ids.repeat(2, 1), max_new_tokens=3 * SEG_LEN, **options)
    texts = drawn.sequences
    assert not torch.equal(texts[0], texts[1])
    with torch.no_grad():
        again = opened(texts).logits
        near = opened(texts[:, -SEG_LEN:]).logits[:, -1]
    torch.testing.assert_close(torch.stack(drawn.logits, dim=1), again[:, ids.shape[1] - 1 : -1], rtol=0, atol=1e-5)
    assert (near - again[:, -1]).abs().max() > 1e-3


def test_both_folders_have_the_same_weights(folders: tuple[Path, Path]) -> None:
    """Hugging Face's names and layout are exact in both directions."""
    ours, theirs = (dict(load_model(folder).model.state_dict()) for folder in folders)
    assert difference(ours, theirs) is None


@pytest.mark.parametrize("below", [False, True])
def test_a_program_that_a_folder_names_as_its_memory_is_not_run(
    folders: tuple[Path, Path], tmp_path: Path, below: bool
) -> None:
    from dist_mem.generation.transformers_model import MemoryGPT2

    folder = Path(shutil.copytree(folders[1], tmp_path / "model"))
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
