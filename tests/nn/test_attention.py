"""Back ends of attention: equal to the simple one in values, gradients and log-sums, for every memory."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.memory.base import detach_state
from dist_mem.model import MemoryLM
from dist_mem.nn import attention, chunked_attention, fused_attention
from dist_mem.nn.attention import BACK_ENDS, attend, choose, choose_kernel, mask_scores, simple_scores
from dist_mem.nn.attention_inputs import Inputs, Relative, Visible, visible_keys
from dist_mem.nn.layers import RelativeAttention, describe_attention
from dist_mem.nn.rotary_attention import attention_of, turn, turns
from tests.support.contract_cases import accepted, assert_near, case_params, computed, small_model, subject
from tests.support.messages import refused
from tests.support.tiny import tiny_config

COMPUTED_HERE = ("chunked", "sdpa")  # test_distance_kernels.py has `triton`
OTHERS = BACK_ENDS[2:]
HEADS, LANES, QUERIES, CONTEXT, WIDTH = 2, 3, 7, 5, 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in small cases."""
    monkeypatch.setattr(chunked_attention, "CHUNK", 3)


def drawn(dtype: torch.dtype, *, relative: bool, same_length: bool = False, biased: bool = False) -> Inputs:
    """Return random inputs; lanes have none, some and all of their context."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    num_keys = CONTEXT + QUERIES
    valid = torch.arange(CONTEXT) >= torch.tensor([CONTEXT, 2, 0])[:, None]
    rows = [draw(HEADS, LANES, count, WIDTH) for count in (QUERIES, num_keys, num_keys)]
    position = Relative(draw(HEADS, LANES, QUERIES, WIDTH), draw(HEADS, WIDTH, num_keys + 1), QUERIES - 1)
    bias = draw(HEADS, 1, QUERIES, num_keys).detach() if biased else None
    visible = visible_keys(valid, QUERIES, same_length=same_length)
    return Inputs(rows[0], rows[1], rows[2], visible, position if relative else None, bias)


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return rows and log-sums of the simple back end."""
    scores = mask_scores(simple_scores(inputs), inputs.visible)
    weights = scores.softmax(dim=-1)
    return weights.to(inputs.value.dtype) @ inputs.value, scores.logsumexp(dim=-1)


def gradients_of(rows: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed function of the rows."""
    learned = chunked_attention.learned_tensors(inputs)
    given = torch.linspace(-1.0, 1.0, rows.numel(), dtype=rows.dtype).view(rows.shape)
    return torch.autograd.grad(rows, learned, given)


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("back_end", COMPUTED_HERE)
@pytest.mark.parametrize(
    "given",
    [{"relative": True}, {"relative": True, "same_length": True}, {"relative": False, "biased": True}],
    ids=["relative", "same length", "biased"],
)
def test_rows_and_gradients_equal_the_simple_ones(given: dict[str, Any], back_end: str, dtype: torch.dtype) -> None:
    inputs = drawn(dtype, **given)
    expected, rows = reference(inputs)[0], attend(inputs, back_end).rows
    assert close(rows, expected, dtype)
    for found, wanted in zip(gradients_of(rows, inputs), gradients_of(expected, inputs), strict=True):
        assert close(found, wanted, dtype)


@pytest.mark.parametrize("back_end", COMPUTED_HERE)
def test_a_segment_alone_is_plainly_causal(back_end: str) -> None:
    inputs = drawn(torch.float64, relative=False)
    key, value = inputs.key[:, :, :QUERIES], inputs.value[:, :, :QUERIES]
    alone = visible_keys(torch.ones(LANES, 0, dtype=torch.bool), QUERIES, same_length=False)
    inputs = inputs._replace(key=key, value=value, visible=alone)
    assert fused_attention.is_plainly_causal(alone) and not fused_attention.is_plainly_causal(
        drawn(torch.float32, relative=True).visible
    )
    assert close(attend(inputs, back_end).rows, reference(inputs)[0], torch.float64)


def test_log_sums_of_chunks_and_their_gradient_equal_the_simple_ones() -> None:
    """A query that sees no key reads 0, and its log-sum is -inf; neither gives a gradient that is not finite."""
    inputs = drawn(torch.float64, relative=True)
    sees = torch.arange(QUERIES) != torch.tensor([0, 3, 99])[:, None]
    partial = inputs._replace(visible=inputs.visible._replace(sees=sees))
    read = attend(partial, "chunked", log_sum=True)
    rows, log_sum = reference(inputs)
    assert read.log_sum is not None
    assert close(read.log_sum[:, sees], log_sum[:, sees], torch.float64)
    assert (read.log_sum[:, ~sees] == -math.inf).all() and (read.rows[:, ~sees] == 0.0).all()
    learned = chunked_attention.learned_tensors(inputs)
    found = torch.autograd.grad(read.rows.sum() + (3.0 * read.log_sum[:, sees]).sum(), learned, allow_unused=True)
    wanted = torch.autograd.grad(rows[:, sees].sum() + (3.0 * log_sum[:, sees]).sum(), learned)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and close(one, other, torch.float64)


@pytest.mark.parametrize("sizes", [(9, 4, None, 2), (6, 10, 0, 4), (5, 5, -1, None), (8, 3, 3 - 8 - 1, None)])
def test_reach_has_every_visible_key(sizes: tuple[int, int, int | None, int | None]) -> None:
    num_queries, num_keys, above, upto = sizes
    visible = Visible(torch.ones(1, num_keys, dtype=torch.bool), num_queries, num_keys, above=above, upto=upto)
    mask = visible.mask()[0]
    for begin in range(num_queries):
        for end in range(begin + 1, num_queries + 1):
            keys = visible.reach(slice(begin, end))
            seen = mask[begin:end].any(dim=0)
            assert seen.sum() == seen[keys].sum()
            assert torch.equal(visible.mask(slice(begin, end), slice(0, num_keys))[0], mask[begin:end])


def results(case: str, back_end: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return losses, states and gradients of whole segments and of two ragged ones."""
    checked = subject(case, attention=back_end)
    model = checked.model().to(dtype)
    read = list(checked.read(model, state=checked.empty_state(model, dtype)))
    for tokens, targets in checked.segments(1)[:2]:
        read.append(model(tokens, targets, checked.ragged_lengths(), state=detach_state(read[-1].state)))
    return computed(model, read)


@pytest.mark.parametrize("back_end", COMPUTED_HERE)
@pytest.mark.parametrize("case", case_params())
def test_every_memory_has_the_losses_states_and_gradients_of_the_simple_back_end(case: str, back_end: str) -> None:
    if not accepted(case, back_end):
        with refused(ValueError, "model.attention", back_end):
            subject(case, attention=back_end).model()
        return
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        assert_near(results(case, back_end, dtype), results(case, "simple", dtype), tolerance, case)


def test_auto_keeps_short_segments_simple_and_never_drops_by_another_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "why_not", lambda: None)
    for device in ("cpu", "cuda"):
        for width in (64, None):
            assert choose(device, 64, relative_width=width, drops=False).back_end == "simple"
            assert choose(device, 4096, relative_width=width, drops=True).back_end == "simple"
            long = "sdpa" if width is None else "triton" if device == "cuda" else "chunked"
            assert choose(device, 1024, relative_width=width, drops=False).back_end == long


def test_where_our_kernels_do_not_run_the_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "why_not", lambda: None)
    assert choose("cuda", 1024, relative_width=256, drops=False) == choose_kernel("cuda", relative_width=256)
    assert "at most 128" in choose_kernel("cuda", relative_width=256).reason
    monkeypatch.setattr(attention, "why_not", lambda: "no Triton")
    assert "no Triton" in choose_kernel("cuda", relative_width=64).reason


def test_start_says_what_each_layer_uses_and_why() -> None:
    assert describe_attention(small_model("lamemo"), "cpu", 64) == [
        "attention of 3 of 3 layers: simple (it is fast for segments of 64 tokens)"
    ]
    assert describe_attention(subject("lamemo", attention="triton").model(), "cpu", 512) == [
        "attention of 3 of 3 layers: chunked (our kernels for scores by distance run on GPUs only)"
    ]
    most_used = subject("compressive, most used", attention="chunked").model()
    assert describe_attention(most_used, "cuda", 512)[0].startswith("attention of 3 of 3 layers: simple (the memory")


@pytest.mark.parametrize("back_end", OTHERS)
def test_dropping_probabilities_is_refused(back_end: str) -> None:
    config = tiny_config({"model": {"attention_dropout": 0.1, "attention": back_end}})
    with refused(ValueError, "model.attention_dropout", back_end):
        MemoryLM(model_spec(config, 11))


def test_a_mask_is_attended_to_by_simple_only() -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "d_head": 4, "dropout": 0.0, "attention_dropout": 0.0, "clamp_len": None}
    rows = torch.randn(1, 4, 8)
    visible: Any = visible_keys(torch.ones(1, 4, dtype=torch.bool), 4, same_length=False)
    layer = RelativeAttention(8, **sizes)
    expected = layer(rows, rows, visible).y
    assert torch.equal(layer(rows, rows, visible.mask()).y, expected)
    layer.back_end = "chunked"
    with refused(ValueError, "model.attention"):
        layer(rows, rows, visible.mask())


@pytest.mark.parametrize("width", [4, 5])
def test_products_of_turned_rows_depend_on_the_distance_alone(width: int) -> None:
    """Also where one number is left over, which is not turned."""
    query, key = torch.randn(2, 1, 2, 6, width, dtype=torch.float64)

    def products(first: int) -> Tensor:
        by = [turns(key, first=place, num_rows=6, theta=100.0) for place in (first, first - 3)]
        return turn(query, by[0]) @ turn(key, by[1]).mT

    torch.testing.assert_close(products(0), products(1000), rtol=0, atol=1e-12)
    assert not torch.allclose(products(0), query @ key.mT)


def test_a_limit_of_distances_is_refused_with_rotary_positions() -> None:
    spec = small_model("transformer_xl").memories()[0].spec
    with refused(ValueError, "model.clamp_len", "memory.positions"):
        attention_of(replace(spec, clamp_len=3), "rotary")
