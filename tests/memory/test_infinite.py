"""The infinity-former's memory: what its signal is, what it lies over, how it is configured, where it samples."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dist_mem.block import model_spec
from dist_mem.config import Config, ConfigError, ModelConfig, TrainConfig, load_config, to_yaml
from dist_mem.memory import build_memory, memory_options
from dist_mem.memory.base import named_tensors
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.basis import Geometry, evaluate_basis, growth, solve
from dist_mem.memory.parts.counter_hash import uniform
from dist_mem.memory.parts.sticky import sample_positions
from dist_mem.model import MemoryLM
from tests.support.infinite_memories import (
    D_HEAD,
    LANES,
    NUM_HEADS,
    SEG_LEN,
    SMALL,
    WIDTH,
    memory_of,
    read,
    segments,
    spec_of,
)
from tests.support.messages import refused


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


def test_moments_are_those_of_a_softmax_over_samples_of_the_signal() -> None:
    memory, inputs = memory_of(density="softmax_moments"), segments(3)
    state = read(memory, inputs[:2])[-1].state
    signal, _ = memory.append_pending(state, torch.float64)
    query = memory.over(inputs[2], state.over, torch.full((LANES,), SEG_LEN)).query
    mu, variance = memory.density(query, memory.project_signal(signal, torch.float64).keys).moments()
    places = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    rows = evaluate_basis(places, **memory.basis) @ signal
    for head in range(NUM_HEADS):
        keys = rows @ memory.key.weight[head * D_HEAD : (head + 1) * D_HEAD].T
        share = (query[head] @ keys.mT / D_HEAD**0.5).softmax(dim=-1)
        torch.testing.assert_close(mu[head], share @ places, rtol=0, atol=1e-12)
        spread = share @ places.square() - mu[head].square() + memory.options.variance_floor
        torch.testing.assert_close(variance[head], spread, rtol=0, atol=1e-12)


@pytest.mark.parametrize("prior_mean", [None, 0.3])
def test_divergence_is_the_mean_over_the_real_queries_of_a_lane(prior_mean: float | None) -> None:
    memory, inputs = memory_of(prior_mean=prior_mean), segments(3)
    state, valid_len = read(memory, inputs[:2])[-1].state, torch.tensor([SEG_LEN, 2, 0])
    found = memory(inputs[2], state, valid_len).aux["kl"]
    signal, _ = memory.append_pending(state, torch.float64)
    below = memory.over(inputs[2], state.over, valid_len)
    mu, variance = memory.density(below.query, memory.project_signal(signal, torch.float64).keys).moments()
    prior_mu = mu if prior_mean is None else torch.full_like(mu, prior_mean)
    prior = torch.distributions.Normal(prior_mu, torch.full_like(mu, memory.options.prior_std))
    exact = torch.distributions.kl_divergence(torch.distributions.Normal(mu, variance.sqrt()), prior)
    for lane, length in enumerate(valid_len.tolist()):
        expected = exact[:, lane, :length].mean() if length else torch.zeros(())
        torch.testing.assert_close(found[lane].detach(), expected.detach().to(found.dtype), rtol=1e-12, atol=1e-12)


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
    lm = MemoryLM(model_spec(Config(model=model, memory=memory, train=TrainConfig(seg_len=SEG_LEN)), 11))
    first, second = (memory.over.attention for memory in lm.memories())
    assert second.content_bias is first.content_bias and second.position_bias is first.position_bias


def configured(*overrides: str) -> Config:
    return load_config(["train.steps=1", *overrides], memory_options=memory_options)


def test_options_of_all_memories_are_written_out_and_may_be_linked() -> None:
    config = configured("memory.kind=infinite", "memory.over.kind=transformer_xl", "memory.tau=0.9")
    assert config.memory["over"] == {"kind": "transformer_xl", "mem_len": 128, "positions": None, "kernel": None}
    assert config.memory["tau"] == 0.9 and config.memory["ridge"] == 0.5
    linked = configured(
        "memory.kind=infinite", "memory.over.kind=transformer_xl", "memory.over.mem_len=${train.seg_len}"
    )
    assert "${train.seg_len}" in to_yaml(linked)
    assert memory_options(linked.memory)["over"]["mem_len"] == linked.train.seg_len


def test_another_memory_below_takes_none_of_the_former_options(tmp_path: Any) -> None:
    path = tmp_path / "infinite.yaml"
    over = {"kind": "transformer_xl", "mem_len": 64}
    path.write_text(OmegaConf.to_yaml({"memory": {"kind": "infinite", "tau": 0.6, "over": over}}))
    assert configured(str(path), "memory.over.mem_len=32").memory["over"]["mem_len"] == 32
    changed = configured(str(path), "memory.over.kind=none")
    assert changed.memory["over"] == {"kind": "none", "kernel": None} and changed.memory["tau"] == 0.6
    assert "over" not in configured(str(path), "memory.kind=transformer_xl").memory


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["memory.over.kind=transformer"], "memory.over.kind"),
        (["memory.over.mem_len=3"], "memory.over: "),
        (["memory.over.kind=transformer_xl", "memory.over.mem_lenn=3"], "did you mean memory.over.mem_len?"),
        (["memory.over.kind=transformer_xl", "memory.over.mem_len=x"], "memory.over.mem_len"),
        (["memory.over=transformer_xl"], "memory.over: "),
        (["memory.kind=transformer_xl", "memory.over=null"], "memory.over: unknown key"),
        (["memory.num_bases=3"], "did you mean memory.num_basis?"),
        (["memory.basis_widths=3"], "memory.basis_widths"),
    ],
)
def test_wrong_keys_of_the_memory_below_are_refused_by_name(overrides: list[str], named: str) -> None:
    with refused(ConfigError, named):
        configured("memory.kind=infinite", *overrides)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_basis": 15}, "memory.num_basis"),
        ({"basis_widths": [0.1, -0.1]}, "memory.basis_widths"),
        ({"basis_widths": []}, "memory.basis_widths"),
        ({"density": "gibbs", "density_bias": True}, "memory.density_bias"),
        ({"over": {"kind": "transformer_xl", "mem_len": SEG_LEN + 1}}, "memory.over.mem_len"),
        ({"over": {"kind": "transformer_xl", "mem_len": 0}}, "memory.over.kind=none"),
        (
            {"over": {"kind": "compressive", "mem_len": SEG_LEN, "cmem_len": 4, "compression_rate": 2}},
            "memory.over.cmem_len",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with refused(ValueError, named):
        memory_of(**options)


def test_a_regression_that_no_machine_has_room_for_is_refused_before_it_is_made() -> None:
    with refused(ValueError, "memory.num_basis"):
        build_memory({"kind": "infinite", **SMALL, "num_basis": 2048}, replace(spec_of(), seg_len=200_000))


def test_a_signal_that_would_grow_without_end_is_refused() -> None:
    """And what is let pass stays bounded over 300 segments; what is forgotten in time may grow until then."""
    narrow = {"num_basis": 64, "basis_widths": [0.005, 0.01], "num_samples": 64, "tau": 0.75, "ridge": 0.5}
    with refused(ValueError, "memory.basis_widths", "memory.num_basis"):
        memory_of(**narrow)
    memory_of(**narrow, memory_threshold=2048)
    memory = memory_of(**{**narrow, "basis_widths": [0.01, 0.05]}, gate=False)
    state = read(memory, segments(300))[-1].state
    assert state.coefficients.abs().max() < 100.0


@pytest.mark.parametrize("ridge", [1e-3, 0.5])
@pytest.mark.parametrize("width", [0.005, 0.01, 0.02, 0.1])
@pytest.mark.parametrize("num_basis", [16, 32, 64])
def test_the_growth_is_the_spectral_radius_or_a_bound_of_it_below_1(num_basis: int, width: float, ridge: float) -> None:
    geometry = Geometry(num_basis, (width, 2 * width), ridge, 0.75, num_samples=64, num_rows=32, padding="none")
    radius = float(torch.linalg.eigvals(solve(geometry).linear).abs().max())
    assert radius * (1.0 - 1e-9) <= growth(geometry) < (1.0 if radius < 1.0 else radius * (1.0 + 1e-9))


@pytest.mark.parametrize("gate", [False, True])
def test_of_a_short_first_segment_each_token_is_forgotten_by_its_own_place(gate: bool) -> None:
    """Its rows wait at the beginning of those of a whole segment (`data.cut: end`)."""
    memory = build_memory({"kind": "infinite", **SMALL, "gate": gate}, replace(spec_of(), short_first=True)).double()
    num_real = SEG_LEN - 2
    state = memory.init_state(torch.arange(LANES), "cpu", torch.float64)
    state = memory(segments(1)[0], state, torch.full((LANES,), num_real)).state
    for token in range(-SEG_LEN, 0):
        begin = torch.full((LANES,), token)
        changed = (memory.forget(state, begin, begin + 1).pending != state.pending).any(dim=2)
        assert changed.sum(dim=1).tolist() == [token >= -num_real] * LANES
        assert token < -num_real or changed[:, num_real + token].all()


NUM_BINS, NUM_SAMPLES, NUM_LANES = 128, 64, 400


def documents(number: int = NUM_LANES) -> torch.Tensor:
    return torch.arange(number)


def positions_of(histogram: torch.Tensor, sampling: str, *, segment: int = 3, layer: int = 1) -> torch.Tensor:
    counters = (0, layer, documents(len(histogram)), torch.full((len(histogram),), segment))
    return sample_positions(histogram, sampling, num_samples=NUM_SAMPLES, counters=counters)


def test_draws_never_change() -> None:
    """A resumed run continues with the same numbers, in any version: those of SplitMix64."""
    draws = uniform(3, 7, 2, torch.tensor([11]), torch.tensor([5]))
    assert draws.tolist() == [[0.06329841456663965, 0.19234848587196618, 0.6061712177998313]]


def test_draws_are_uniform_and_differ_in_every_counter() -> None:
    zeros = torch.zeros(NUM_LANES, dtype=torch.int64)
    first = uniform(NUM_SAMPLES, 0, 0, documents(), zeros)
    others = [
        uniform(NUM_SAMPLES, 1, 0, documents(), zeros),
        uniform(NUM_SAMPLES, 0, 1, documents(), zeros),
        uniform(NUM_SAMPLES, 0, 0, documents() + NUM_LANES, zeros),
        uniform(NUM_SAMPLES, 0, 0, documents(), zeros + 1),
        uniform(NUM_SAMPLES, 0, 0, zeros, documents() + 2),
    ]
    draws = torch.stack([first, *others])
    assert draws.unique().numel() == draws.numel()
    for one in draws:
        counts = torch.histc(one, bins=64, min=0.0, max=1.0)
        expected = one.numel() / 64
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert 63 - 5 * math.sqrt(2 * 63) < chi_square < 63 + 5 * math.sqrt(2 * 63)
    correlations = torch.corrcoef(draws.flatten(1)) - torch.eye(len(draws))
    assert correlations.abs().max() < 5 / math.sqrt(first.numel())


@pytest.mark.parametrize("sampling", ["sticky", "stratified"])
def test_a_flat_histogram_samples_like_linear_within_its_sampling_law(sampling: str) -> None:
    """Kolmogorov: of sets of independent draws 5 % are further than 1.36 / sqrt(S) from even; stratified is exact."""
    positions = positions_of(torch.ones(NUM_LANES, NUM_BINS), sampling)
    linear = torch.arange(1, NUM_SAMPLES + 1) / NUM_SAMPLES
    furthest = (positions - linear).abs().amax(dim=1)
    if sampling == "stratified":
        assert (positions <= linear).all() and (furthest <= 1 / NUM_SAMPLES + 1e-12).all()
        return
    share = ((furthest - 1 / NUM_BINS) > 1.36 / math.sqrt(NUM_SAMPLES)).double().mean().item()
    assert 0.0 < share < 0.08
    assert torch.equal(positions, (positions * NUM_BINS).round() / NUM_BINS), "left edges of bins"
    counts = torch.histc(positions, bins=NUM_BINS, min=0.0, max=1.0)
    expected = positions.numel() / NUM_BINS
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - (NUM_BINS - 1)) < 5 * math.sqrt(2 * (NUM_BINS - 1))


@pytest.mark.parametrize("sampling", ["sticky", "stratified"])
def test_samples_follow_the_histogram(sampling: str) -> None:
    histogram = torch.zeros(NUM_LANES, NUM_BINS)
    histogram[:, 10], histogram[:, 90] = 1.0, 3.0
    positions = positions_of(histogram, sampling)
    bins = (positions * NUM_BINS).floor()
    assert ((bins == 10) | (bins == 90)).all(), "nothing is sampled where nothing was read"
    assert (bins == 90).double().mean().item() == pytest.approx(0.75, abs=0.015)
    assert torch.equal(positions, positions.sort(dim=1).values)
    if sampling == "stratified":
        assert ((bins == 90).sum(dim=1) - 48).abs().max() <= 1
        inside = (positions * NUM_BINS).frac()
        assert inside.mean().item() == pytest.approx(0.5, abs=0.02)
