"""A memory that is added to a pretrained model: it begins as the model, and learns. Every preset, found by its file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from dist_mem.config import Config, LoraConfig, OptimizerConfig, load_config
from dist_mem.config.memory_blocks import memories_of
from dist_mem.engine.optimizer import parameter_groups
from dist_mem.hf.names import take_published, to_published
from dist_mem.memory import memory_options
from dist_mem.memory.base import Stem
from dist_mem.model import MemoryLM
from tests.support import gpt2_models, llama_models
from tests.support.gpt2_models import log_probs
from tests.support.llama_models import SEG_LEN
from tests.support.messages import refused
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
ADDED = CONFIGS / "pretrained" / "memory"
BASE = CONFIGS / "pretrained" / "llama_3.2_1b.yaml"
LORA = CONFIGS / "pretrained" / "lora.yaml"
PRESETS = {path.stem: [path] for path in sorted(ADDED.glob("*.yaml"))}
LINEAR = {  # every other linear memory, beside attention as Gated DeltaNet is
    path.stem: [ADDED / "gated_deltanet.yaml", path]
    for path in sorted((CONFIGS / "memory").glob("*.yaml"))
    if yaml.safe_load(path.read_text(encoding="utf-8"))["memory"]["kind"] == "linear" and path.stem not in PRESETS
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": {},
    "Qwen3 with a window": {"qk_norm": True, "sliding_window": SEG_LEN // 2},
}


def config_of(name: str, *more: Path) -> Config:
    """Return the configuration of a Llama with a preset, and with more files after it."""
    files = [str(path) for path in (BASE, *(PRESETS | LINEAR)[name], *more)]
    return load_config(files, memory_options=memory_options)


def memory_of(name: str, model: str) -> dict[str, Any]:
    """Return the memory of a preset, also for all blocks if it is for one; in a GPT-2, as the presets say."""
    found = memories_of(config_of(name).memory).values()
    (loaded,) = (dict(memory) for memory in found if memory["kind"] not in ("none", "causal"))
    if model == "GPT-2" and "over" in loaded:
        loaded["over"] = {"kind": "causal"}
    return loaded


def build(model: str, memory: dict[str, Any], *, seg_len: int = SEG_LEN, lora: LoraConfig | None = None) -> MemoryLM:
    make = gpt2_models.gpt2_config if model == "GPT-2" else llama_models.llama_config
    keys = {**MODELS[model], "num_positions": 64, "lora": lora}
    return gpt2_models.build(make(memory, model=keys, train={"seg_len": seg_len}))


def pretrained(model: str, *, seg_len: int = SEG_LEN) -> MemoryLM:
    """Return a model without memory, with random weights, norms and biases."""
    plain, drawn = build(model, {"kind": "causal"}, seg_len=seg_len), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=drawn))
    return plain


def some_segments(num: int) -> list[Tensor]:
    tokens = torch.randint(0, gpt2_models.VOCAB, (2, num * SEG_LEN), generator=torch.Generator().manual_seed(3))
    return list(tokens.split(SEG_LEN, dim=1))


def is_accepted(name: str, model: str) -> bool:
    """Transformer-XL's rows have no place in a GPT-2, whose positions are those of a segment."""
    return (name, model) != ("transformer_xl", "GPT-2")


PAIRS = [
    pytest.param(name, model, marks=[pytest.mark.nightly] if name in LINEAR and model != "Llama" else [])
    for name in PRESETS | LINEAR
    for model in MODELS
    if is_accepted(name, model)
]


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_a_pretrained_model_begins_as_it_is_without_the_memory(name: str, model: str) -> None:
    """Bit for bit; with rows of tokens, as it is over the longer text.

    Further rows in a product, also those of ARMT, may change the order of sums.
    """
    memory, segments = memory_of(name, model), some_segments(3)
    plain, added = pretrained(model), build(model, memory)
    take_published(added, to_published(plain), "weights")
    found = log_probs(added, segments)
    if memory["kind"] == "rmt_rows":  # its tokens have other places, and see the memory rows: another model
        assert (found - log_probs(plain, segments)).abs().max() > 1e-2
        return
    if memory["kind"] == "transformer_xl":
        plain, segments = pretrained(model, seg_len=3 * SEG_LEN), [torch.cat(segments, dim=1)]
    if memory["kind"] == "transformer_xl" or type(added.stem) is not Stem:
        torch.testing.assert_close(found, log_probs(plain, segments), rtol=0, atol=1e-5)
    else:
        assert torch.equal(found, log_probs(plain, segments))


@pytest.mark.parametrize(
    ("kind", "model"),
    [("transformer_xl", "Llama"), ("transformer_xl", "Qwen3 with a window"), ("compressive", "Llama")],
)
def test_rows_are_the_model_while_empty_and_the_model_over_the_longer_text_while_they_hold_it(
    kind: str, model: str
) -> None:
    """Their positions are the model's own, rotary.

    Attention over more rows, though masked, may sum in another order: whether bits are equal depends on the processor.
    """
    rows = {"kind": kind, "mem_len": 2 * SEG_LEN}
    memory = rows if kind == "transformer_xl" else {**rows, "cmem_len": SEG_LEN, "compression_rate": 2}
    plain, added, segments = pretrained(model), build(model, memory), some_segments(3)
    take_published(added, to_published(plain), "weights")
    found = log_probs(added, segments)
    torch.testing.assert_close(found[:, :SEG_LEN], log_probs(plain, segments[:1]), rtol=0, atol=1e-5)
    whole = log_probs(pretrained(model, seg_len=3 * SEG_LEN), [torch.cat(segments, dim=1)])
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_every_block_of_it_learns_at_the_first_step(name: str, model: str) -> None:
    """Once the memory holds something, a gradient reaches what holds its output back; a step along it shows."""
    memory, segments = memory_of(name, model), some_segments(4)
    added = build(model, memory)
    new = take_published(added, to_published(pretrained(model)), "weights")
    if memory["kind"] == "transformer_xl":
        assert new == []
        return
    before = log_probs(added, segments)
    state, total = gpt2_models.fresh(added, 2), torch.zeros(())
    for tokens in segments:
        output = added(tokens, tokens.roll(-1, dims=1), torch.full((2,), SEG_LEN), state=state)
        state, total = output.state, total + output.nll.mean()
    total.backward()
    parameters = dict(added.named_parameters())
    for number in range(len(added.blocks)):
        place = "stem." if memory["kind"] == "rmt_rows" else f"blocks.{number}."  # the rows are those of all blocks
        mine = [parameters[key].grad for key in new if key.startswith(place)]
        assert any(grad is not None and bool((grad != 0).any()) for grad in mine), number
    with torch.no_grad():
        for key in new:
            gradient = parameters[key].grad
            assert gradient is not None, key
            parameters[key].sub_(gradient.sign(), alpha=1e-2)
    assert not torch.equal(log_probs(added, segments), before)
    assert take_published(build(model, memory), to_published(added), "an export, read back") == []


def places_of(name: str, model: str) -> list[dict[str, Any]]:
    """Return the memory of a preset in all blocks, and, where there is such a model, in the second one alone."""
    memory = memory_of(name, model)
    if memory["kind"] in ("armt", "rmt_rows"):  # whose rows pass through all blocks
        return [memory]
    plain = {"kind": "causal" if model == "GPT-2" else "none"}
    return [memory, {"kind": "per_block", "default": plain, "1": memory}]


def rates(model: MemoryLM, optimizer: OptimizerConfig) -> dict[str, float]:
    """Return the learning rate of every parameter that is trained."""
    groups = parameter_groups(model, optimizer)
    found = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    return {name: found[parameter] for name, parameter in model.named_parameters() if parameter in found}


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_with_lora_what_the_pretrained_model_lacks_is_trained_and_nothing_else(name: str, model: str) -> None:
    config, weights = config_of(name, LORA), to_published(pretrained(model))
    for memory in places_of(name, model):
        added = build(model, memory, lora=config.model.lora)
        new = take_published(added, weights, "weights")
        assert any(".low_rank." in key for key in new)
        assert set(rates(added, config.optimizer)) == set(new)


@pytest.mark.parametrize(("name", "model"), PAIRS)
def test_what_is_new_alone_learns_faster_as_the_tutorial_says(name: str, model: str) -> None:
    config, weights = config_of(name), to_published(pretrained(model))
    for memory in places_of(name, model):
        added = build(model, memory)
        new = set(take_published(added, weights, "weights"))
        factor = 10 if memory["kind"] == "armt" else 100
        wanted = {key: factor if key in new else 1 for key, _ in added.named_parameters()}
        found = rates(added, config.optimizer)
        assert {key: round(rate / config.optimizer.lr, 9) for key, rate in found.items()} == wanted


def test_a_window_that_a_linear_memory_does_not_read_is_refused_with_the_attention_that_does() -> None:
    model = "Qwen3 with a window"
    with refused(ValueError, f"model.sliding_window is {SEG_LEN // 2}", "memory.over.kind=none"):
        build(model, {"kind": "linear"})
    build(model, {"kind": "linear", "over": {"kind": "none"}})


@pytest.mark.parametrize("name", ["gated_deltanet", "titans", "infini", "memorizing"])
@pytest.mark.parametrize(("model", "over"), [("GPT-2", "causal"), ("Llama", "none")])
def test_a_memory_without_a_place_for_the_attention_is_refused_with_what_to_set(
    model: str, over: str, name: str
) -> None:
    weights, memory = to_published(pretrained(model)), memory_of(name, model)
    with refused(ValueError, f"memory.over.kind={over}"):
        take_published(build(model, {**memory, "over": None}), weights, "weights")
    assert memory["over"]["kind"] == over


def test_a_memory_whose_rows_pass_through_all_blocks_has_no_place_below() -> None:
    with refused(ValueError, "memory.over.kind is armt", "transformer_xl"):
        build("Llama", {"kind": "linear", "over": {"kind": "armt"}})


@pytest.mark.parametrize("name", ["infini", "memorizing"])
def test_heads_that_share_keys_read_as_if_each_had_its_own(name: str) -> None:
    """In a Llama with two heads of keys for four of queries, and one whose heads of keys are repeated."""
    memory = {**memory_of(name, "Llama"), "gate_init": 0.5}
    config = {"model": {"num_positions": 64}, "train": {"seg_len": SEG_LEN}}
    shared, alone = (
        gpt2_models.build(llama_models.llama_config(memory, **{**config, "model": {"num_kv_heads": number}}))
        for number in (2, 4)
    )
    weights = to_published(shared)
    for key, value in weights.items():
        if ".k_proj." in key or ".v_proj." in key:
            weights[key] = value.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    take_published(alone, weights, "weights")
    segments = some_segments(4)
    expected = log_probs(shared.double(), segments)
    torch.testing.assert_close(log_probs(alone.double(), segments), expected, rtol=0, atol=1e-10)
    for each in shared.memories():
        each.options = replace(each.options, gate_init=0.0)
        each.reset_parameters()
    assert (log_probs(shared, segments) - expected).abs().max() > 1e-3, "the memory is read"
