"""Llamas with memories: the contract, FLOPs, initial weights, folders, exports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dist_mem.config import ConfigError, load_config
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_scores import score
from dist_mem.hf.folder import load_pretrained
from dist_mem.memory import memory_options
from tests.estimate.test_flops import check_small
from tests.support.contract_cases import check_rules
from tests.support.gpt2_models import build
from tests.support.jobs import write_config
from tests.support.llama_models import (
    CACHE,
    CASES,
    LTM,
    SEG_LEN,
    SIZES,
    VOCAB,
    llama_config,
    llama_subject,
    save_random_llama,
)
from tests.support.messages import refused

TEXT = "It was the best of times, it was the worst of times."


@pytest.mark.parametrize("case", CASES)
def test_memories_keep_the_contract_with_rotary_positions(case: str) -> None:
    check_rules(llama_subject(case))


@pytest.mark.parametrize("case", CASES)
def test_the_count_equals_torchs_of_real_steps(case: str) -> None:
    check_small(llama_subject(case))


def test_residual_weights_begin_smaller_and_norms_as_the_identity() -> None:
    model = build(llama_config(CACHE, model={"d_model": 96, "d_inner": 384}))
    block = model.blocks[0]
    small = (block.memory.attention.output.weight, block.feed_forward.contract.weight)
    assert [round(weight.std().item() * 6**0.5, 3) for weight in small] == [0.02, 0.02]
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name)
    assert not any("bias" in name for name, _ in model.named_parameters())


def test_memories_with_positions_of_their_own_are_refused() -> None:
    for memory, key in (
        ({"kind": "lamemo"}, "memory.kind"),
        ({"kind": "memorizing"}, "memory.kind"),
        ({"kind": "infinite", "over": {"kind": "lamemo"}}, "memory.over.kind"),
        ({"kind": "compressive", "positions": "alibi"}, "memory.positions"),
        ({"kind": "transformer_xl", "positions": "relative"}, "memory.positions"),
    ):
        with refused(ValueError, key):
            build(llama_config(memory, train={"seg_len": 64}))


def test_configuration_errors_name_the_key() -> None:
    for override in ("model.norm=post", "model.num_kv_heads=3", "model.d_head=5", "train.seg_len=2048"):
        with refused(ConfigError, override.partition("=")[0]):
            load_config(["train.steps=1", "model.kind=llama", override], memory_options=memory_options)
    with refused(ConfigError, "model.rope_theta", "model.kind"):
        load_config(["train.steps=1", "model.rope_theta=5e5"], memory_options=memory_options)


def test_folders_of_another_computation_or_without_a_shard_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    save_random_llama(tmp_path, shard="10KB")
    config = llama_config(model={"pretrained": str(tmp_path)})
    published = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    theta, model = published["rope_parameters"], build(config)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "mistral"}, "model_type"),
        ({"rope_parameters": {**theta, "rope_type": "llama3", "factor": 8.0}}, "rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {**theta, "rope_theta": 5e5}}, "model.rope_theta=500000.0"),
        ({"rope_parameters": None, "rope_theta": 5e5}, "model.rope_theta=500000.0"),
        ({"rms_norm_eps": 1e-5, "num_key_value_heads": 4}, "model.num_kv_heads=4 model.norm_eps=1e-05"),
        ({"tie_word_embeddings": True}, "model.tie_embeddings"),
        ({"model_type": "qwen2"}, "model.qkv_bias=true"),
    ]
    for change, named in changes:
        (tmp_path / "config.json").write_text(json.dumps({**published, **change}), encoding="utf-8")
        with refused(UnusableError, named):
            load_pretrained(model, config, VOCAB)
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    with refused(UnusableError, shard.name):
        load_pretrained(model, config, VOCAB)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    documents = [SourceDocument(id="1", title="t", source=tmp_path / "book.txt")]
    build_dataset({"train": documents}, tmp_path / "data", name="x", tokenizer=BytesTokenizer())
    return write_config(tmp_path / "run.yaml", tmp_path / "data", tmp_path / "run")


@pytest.mark.parametrize(
    ("memory", "qkv_bias", "name"),
    [
        ({"kind": "causal"}, False, "LlamaForCausalLM"),
        pytest.param({**LTM, "over": {**CACHE, "mem_len": SEG_LEN}}, True, "MemoryQwen2"),
    ],
)
def test_exports_open_in_transformers_with_the_same_figures(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], qkv_bias: bool, name: str
) -> None:
    """Also the memory's, over several segments; and dist_mem reads the folder again."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = OmegaConf.load(run_file)
    config.model = {"kind": "llama", **SIZES, "init_std": 0.3, "qkv_bias": qkv_bias}
    config.memory, config.train.seg_len = memory, SEG_LEN if memory["kind"] == "infinite" else 60
    OmegaConf.save(config, run_file)
    assert export(run_file, out=tmp_path / "ours") == 0
    assert export(run_file, out=tmp_path / "hf", layout="transformers") == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert type(opened).__name__ == name
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        found = -opened(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[0, :, 0]
    torch.testing.assert_close(found, score(load_model(tmp_path / "ours"), TEXT).nll, rtol=0, atol=1e-5)
    folders = [load_model(tmp_path / part).model.state_dict() for part in ("ours", "hf")]
    assert all(torch.equal(tensor, folders[1][key]) for key, tensor in folders[0].items())
    own = [key for key in load_file(tmp_path / "hf" / "model.safetensors") if key.startswith("memory.")]
    assert bool(own) == (memory["kind"] == "infinite")
