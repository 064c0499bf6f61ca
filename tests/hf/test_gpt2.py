"""GPT-2 with memories: where it begins, what is trained, ALiBi, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import ConfigError, load_config
from dist_mem.memory import memory_options
from dist_mem.model import MemoryLM
from dist_mem.nn.plain_attention import alibi_bias, alibi_slopes
from tests.support.gpt2_models import LTM, SEG_LEN, VOCAB, build, fresh, gpt2_config, log_probs
from tests.support.llama_models import llama_config
from tests.support.messages import refused

COMPRESSIVE = {"kind": "compressive", "mem_len": SEG_LEN, "cmem_len": SEG_LEN, "compression_rate": 3}


@torch.no_grad()
def log_probs_of_segments(model: MemoryLM) -> list[Tensor]:
    tokens = torch.randint(0, VOCAB, (4, 2, SEG_LEN), generator=torch.Generator().manual_seed(2))
    return list(log_probs(model, tokens).split(SEG_LEN, 1))


def test_a_scaled_output_draws_all_other_weights_alike() -> None:
    one, other = (dict(build(gpt2_config({**LTM, "output_init": scale})).named_parameters()) for scale in (1.0, 0.25))
    scaled = {name for name in one if not torch.equal(one[name], other[name])}
    assert scaled == {f"blocks.{index}.memory.output.weight" for index in range(3)}
    assert all(torch.equal(0.25 * one[name], other[name]) for name in scaled)


@pytest.mark.parametrize("config", [gpt2_config, llama_config])
def test_residual_weights_begin_smaller_by_the_root_of_twice_the_layers(config: Callable[..., Any]) -> None:
    """And others have the spread of the configuration, norms are the identity; a head has no bias, a Llama none."""
    model = build(config(model={"d_model": 96, "num_heads": 4, "d_inner": 384}))
    block = model.blocks[0]
    small = (block.memory.attention.output.weight, block.feed_forward.contract.weight)
    assert [round(weight.std().item() * 6**0.5, 3) for weight in small] == [0.02, 0.02]
    assert round(block.feed_forward.expand.weight.std().item(), 3) == 0.02
    parameters = dict(model.named_parameters())
    assert all((part == 1).all() for name, part in parameters.items() if name.endswith("norm.weight"))
    biased = "head." if config is gpt2_config else ""
    assert not any("bias" in name for name in parameters if name.startswith(biased))


def test_one_dropout_mask_lies_on_attention_and_memory_together() -> None:
    """As published; and none on the last hidden states."""
    model = build(gpt2_config(LTM, model={"dropout": 0.5, "num_layers": 1}))
    given: list[Tensor] = []
    block = model.blocks[0]
    block.memory.register_forward_hook(lambda _, __, output: given.append(output.y))
    dropped: list[Tensor] = []
    block.dropout.register_forward_hook(lambda _, __, output: dropped.append(output))
    model.train()
    tokens = torch.zeros(2, SEG_LEN, dtype=torch.int64)
    state = fresh(model, 2)
    for _ in range(2):
        state = model(tokens, tokens, torch.full((2,), SEG_LEN), state=state).state
    assert (given[1] != 0).all()
    share = (dropped[1] == 0).float().mean()
    assert 0.4 < share < 0.6
    assert torch.equal(dropped[1][dropped[1] != 0], 2 * given[1][dropped[1] != 0])


def test_alibi_beyond_the_segment_begins_as_plain_gpt2() -> None:
    """With an empty memory; alibi everywhere does not, and with a full memory nothing does."""
    plain = log_probs_of_segments(build(gpt2_config()))
    for positions, first_is_close in (("alibi", False), ("alibi_memory", True), ("none", True)):
        model = build(gpt2_config({**COMPRESSIVE, "positions": positions}))
        model.load_state_dict(build(gpt2_config()).state_dict(), strict=False)
        found = [
            bool((one - other).abs().max() < 1e-6)
            for one, other in zip(plain, log_probs_of_segments(model), strict=True)
        ]
        assert found == [first_is_close, False, False, False], positions


def test_only_alibi_knows_the_order_of_memory_rows() -> None:
    """Footnote 8: without a bias, a memory is a set to GPT-2."""
    for positions, ordered in (("alibi", True), ("alibi_memory", True), ("none", False)):
        model = build(gpt2_config({**COMPRESSIVE, "positions": positions}, model={"init_std": 0.3}))
        memory = model.memories()[0]
        state = memory.init_state(torch.arange(2), "cpu", torch.float32)
        rows = torch.randn(2, SEG_LEN, 24, generator=torch.Generator().manual_seed(3))
        full = state.memory._replace(hidden=rows, length=torch.full((2,), SEG_LEN))
        turned = full._replace(hidden=rows.flip(1))
        x = torch.randn(2, SEG_LEN, 24, generator=torch.Generator().manual_seed(4))
        valid_len = torch.full((2,), SEG_LEN)
        one, other = (memory(x, state._replace(memory=part), valid_len).y for part in (full, turned))
        assert ((one - other).abs().max() > 1e-4) == ordered


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.kind=gpt2 model.norm=post", "model.norm"),
        ("model.kind=gpt2 model.d_embed=8", "model.d_embed"),
        ("model.kind=gpt2 train.seg_len=2048", "model.num_positions"),
        ("model.kind=gpt2 eval.seg_len=2048", "eval.seg_len"),
        ("model.kind=gpt3", "model.kind"),
        ("model.pretrained=gpt2", "model.pretrained"),
        ("model.kind=llama model.norm=post", "model.norm"),
        ("model.kind=llama model.num_kv_heads=3", "model.num_kv_heads"),
        ("model.kind=llama model.d_head=5", "model.d_head"),
        ("model.kind=llama train.seg_len=2048", "train.seg_len"),
        ("model.rope_theta=5e5", "model.rope_theta"),
        ("model.sliding_window=5", "model.sliding_window"),
        ("model.kind=llama model.qk_norm=true model.qkv_bias=true", "model.qk_norm"),
        ("model.kind=llama model.rope.factor=2", "model.rope.kind"),
        ("model.kind=llama model.rope.kind=yarn", "model.rope.factor"),
        ("model.kind=llama model.rope.kind=longrope", "model.rope.kind"),
        ("model.kind=llama model.rope.kind=linear model.rope.factor=2 model.rope.beta_fast=3", "model.rope.beta_fast"),
        (
            "model.kind=llama model.rope.kind=llama3 model.rope.factor=2 model.rope.high_freq_factor=1",
            "model.rope.high_freq_factor",
        ),
        ("model.kind=llama model.d_head=2 model.rope.kind=dynamic model.rope.factor=2", "model.rope.kind"),
        ("model.kind=llama model.rope_theta=1 model.rope.kind=yarn model.rope.factor=2", "model.rope_theta"),
    ],
)
def test_configuration_errors_name_the_key(override: str, key: str) -> None:
    with refused(ConfigError, key):
        load_config(["train.steps=1", *override.split()], memory_options=memory_options)


def test_published_slopes_times_the_distance_are_the_bias() -> None:
    """Twelve heads: eight of eight, and every second of sixteen, as in the authors' code."""
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    expected = [2.0**-power for power in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert alibi_slopes(12) == pytest.approx(expected)
    assert alibi_slopes(1) == [2.0**-8]
    sizes = {"num_queries": 3, "context_len": 2, "device": torch.device("cpu")}
    everywhere = alibi_bias(4, bias="alibi", **sizes)
    beyond = alibi_bias(4, bias="alibi_memory", **sizes)
    for head, slope in enumerate(alibi_slopes(4)):
        for query in range(3):
            for key in range(2 + query + 1):
                distance = 2 + query - key
                assert everywhere[head, 0, query, key] == -slope * distance
                assert beyond[head, 0, query, key] == (-slope * distance if key < 2 else 0)
