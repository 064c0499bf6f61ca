"""The infinity-former's memory: what its signal is, what it lies over, and how it is configured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.config import Config, ConfigError, ModelConfig, TrainConfig, load_config, to_yaml
from dist_mem.memory import build_memory, memory_options
from dist_mem.memory.base import LayerSpec, named_tensors
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.basis import Geometry, evaluate_basis, first_positions, solve, update_positions
from dist_mem.model import MemoryLM
from tests.memory.test_infinite_parity import GivenQueries, layer_spec
from tests.support.messages import refused

WIDTH, NUM_HEADS, D_HEAD, SEG_LEN, LANES = 8, 2, 4, 6, 3
SMALL = {"num_basis": 16, "basis_widths": [0.05, 0.1], "num_samples": 12, "tau": 0.5, "kl_weight": 1.0, "ridge": 0.1}


def spec_of() -> LayerSpec:
    return layer_spec(d_model=WIDTH, num_heads=NUM_HEADS, d_head=D_HEAD, seg_len=SEG_LEN)


def memory_of(seed: int = 0, **options: Any) -> Infinite:
    """In float64, with large weights."""
    memory = build_memory({"kind": "infinite", **SMALL, **options}, spec_of())
    torch.manual_seed(seed)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    assert isinstance(memory, Infinite)
    return memory.double()


def segments(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(LANES, SEG_LEN, WIDTH, generator=generator, dtype=torch.float64) for _ in range(number)]


def read(memory: Infinite, inputs: list[Tensor], document_ids: Tensor | None = None) -> list[Any]:
    """Complete segments, one after the other."""
    state = memory.init_state(torch.arange(LANES) if document_ids is None else document_ids, "cpu", torch.float64)
    outputs = []
    for x in inputs:
        outputs.append(memory(x, state, torch.full((LANES,), SEG_LEN)))
        state = outputs[-1].state
    return outputs


def smooth(positions: Tensor) -> Tensor:
    return torch.stack([(3.0 * positions).sin(), (5.0 * positions + 1.0).cos()], dim=-1)


@pytest.mark.parametrize("padding", ["published", "none"])
def test_regression_reproduces_a_smooth_signal(padding: str) -> None:
    """The first fit gives it back; after an update the past is the same signal, contracted to [0, tau]."""
    settings: dict[str, Any] = {"widths": (0.01, 0.02), "num_basis": 256}
    geometry = Geometry(**settings, ridge=0.01, tau=0.6, num_samples=256, num_rows=256, padding=padding)
    fit = solve(geometry)
    offset = 0.5 if padding == "published" else 1.0
    rows = smooth((torch.arange(256, dtype=torch.float64) + offset) / 256)
    first = fit.first @ rows
    inner = torch.linspace(0.1, 0.8, 200, dtype=torch.float64)
    torch.testing.assert_close(evaluate_basis(inner, **settings) @ first, smooth(inner), rtol=0, atol=2e-3)
    new_times = torch.arange(1, 257, dtype=torch.float64) / 256
    second = fit.linear @ first + fit.new @ (2.0 * smooth(new_times))
    past, new = inner * 0.6, 0.6 + inner * 0.4
    torch.testing.assert_close(evaluate_basis(past, **settings) @ second, smooth(inner), rtol=0, atol=1e-2)
    torch.testing.assert_close(evaluate_basis(new, **settings) @ second, 2.0 * smooth(inner), rtol=0, atol=2e-2)


def test_zero_rows_surround_the_signal_by_half_its_length() -> None:
    rows, zeros = first_positions(4, "published")
    assert rows.tolist() == [0.125, 0.375, 0.625, 0.875] and zeros.tolist() == [-0.375, -0.125, 1.125, 1.375]
    assert [part.tolist() for part in first_positions(1, "published")] == [[0.5], []]
    past, new, zeros = update_positions(4, 2, tau=0.5, padding="published")
    assert past.tolist() == [0.125, 0.25, 0.375, 0.5] and new.tolist() == [0.75, 1.0]
    assert ((zeros < 0).sum(), (zeros > 1).sum()) == (3, 3)
    assert zeros.aminmax() == (-0.375, 1.375)
    assert [len(part) for part in update_positions(4, 2, tau=0.5, padding="none")] == [4, 2, 0]
    assert [len(part) for part in first_positions(3, "none")] == [3, 0]


def test_linear_contraction_is_the_update_of_evaluated_samples() -> None:
    geometry = Geometry(16, (0.05, 0.1), 0.1, 0.5, 12, 6, "published")
    fit, coefficients = solve(geometry), torch.randn(16, 8, dtype=torch.float64)
    places = torch.arange(1, 13, dtype=torch.float64) / 12
    samples = evaluate_basis(places, widths=(0.05, 0.1), num_basis=16) @ coefficients
    torch.testing.assert_close(fit.linear @ coefficients, fit.past @ samples, rtol=0, atol=1e-12)


def test_stratified_contraction_of_a_flat_histogram_is_nearly_the_linear_one() -> None:
    many = {"num_samples": 1200, "memory_threshold": 10**6}  # with so many the signal may not grow for ever
    linear, stratified = memory_of(**many), memory_of(**many, sampling="stratified")
    expected, found = read(linear, segments(2))[1].state, read(stratified, segments(2))[1].state
    flat = found._replace(histogram=torch.ones_like(found.histogram))
    places = evaluate_basis(torch.linspace(0.05, 0.95, 50, dtype=torch.float64), **linear.basis)
    one = places @ linear.append_pending(expected, torch.float64)[0]
    other = places @ stratified.append_pending(flat, torch.float64)[0]
    torch.testing.assert_close(one, other, rtol=0, atol=0.04 * one.abs().max().item())
    assert not torch.equal(one, other)


def test_an_empty_memory_reads_exactly_zero() -> None:
    memory, (x,) = memory_of(), segments(1)
    (output,) = read(memory, [x])
    below = memory.over(x, memory.over.init_state(torch.arange(LANES), "cpu", x.dtype), torch.full((LANES,), SEG_LEN))
    assert torch.equal(output.y, below.y) and torch.equal(output.query, below.query)
    assert output.aux["kl"].tolist() == [0.0] * LANES


def test_over_a_short_term_memory_it_reads_what_left_that_memory_up_to_the_previous_segment() -> None:
    """No token is in both, none is lost: segment s attends to s - 1 and s, and reads 0 to s - 2."""
    memory, inputs = memory_of(over={"kind": "transformer_xl", "mem_len": SEG_LEN}, gate=False), segments(5)
    outputs = read(memory, inputs)
    fit = solve(memory.geometry)
    signal = torch.zeros(LANES, SMALL["num_basis"], WIDTH, dtype=torch.float64)
    for number, output in enumerate(outputs):
        if number == 2:
            signal = fit.first @ inputs[0]
        elif number > 2:
            signal = fit.linear @ signal + fit.new @ inputs[number - 2]
        torch.testing.assert_close(output.state.coefficients, signal, rtol=0, atol=1e-12)
        assert torch.equal(output.state.over.hidden, inputs[number])
        assert output.state.num_tokens.tolist() == [max(0, number - 1) * SEG_LEN] * LANES


def test_lanes_in_different_phases_fit_first_update_or_wait() -> None:
    memory, inputs = memory_of(gate=False), segments(3)
    state = read(memory, inputs)[-1].state
    state = state._replace(
        coefficients=state.coefficients * torch.tensor([1.0, 0.0, 1.0])[:, None, None],
        num_tokens=torch.tensor([2 * SEG_LEN, 0, 2 * SEG_LEN]),
        has_pending=torch.tensor([True, True, False]),
    )
    signal, num_tokens = memory.append_pending(state, torch.float64)
    fit = solve(memory.geometry)
    update = fit.linear @ state.coefficients[0] + fit.new @ inputs[2][0]
    expected = torch.stack([update, fit.first @ inputs[2][1], state.coefficients[2]])
    torch.testing.assert_close(signal, expected, rtol=0, atol=1e-12)
    assert num_tokens.tolist() == [3 * SEG_LEN, SEG_LEN, 2 * SEG_LEN]


def test_memory_threshold_forgets_everything_and_starts_again() -> None:
    inputs = segments(8)
    outputs = read(memory_of(memory_threshold=2 * SEG_LEN), inputs)
    assert [output.state.num_tokens[0].item() // SEG_LEN for output in outputs] == [0, 1, 2, 1, 2, 1, 2, 1]
    again = read(memory_of(), inputs[2:])
    assert torch.equal(outputs[3].state.coefficients, again[1].state.coefficients)
    unbounded = read(memory_of(), inputs)
    assert [output.state.num_tokens[0].item() // SEG_LEN for output in unbounded] == list(range(8))


def test_the_first_segment_is_still_in_the_signal_many_segments_later() -> None:
    inputs = segments(12)
    altered = [inputs[0] + 1.0, *inputs[1:]]
    one, other = (read(memory_of(tau=0.9), x)[-1].y for x in (inputs, altered))
    assert (one - other).abs().max() > 1e-6


def test_state_stays_as_large_as_it_began() -> None:
    outputs = read(memory_of(over={"kind": "transformer_xl", "mem_len": SEG_LEN}), segments(20))
    sizes = [sum(part.numel() for part in named_tensors(output.state).values()) for output in outputs]
    assert len(set(sizes)) == 1


def test_moments_are_those_of_a_softmax_over_samples_of_the_signal() -> None:
    memory, inputs = memory_of(density="softmax_moments"), segments(3)
    state = read(memory, inputs[:2])[-1].state
    signal, _ = memory.append_pending(state, torch.float64)
    query = memory.over(inputs[2], state.over, torch.full((LANES,), SEG_LEN)).query
    mu, variance = memory.read_densities(query, signal)
    places = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    rows = evaluate_basis(places, **memory.basis) @ signal
    for head in range(NUM_HEADS):
        keys = rows @ memory.key.weight[head * D_HEAD : (head + 1) * D_HEAD].T
        share = (query[head] @ keys.mT / D_HEAD**0.5).softmax(dim=-1)
        torch.testing.assert_close(mu[head], share @ places, rtol=0, atol=1e-12)
        spread = share @ places.square() - mu[head].square() + memory.options.variance_floor
        torch.testing.assert_close(variance[head], spread, rtol=0, atol=1e-12)


def test_by_moments_a_query_finds_the_row_that_is_like_it_wherever_it_lies() -> None:
    """The affine networks of the paper know places, not rows: they would have to be trained for each."""
    narrow: dict[str, Any] = {"num_basis": 64, "basis_widths": [0.01, 0.02], "num_samples": 64, "variance_floor": 1e-6}
    narrow["ridge"] = 1e-3
    narrow["memory_threshold"] = 10**6  # such a signal may not grow for ever
    memory = memory_of(density="softmax_moments", gate=False, **narrow)
    torch.nn.init.eye_(memory.key.weight)
    for row in range(SEG_LEN):
        x = torch.zeros(LANES, SEG_LEN, WIDTH, dtype=torch.float64)
        x[:, row] = 1.0
        state = read(memory, [x])[-1].state
        signal, _ = memory.append_pending(state, torch.float64)
        mu, variance = memory.read_densities(torch.full((NUM_HEADS, LANES, 1, D_HEAD), 100.0).double(), signal)
        torch.testing.assert_close(mu, torch.full_like(mu, (row + 0.5) / SEG_LEN), rtol=0, atol=0.02)
        assert variance.max() < 0.02**2


@pytest.mark.parametrize("prior_mean", [None, 0.3])
def test_divergence_is_the_mean_over_the_real_queries_of_a_lane(prior_mean: float | None) -> None:
    memory, inputs = memory_of(prior_mean=prior_mean), segments(3)
    state, valid_len = read(memory, inputs[:2])[-1].state, torch.tensor([SEG_LEN, 2, 0])
    found = memory(inputs[2], state, valid_len).aux["kl"]
    signal, _ = memory.append_pending(state, torch.float64)
    below = memory.over(inputs[2], state.over, valid_len)
    mu, variance = memory.read_densities(below.query, signal)
    prior_mu = mu if prior_mean is None else torch.full_like(mu, prior_mean)
    prior = torch.distributions.Normal(prior_mu, torch.full_like(mu, memory.options.prior_std))
    exact = torch.distributions.kl_divergence(torch.distributions.Normal(mu, variance.sqrt()), prior)
    for lane, length in enumerate(valid_len.tolist()):
        expected = exact[:, lane, :length].mean() if length else torch.zeros(())
        torch.testing.assert_close(found[lane].detach(), expected.detach().to(found.dtype), rtol=1e-12, atol=1e-12)


def test_gate_learns_from_the_rows_of_the_previous_segment_only() -> None:
    memory, inputs = memory_of(), segments(3)
    inputs[0].requires_grad_(), inputs[1].requires_grad_()
    outputs = read(memory, inputs)
    outputs[2].y.sum().backward()
    assert memory.gate is not None and memory.gate.weight.grad is not None
    assert memory.gate.weight.grad.abs().max() > 1e-6
    assert inputs[0].grad is None and inputs[1].grad is None
    assert outputs[1].state.coefficients.grad_fn is None


def test_samples_change_with_what_was_read_and_with_the_segment() -> None:
    memory, inputs = memory_of(sampling="sticky"), segments(3)
    state = read(memory, inputs)[-1].state
    positions = memory.positions(state)
    assert positions.shape == (LANES, SMALL["num_samples"]) and state.segment.tolist() == [3] * LANES
    later = memory(inputs[2], state, torch.full((LANES,), SEG_LEN)).state
    assert later.segment.tolist() == [4] * LANES
    assert (memory.positions(later._replace(histogram=state.histogram)) != positions).any(dim=1).all()
    assert (memory.positions(state._replace(histogram=state.histogram.flip(1))) != positions).any(dim=1).all()
    for other in ({"layer_index": 1}, {"seed": 1}):
        memory.spec = replace(spec_of(), **other)
        assert (memory.positions(state) != positions).any(dim=1).all()


def test_sticky_samples_depend_on_the_document_not_on_the_lane() -> None:
    memory, inputs = memory_of(sampling="sticky"), segments(4)
    flipped = read(memory, [x.flip(0) for x in inputs], torch.arange(LANES).flip(0))[-1]
    torch.testing.assert_close(flipped.y.flip(0), read(memory, inputs)[-1].y, rtol=0, atol=1e-12)
    other = read(memory, inputs, torch.arange(LANES) + 5)[-1]
    assert not torch.allclose(other.y, flipped.y.flip(0))


def test_two_memories_over_one_add_their_readings_and_divergences() -> None:
    memory, inputs = memory_of(over={"kind": "infinite", **SMALL, "tau": 0.9}), segments(3)
    assert isinstance(memory.over, Infinite)
    both, lower = read(memory, inputs)[-1], read(memory.over, inputs)[-1]
    named = [named_tensors(state).items() for state in (both.state.over, lower.state)]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*named, strict=True))
    assert both.state.num_tokens.tolist() == [2 * SEG_LEN] * LANES
    assert (both.aux["kl"] > lower.aux["kl"]).all() and (lower.aux["kl"] > 0).all()
    assert ((both.y - lower.y).abs().amax(dim=(1, 2)) > 1e-3).all()


def test_blocks_share_the_biases_of_the_memories_below() -> None:
    model = ModelConfig(num_layers=2, d_model=WIDTH, num_heads=2, d_inner=8)
    memory = {"kind": "infinite", **SMALL, "over": {"kind": "transformer_xl", "mem_len": SEG_LEN}}
    lm = MemoryLM(Config(model=model, memory=memory, train=TrainConfig(seg_len=SEG_LEN)), 11)
    first, second = (memory.over.attention for memory in lm.memories())
    assert second.content_bias is first.content_bias and second.position_bias is first.position_bias


def configured(*overrides: str) -> Config:
    return load_config(["train.steps=1", *overrides], memory_options=memory_options)


def test_options_of_all_memories_are_written_out_and_may_be_linked() -> None:
    config = configured("memory.kind=infinite", "memory.over.kind=transformer_xl", "memory.tau=0.9")
    assert config.memory.over == {"kind": "transformer_xl", "mem_len": 128}
    assert config.memory.tau == 0.9 and config.memory.ridge == 0.5
    linked = configured(
        "memory.kind=infinite", "memory.over.kind=transformer_xl", "memory.over.mem_len=${train.seg_len}"
    )
    assert "${train.seg_len}" in to_yaml(linked)
    assert memory_options(linked.memory)["over"]["mem_len"] == linked.train.seg_len


def test_another_memory_below_takes_none_of_the_former_options(tmp_path: Any) -> None:
    path = tmp_path / "infinite.yaml"
    over = {"kind": "transformer_xl", "mem_len": 64}
    path.write_text(OmegaConf.to_yaml({"memory": {"kind": "infinite", "tau": 0.6, "over": over}}))
    assert configured(str(path), "memory.over.mem_len=32").memory.over.mem_len == 32
    changed = configured(str(path), "memory.over.kind=none")
    assert changed.memory.over == {"kind": "none"} and changed.memory.tau == 0.6
    assert "over" not in configured(str(path), "memory.kind=transformer_xl").memory


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["memory.over.kind=transformer"], "memory.over.kind: is 'transformer', but must be one of"),
        (["memory.over.mem_len=3"], "memory.over: is {'mem_len': '3'}, but must be a block whose kind is one of"),
        (["memory.over.kind=transformer_xl", "memory.over.mem_lenn=3"], "did you mean memory.over.mem_len?"),
        (["memory.over.kind=transformer_xl", "memory.over.mem_len=x"], "memory.over.mem_len: is 'x', but must be an"),
        (["memory.over=transformer_xl"], "memory.over: is 'transformer_xl', but must be a block with a kind"),
        (["memory.num_bases=3"], "did you mean memory.num_basis?"),
        (["memory.basis_widths=3"], "memory.basis_widths: is 3, but must be a list of numbers"),
    ],
)
def test_wrong_keys_of_the_memory_below_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured("memory.kind=infinite", *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "even"}, "memory.sampling is 'even', but must be one of linear, sticky, stratified"),
        ({"padding": "zeros"}, "memory.padding is 'zeros', but must be one of published, none"),
        ({"kl_heads": "max"}, "memory.kl_heads is 'max', but must be one of mean, sum"),
        ({"projections": "none"}, "memory.projections is 'none', but must be one of full, heads"),
        ({"store": "post"}, "memory.store is 'post', but must be one of raw, normed"),
        (
            {"density": "softmax_moments", "density_bias": True},
            "memory.density_bias is true, but memory.density = softmax_moments has",
        ),
        ({"density": "sharp"}, "memory.density is 'sharp', but must be one of affine, softmax_moments"),
        ({"num_basis": 15}, "memory.num_basis is 15, but must be a multiple of 2"),
        ({"num_samples": 0}, "memory.num_samples is 0, but must be greater than 0"),
        ({"ridge": 0.0}, "memory.ridge is 0.0, but must be greater than 0"),
        ({"prior_std": -1.0}, "memory.prior_std is -1.0"),
        ({"variance_floor": 0.0}, "memory.variance_floor is 0.0"),
        ({"tau": 1.0}, "memory.tau is 1.0, but must lie between 0 and 1"),
        ({"basis_widths": [0.1, -0.1]}, "memory.basis_widths is"),
        ({"basis_widths": []}, "memory.basis_widths is"),
        ({"memory_threshold": 0}, "memory.memory_threshold is 0, but must be at least 1; null"),
        (
            {"over": {"kind": "transformer_xl", "mem_len": SEG_LEN + 1}},
            f"memory.over.mem_len is {SEG_LEN + 1}, but must be a multiple of train.seg_len = {SEG_LEN}",
        ),
        ({"over": {"kind": "transformer_xl", "mem_len": 0}}, "memory.over.mem_len is 0, .* set memory.over.kind=none"),
        (
            {"over": {"kind": "compressive", "mem_len": SEG_LEN, "cmem_len": 4, "compression_rate": 2}},
            "memory.over.cmem_len is 4",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_of(**options)


def test_a_signal_that_would_grow_without_end_is_refused() -> None:
    """And what is let pass stays bounded over 300 segments; what is forgotten in time may grow until then."""
    narrow = {"num_basis": 64, "basis_widths": [0.005, 0.01], "num_samples": 64, "tau": 0.75, "ridge": 0.5}
    with refused(ValueError, "memory.basis_widths", "memory.num_basis"):
        memory_of(**narrow)
    memory_of(**narrow, memory_threshold=2048)
    memory = memory_of(**{**narrow, "basis_widths": [0.01, 0.05]}, gate=False)
    state = read(memory, segments(300))[-1].state
    assert state.coefficients.abs().max() < 100.0


def test_the_memory_below_may_come_from_outside() -> None:
    """Everything a memory lies over is handed to it: an attention of GPT-2, or a test's."""
    spec = spec_of()
    memory = Infinite(spec, Infinite.Options(**SMALL), GivenQueries(spec, object()))
    assert memory.evicted_len == SEG_LEN
