"""Sticky memories sample the past where it was read, with reproducible draws."""

from __future__ import annotations

import math

import pytest
import torch

from dist_mem.memory.parts.counter_hash import uniform
from dist_mem.memory.parts.sticky import read_histogram, sample_positions

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


def test_histogram_is_the_mass_of_all_real_queries_of_all_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    mu = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    variance = 0.01 * torch.rand(2, 3, 5, generator=generator, dtype=torch.float64) + 1e-4
    real = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    found = read_histogram(mu, variance, real, num_bins=8)
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for head in range(2):
        for lane, token in real.nonzero().tolist():
            density = torch.distributions.Normal(mu[head, lane, token], variance[head, lane, token].sqrt())
            edges = torch.linspace(0, 1, 9, dtype=torch.float64)
            edges[0], edges[-1] = -1e-6, 1.0 + 1e-6
            expected[lane] += density.cdf(edges).diff()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
