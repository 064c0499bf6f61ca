"""MemoryLM and its vocabulary: losses in token order, adaptive softmax, options, sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.config import AdaptiveConfig, Config, ModelConfig, TrainConfig
from dist_mem.data.batch import IGNORE
from dist_mem.memory import memory_class, memory_kinds, memory_options
from dist_mem.memory.base import named_tensors
from dist_mem.model import LMState, MemoryLM, describe, reset_lanes
from dist_mem.nn.layers import Dropout
from dist_mem.nn.vocabulary import Softmax, adaptive_bins

VOCAB, LANES, SEG_LEN = 23, 3, 5
CUTOFFS = [6, 11, 17]


def small_config(memory: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 24, "dropout": 0.0, "init_std": 0.3}
    return Config(
        model=ModelConfig(**{**sizes, **model}),
        memory=memory or {"kind": "transformer_xl", "mem_len": 7},
        train=TrainConfig(seg_len=SEG_LEN),
    )


def build(config: Config) -> MemoryLM:
    torch.manual_seed(0)
    return MemoryLM(config, VOCAB)


def one_segment(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, LANES, SEG_LEN), generator=generator)
    return tokens, targets, torch.full((LANES,), SEG_LEN)


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


def test_adaptive_softmax_equals_its_definition() -> None:
    """Token by token: the head, whose LAST column stands for the first cluster, then the cluster itself."""
    bins = adaptive_bins(VOCAB, d_model=16, d_embed=16, cutoffs=CUTOFFS, div_val=2, tie_projections=None)
    torch.manual_seed(0)
    head = Softmax(bins, d_model=16).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(1, VOCAB, 16, dtype=torch.float64)
    nll = head(hidden, torch.arange(VOCAB)[None]).nll[0]
    edges = [0, *CUTOFFS, VOCAB]
    for token in range(VOCAB):
        cluster = sum(token >= cutoff for cutoff in CUTOFFS)
        first = head.bins[0]
        projected = hidden[0, token] @ first.projection
        logits = torch.cat(
            [first.weight @ projected + first.bias, first.cluster_weight @ projected + first.cluster_bias]
        )
        if cluster == 0:
            expected = logits.log_softmax(0)[token]
        else:
            tail = head.bins[cluster]
            tail_logits = tail.weight @ (hidden[0, token] @ tail.projection) + tail.bias
            expected = logits.log_softmax(0)[-cluster] + tail_logits.log_softmax(0)[token - edges[cluster]]
        assert abs(nll[token] + expected) < 1e-12, token


def test_tied_tables_are_one_parameter_and_projections_tie_one_by_one() -> None:
    model = build(small_config(adaptive=AdaptiveConfig(CUTOFFS, div_val=2, tie_projections=[False, True, True, False])))
    pairs = list(zip(model.embedding.bins, model.head.bins, strict=True))
    assert all(embedding.weight is logits.weight for embedding, logits in pairs)
    assert [embedding.projection is logits.projection for embedding, logits in pairs] == [False, True, True, False]


def test_position_biases_are_shared_by_all_blocks() -> None:
    model = build(small_config(num_layers=3))
    attentions = [block.memory.attention for block in model.blocks]
    assert len({id(attention.content_bias) for attention in attentions}) == 1
    assert len({id(attention.position_bias) for attention in attentions}) == 1


def test_initial_weights_have_the_configured_spread() -> None:
    model = build(small_config(d_model=64, d_inner=256, init_std=0.02))
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name
        else:
            assert (parameter == float("norm.weight" in name)).all(), name


def test_untrained_loss_is_that_of_guessing() -> None:
    model = build(small_config(init_std=0.02))
    tokens, targets, valid_len = one_segment()
    nll = model(tokens, targets, valid_len, state=fresh_state(model)).nll
    assert nll.mean().item() == pytest.approx(math.log(VOCAB), abs=0.2)


def test_reset_replaces_the_memory_of_the_given_lanes_only() -> None:
    model = build(small_config())
    tokens, targets, valid_len = one_segment()
    state = model(tokens, targets, valid_len, state=fresh_state(model)).state
    reset = reset_lanes(state, fresh_state(model), torch.tensor([False, True, False]))
    assert [memory.length.tolist() for memory in reset.blocks] == [[5, 0, 5]] * 2
    assert all((memory.hidden[1] == 0).all() for memory in reset.blocks)


def test_memory_keeps_the_newest_rows_right_aligned() -> None:
    """M = 7, T = 5: after two segments the last 2 rows of the first and all of the second."""
    model = build(small_config())
    (first, targets, valid_len), (second, _, _) = one_segment(0), one_segment(1)
    state = model(first, targets, valid_len, state=fresh_state(model)).state
    assert (state.blocks[0].hidden[:, :2] == 0).all()
    state = model(second, targets, valid_len, state=state).state
    expected = torch.cat([model.embedding(first)[:, 3:], model.embedding(second)], dim=1)
    assert torch.equal(state.blocks[0].hidden, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_vocabulary
def test_description_equals_the_model(model_keys: dict[str, Any], precision: str) -> None:
    config = small_config(**model_keys)
    config.train.precision = precision
    model = build(config)
    facts = describe(config, VOCAB)
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
    assert describe(config, 267_735)["num_parameters"] == 151_106_305
    config.model.adaptive = AdaptiveConfig([20_000, 40_000, 200_000])
    assert describe(config, 267_735)["num_parameters"] == 151_107_538


def test_dropout_keeps_the_mean_and_the_share() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1001)
    dropped = Dropout(0.1)(x)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=2e-3)
    assert dropped.mean().item() == pytest.approx(1.0, abs=2e-3)
    assert dropped.unique().numel() == 2
    assert Dropout(0.0)(x) is x and Dropout(0.1).eval()(x) is x


def test_configuration_may_be_an_omegaconf_object() -> None:
    given = {"model": {"num_layers": 1, "d_model": 16, "num_heads": 2}, "memory": {"kind": "none"}}
    config = OmegaConf.merge(OmegaConf.structured(Config), {"memory": {}}, given)
    assert isinstance(describe(config, VOCAB)["num_parameters"], int)


def test_every_file_of_the_package_is_a_memory() -> None:
    assert {"none", "transformer_xl"} <= set(memory_kinds())
    assert all(memory_class(kind).__module__ == f"dist_mem.memory.{kind}" for kind in memory_kinds())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, "memory is {}, but must be a block whose kind is one of"),
        ({"kind": "transfomer_xl"}, "did you mean transformer_xl"),
        ({"kind": "transformer_xl", "mem_length": 5}, "memory.mem_len"),
        ({"kind": "transformer_xl", "mem_len": "many"}, "memory.mem_len"),
        ({"kind": "none", "mem_len": 5}, "memory.mem_len"),
    ],
)
def test_wrong_memory_blocks_are_refused_by_name(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_options(block)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small_config({"kind": "none"}, same_length=True), "model.same_length"),
        (small_config({"kind": "transformer_xl", "mem_len": 0}), "memory.mem_len is 0"),
        (small_config(num_heads=3), "model.d_head"),
        (small_config(norm="both"), "model.norm"),
        (small_config(adaptive=AdaptiveConfig([])), "model.adaptive.cutoffs"),
        (small_config(adaptive=AdaptiveConfig([5, VOCAB])), "model.adaptive.cutoffs"),
        (small_config(adaptive=AdaptiveConfig([5, 9], div_val=8)), "model.adaptive.div_val"),
        (small_config(adaptive=AdaptiveConfig([5], tie_projections=[True])), "model.adaptive.tie_projections"),
    ],
)
def test_wrong_model_settings_are_refused_by_name(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config)
