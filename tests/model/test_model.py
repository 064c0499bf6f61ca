"""MemoryLM and its vocabulary: losses in token order, adaptive softmax, options, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.config import AdaptiveConfig, Config, change_config
from dist_mem.data.batch import IGNORE
from dist_mem.memory.base import named_tensors
from dist_mem.model import DocumentStarts, LMState, MemoryLM, describe
from tests.support.messages import refused
from tests.support.small_models import LANES, SEG_LEN, VOCAB, XL, one_segment, small_config

CUTOFFS = [6, 11, 17]


def build(config: Config) -> MemoryLM:
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, VOCAB))


def fresh_state(model: MemoryLM, dtype: torch.dtype = torch.float32) -> LMState:
    return model.init_state(torch.arange(LANES), "cpu", dtype)


VOCABULARIES = {
    "plain": {},
    "untied": {"tie_embeddings": False},
    "projected": {"d_embed": 8},
    "adaptive, one width": {"adaptive": AdaptiveConfig(CUTOFFS)},
    "adaptive, one width, projected": {"adaptive": AdaptiveConfig(CUTOFFS), "d_embed": 8},
    "adaptive, shrinking": {"adaptive": AdaptiveConfig(CUTOFFS, div_val=2)},
    "adaptive, projections untied": {"adaptive": AdaptiveConfig(CUTOFFS, div_val=2, tie_projections=[False] * 4)},
}
every_vocabulary = pytest.mark.parametrize("model_keys", VOCABULARIES.values(), ids=VOCABULARIES.keys())


@every_vocabulary
def test_losses_are_in_token_order_and_agree_with_the_whole_distribution(model_keys: dict[str, Any]) -> None:
    model = build(small_config(**model_keys)).double()
    tokens, targets, valid_len = one_segment()
    state = fresh_state(model, torch.float64)
    log_probs, _ = model.log_probs(tokens, valid_len, state=state)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(LANES, SEG_LEN, dtype=torch.float64))
    nll = model(tokens, targets, valid_len, state=state).nll
    torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None])[..., 0], rtol=0, atol=1e-12)


@every_vocabulary
@pytest.mark.parametrize("fill", [0, VOCAB - 1, IGNORE])
def test_every_parameter_gets_a_gradient_whatever_the_targets(model_keys: dict[str, Any], fill: int) -> None:
    """All targets in the first bin, all in the last, none at all."""
    model = build(small_config(**model_keys))
    tokens, targets, valid_len = one_segment()
    model(tokens, targets.fill_(fill), valid_len, state=fresh_state(model)).nll.sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


@every_vocabulary
def test_ignored_targets_cost_nothing(model_keys: dict[str, Any]) -> None:
    model = build(small_config(**model_keys))
    tokens, targets, valid_len = one_segment()
    whole = model(tokens, targets, valid_len, state=fresh_state(model)).nll
    hidden = torch.rand(LANES, SEG_LEN, generator=torch.Generator().manual_seed(1)) < 0.4
    some = model(tokens, targets.masked_fill(hidden, IGNORE), valid_len, state=fresh_state(model)).nll
    assert (some[hidden] == 0).all()
    torch.testing.assert_close(some[~hidden], whole[~hidden], rtol=0, atol=1e-6)


@pytest.mark.parametrize("begins", [(False, True, False), (True, True, True), (False, False, False)])
def test_a_document_that_begins_inside_a_window_reads_nothing_before_it(begins: tuple[bool, ...]) -> None:
    """In its lanes the later segment is that of a fresh memory, and in the others it reads the one before."""
    model = build(small_config()).double().eval()
    (first, of_first, lengths), (second, of_second, _) = one_segment(0), one_segment(1)
    fresh, is_new = fresh_state(model, torch.float64), torch.tensor(begins)
    tokens, targets = torch.cat([first, second], 1), torch.cat([of_first, of_second], 1)
    window = model(
        tokens, targets, torch.stack([lengths, lengths], 1), state=fresh, later=[DocumentStarts(fresh, is_new)]
    )
    before = model(first, of_first, lengths, state=fresh)
    alone, after = (model(second, of_second, lengths, state=state) for state in (fresh, before.state))
    expected = torch.where(is_new[:, None], alone.nll, after.nll)
    assert torch.equal(window.nll, torch.cat([before.nll, expected], 1))
    assert not torch.isclose(alone.nll, after.nll).all(1).any(), "the memory is read"
    for name, part in named_tensors(window.state).items():
        reset, kept = named_tensors(alone.state)[name], named_tensors(after.state)[name]
        chosen = is_new.view(-1, *[1] * (part.dim() - 1))
        assert torch.equal(part, torch.where(chosen, reset, kept)), name


def test_initial_weights_have_the_configured_spread() -> None:
    model = build(small_config(d_model=64, d_inner=256, init_std=0.02))
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name
        else:
            assert (parameter == float("norm.weight" in name)).all(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_vocabulary
def test_description_equals_the_model(model_keys: dict[str, Any], precision: str) -> None:
    config = small_config(**model_keys)
    config = change_config(config, {"train.precision": precision})
    model = build(config)
    facts = describe(model_spec(config, VOCAB))
    state = model.init_state(torch.arange(1), "cpu", {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    assert facts["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["num_layer_parameters"] + facts["num_vocabulary_parameters"] == facts["num_parameters"]
    assert facts["state_bytes_per_lane"] == sum(part.nbytes for part in named_tensors(state).values())


def test_published_wikitext_model_has_the_published_size() -> None:
    """The authors' base model; its adaptive softmax adds one row a cluster to the plain one."""
    config = small_config(
        {"kind": "transformer_xl", "mem_len": 150},
        num_layers=16, d_model=410, num_heads=10, d_head=41, d_inner=2100, norm="post",
    )  # fmt: skip
    assert describe(model_spec(config, 267_735))["num_parameters"] == 151_106_305
    config = change_config(config, {"model.adaptive": AdaptiveConfig([20_000, 40_000, 200_000])})
    assert describe(model_spec(config, 267_735))["num_parameters"] == 151_107_538


@pytest.mark.parametrize(
    ("key", "memory", "model"),
    [
        ("memory is {}", {}, {}),
        ("did you mean transformer_xl", {"kind": "transfomer_xl"}, {}),
        ("memory.mem_len", {"kind": "transformer_xl", "mem_length": 5}, {}),
        ("memory.mem_len", {"kind": "transformer_xl", "mem_len": "many"}, {}),
        ("memory.mem_len", {"kind": "none", "mem_len": 5}, {}),
        ("memory.mem_len", {"kind": "transformer_xl", "mem_len": 0}, {}),
        ("model.same_length", {"kind": "none"}, {"same_length": True}),
        ("model.same_length", {"kind": "infini"}, {"same_length": True}),
        ("model.clamp_len", {"kind": "infinite", "over": {"kind": "linear"}}, {"clamp_len": 3}),
        ("model.clamp_len", {"kind": "compressive", "mem_len": 5, "positions": "alibi"}, {"clamp_len": 3}),
        ("model.clamp_len", {"kind": "per_block", "0": {"kind": "causal"}, "1": {"kind": "infini"}}, {"clamp_len": 3}),
        ("model.d_head", XL, {"num_heads": 3}),
        ("model.norm", XL, {"norm": "both"}),
        ("model.adaptive.cutoffs", XL, {"adaptive": AdaptiveConfig([])}),
        ("model.adaptive.cutoffs", XL, {"adaptive": AdaptiveConfig([5, VOCAB])}),
        ("model.adaptive.div_val", XL, {"adaptive": AdaptiveConfig([5, 9], div_val=8)}),
        ("model.adaptive.tie_projections", XL, {"adaptive": AdaptiveConfig([5], tie_projections=[True])}),
    ],
)
def test_wrong_settings_are_refused_by_name(key: str, memory: dict[str, Any], model: dict[str, Any]) -> None:
    with refused(ValueError, key):
        build(small_config(memory, **model))


def test_a_key_that_the_memory_of_one_block_reads_may_be_set() -> None:
    memory = {"kind": "per_block", "0": XL, "1": {"kind": "infini"}}
    assert build(small_config(memory, clamp_len=3, same_length=True)).memories()[0].spec.same_length
