"""LoRA on pretrained projections: it begins as the model, keeps its weights, and peft reads what it learned."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.config import LoraConfig, load_config
from dist_mem.errors import UnusableError
from dist_mem.evaluation.export import Registration
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import load_model
from dist_mem.hf.names import take_published, to_published
from dist_mem.model import MemoryLM
from dist_mem.nn.low_rank import low_ranks
from tests.support import gpt2_models, llama_models
from tests.support.jobs import checkpoint_content, difference, train_here, write_config
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.ranks import Pools

pytest.importorskip("transformers", reason="transformers is not installed")
PRESET = ROOT / "configs" / "pretrained" / "lora.yaml"
LORA = LoraConfig(rank=3, alpha=12.0)
SEG_LEN, BYTES = llama_models.SEG_LEN, 257
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPT-2": (gpt2_models.gpt2_config, {"num_positions": 64}),
    "Llama": (llama_models.llama_config, {}),
    "Qwen2": (llama_models.llama_config, {"qkv_bias": True}),
}
MEMORIES: dict[str, dict[str, Any]] = {
    "causal": {"kind": "causal"},
    "rows": {"kind": "transformer_xl", "mem_len": SEG_LEN},  # which are projected with weights that they do not train
    "armt": {"kind": "armt", "over": {"kind": "causal"}},
}


def pair(name: str, memory: dict[str, Any]) -> tuple[MemoryLM, MemoryLM]:
    """Return a model with random weights, and the same with LoRA."""
    make, keys = MODELS[name]
    plain, added = (
        gpt2_models.build(make(memory, model={**keys, "lora": lora}, train={"seg_len": SEG_LEN}))
        for lora in (None, LORA)
    )
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    take_published(added, to_published(plain), "weights")
    return plain, added


def move(model: MemoryLM) -> None:
    """Give LoRA something that it has learned."""
    with torch.no_grad():
        for number, part in enumerate(low_ranks(model).values()):
            part.up.normal_(std=0.1, generator=torch.Generator().manual_seed(number))


def log_probs(model: MemoryLM) -> Tensor:
    tokens = torch.randint(0, gpt2_models.VOCAB, (2, 3 * SEG_LEN), generator=torch.Generator().manual_seed(3))
    return gpt2_models.log_probs(model, tokens.split(SEG_LEN, 1))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in MODELS for kind in MEMORIES if (name, kind) != ("GPT-2", "rows")]
)
def test_a_model_begins_as_itself_and_what_it_learned_can_be_in_its_weights(name: str, kind: str) -> None:
    plain, added = pair(name, MEMORIES[kind])
    assert len(low_ranks(added)) == 5 * len(added.blocks)
    begins = log_probs(added)
    assert torch.equal(begins, log_probs(plain))
    begins.square().sum().backward()
    assert all(part.up.grad is not None and part.up.grad.any() for part in low_ranks(added).values())
    move(added)
    learned = log_probs(added)
    take_published(plain, to_published(added), "merged")
    assert (learned - begins).abs().max() > 1e-2
    torch.testing.assert_close(learned, log_probs(plain), rtol=0, atol=2e-5)


def write(path: Path, books: Path, run_dir: Path, base: Path, name: str, stage: int) -> Path:
    """A run of four steps with the preset over a folder's model."""
    sizes = {**gpt2_models.SIZES, "kind": "gpt2"} if name == "GPT-2" else {**llama_models.SIZES, "kind": "llama"}
    changes: dict[str, Any] = {
        "model": {**sizes, "pretrained": str(base), "lora": {"rank": 4, "dropout": 0.1}},
        "memory": {"kind": "armt", "over": {"kind": "causal"}, "num_tokens": 4},
        "train": {"steps": 4, "segments_per_update": 2, "bptt_segments": 2},
        "schedule": {"kind": "constant"},
        "optimizer": {"groups": OmegaConf.load(PRESET).optimizer.groups},
        "deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
    }
    config = OmegaConf.merge(OmegaConf.load(write_config(path, books, run_dir)), changes)
    config.memory = changes["memory"]
    OmegaConf.save(config, path)
    return path


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("name", "stage"), [("GPT-2", 3), ("Llama", 2)])
def test_a_run_trains_lora_and_memory_alone_and_peft_opens_what_it_learned(
    name: str, stage: int, tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    """Two ranks, stopped after two of four steps."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    base = tmp_path / "base"
    save = gpt2_models.save_random_gpt2 if name == "GPT-2" else llama_models.save_random_llama
    save(base, vocab_size=BYTES, std=0.05)
    runs = [tmp_path / run for run in ("straight", "stopped")]
    configs = [write(tmp_path / f"{run.name}.yaml", books, run, base, name, stage) for run in runs]
    assert rank_pool(2).run(train_here, configs[0]) == [0, 0]
    for steps in (2, 4):
        assert rank_pool(2).run(train_here, configs[1], [f"train.steps={steps}"]) == [0, 0]
    ends = [checkpoint_content(run / "checkpoints" / "step-00000004") for run in runs]
    assert difference(*ends) is None
    opened = load_model(runs[0])
    before, after = load_file(base / "model.safetensors"), dict(opened.model.named_parameters())
    untouched = gpt2_models.build(opened.config, BYTES)
    new = set(take_published(untouched, before, "file"))
    for key, parameter in untouched.named_parameters():
        assert torch.equal(parameter, after[key]) == (key not in new), key
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert export(runs[0], out=adapter, layout="peft") == 0
    assert export(runs[0], out=merged, layout="transformers") == 0
    tokens = torch.randint(0, BYTES - 1, (2, 12))
    published = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        without = published(tokens).logits
        theirs = peft.PeftModel.from_pretrained(published, adapter).eval()(tokens).logits
        ours = transformers.AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (theirs - without).abs().max() > 1e-4
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    reopened = load_model(merged)
    assert reopened.config.model.lora is None
    state = gpt2_models.fresh(opened.model, 2)
    full = torch.full((2,), 12)
    assert opened.config.train.seg_len > 12  # before anything is written
    found, again = (each.model.log_probs(tokens, full, state=state)[0] for each in (opened, reopened))
    torch.testing.assert_close(found, again, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, ours.log_softmax(-1), rtol=0, atol=1e-5)


def test_what_lora_cannot_be_is_refused_and_what_is_said_works(tmp_path: Path, books: Path) -> None:
    config = str(write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"memory": {"kind": "causal"}}))

    def check(*changes: str, named: tuple[str, ...], fixes: Sequence[Sequence[str]]) -> None:
        with refused(ValueError, *named):
            load_config([config, *changes])
        for fix in fixes:
            load_config([config, *changes, *fix])

    llama = ("model.kind=llama", "model.tie_embeddings=false")
    check(str(PRESET), named=("model.lora", "model.kind"), fixes=[llama])
    load_config([config])  # without model.lora and its groups
    check(*llama, "model.lora={rank: 4}", named=("model.lora", "trainable"), fixes=[[str(PRESET)]])
    neither = ("model.lora.attention=false", "model.lora.feed_forward=false")
    fixes = [["model.lora.attention=true"], ["model.lora.feed_forward=true"], ["model.lora=null"]]
    check(str(PRESET), *llama, *neither, named=("model.lora", "attention"), fixes=fixes)
    with refused(ValueError, "model.lora", "memory.over"):
        gpt2_models.build(gpt2_models.gpt2_config({"kind": "linear"}, model={"lora": LORA}))
    gpt2_models.build(gpt2_models.gpt2_config({"kind": "linear"}, model={"lora": None}))
    over = {"kind": "linear", "over": {"kind": "causal"}}
    gpt2_models.build(gpt2_models.gpt2_config(over, model={"lora": LORA}))
    plain = write_config(tmp_path / "plain.yaml", books, tmp_path / "plain")
    with refused(UnusableError, "--format peft", "model.lora"):
        export(plain, out=tmp_path / "out", layout="peft")
    with refused(UnusableError, "--mlflow", "--format peft"):
        export(plain, out=tmp_path / "out", layout="peft", registration=Registration("demo", "champion"))
    assert export(plain, out=tmp_path / "out") == 0
