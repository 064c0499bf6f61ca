"""MemoryLM and its vocabulary: losses in token order, adaptive softmax, options, sizes.

Of its blocks in training: what is recomputed in the backward changes no bit, and keeps fewer activations.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dist_mem.block import model_spec, num_recomputed
from dist_mem.config import AdaptiveConfig, Config, ModelConfig, TrainConfig, change_config
from dist_mem.data.batch import IGNORE
from dist_mem.memory.base import named_tensors
from dist_mem.model import DocumentStarts, LMOutput, LMState, MemoryLM, describe
from tests.support.messages import refused

VOCAB, LANES, SEG_LEN = 23, 3, 5
CUTOFFS = [6, 11, 17]
XL = {"kind": "transformer_xl", "mem_len": 7}


def small_config(memory: dict[str, Any] | None = None, **model: Any) -> Config:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 24, "dropout": 0.0, "init_std": 0.3}
    return Config(
        model=ModelConfig(**{**sizes, **model}),
        memory=XL if memory is None else memory,
        train=TrainConfig(seg_len=SEG_LEN),
    )


def one_segment(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, LANES, SEG_LEN), generator=generator)
    return tokens, targets, torch.full((LANES,), SEG_LEN)


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


RECOMPUTED = [("blocks", 1.0), ("blocks", 0.5), ("attention", 1.0), ("feed_forward", 1.0)]
RECOMPUTED_IN: list[dict[str, Any]] = [
    {"norm": "pre"},
    {"norm": "post"},
    {"kind": "gpt2", "num_positions": 8},
    {"kind": "llama", "num_kv_heads": 1},
    {"kind": "llama", "qk_norm": True, "sliding_window": 3, "rope": {"kind": "dynamic", "factor": 2.0}},
]


def model_of(recomputed: str, share: float, **keys: Any) -> MemoryLM:
    memory = {"kind": "causal"} if keys.get("kind") == "gpt2" else None
    config: Config = small_config(memory, dropout=0.2, **keys)
    config = change_config(
        config, {"train.activation_checkpointing": recomputed, "train.activation_checkpointing_share": share}
    )
    torch.manual_seed(0)
    return MemoryLM(model_spec(config, VOCAB))


def learn(model: MemoryLM) -> tuple[LMOutput, int]:
    """Run forward and backward of one segment; return the output, and how many numbers were kept between the two."""
    tokens, targets, valid_len = one_segment()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    torch.manual_seed(3)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(tokens, targets, valid_len, state=model.init_state(torch.arange(LANES), "cpu", torch.float32))
    output.nll.sum().backward()
    return output, sum(kept.values())


@pytest.mark.parametrize("keys", RECOMPUTED_IN, ids=str)
@pytest.mark.parametrize(("recomputed", "share"), RECOMPUTED)
def test_recomputing_changes_no_bit_and_keeps_less(recomputed: str, share: float, keys: dict[str, Any]) -> None:
    plain, saving = model_of("none", 1.0, **keys), model_of(recomputed, share, **keys)
    (one, most), (other, fewer) = learn(plain), learn(saving)
    assert torch.equal(one.nll, other.nll)
    assert fewer < most
    for first, second in zip(plain.parameters(), saving.parameters(), strict=True):
        assert first.grad is not None and second.grad is not None and torch.equal(first.grad, second.grad)


def test_more_is_kept_the_less_is_recomputed() -> None:
    kept = [learn(model_of(*case))[1] for case in [("blocks", 1.0), ("blocks", 0.5), ("none", 1.0)]]
    assert kept == sorted(kept)
    assert kept[0] < learn(model_of("attention", 1.0))[1] < kept[-1]


@pytest.mark.parametrize(
    ("layers", "share", "number"), [(4, 1.0, 4), (4, 0.5, 2), (3, 0.5, 2), (12, 0.01, 1), (10, 0.3, 3)]
)
def test_a_share_selects_whole_blocks_and_at_least_one(layers: int, share: float, number: int) -> None:
    assert num_recomputed(layers, share) == number
