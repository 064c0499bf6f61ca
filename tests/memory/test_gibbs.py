"""`density: gibbs`, the density of infinity-Video: against the authors' functions, and against its definition."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.boxes import bin_mass, box_histogram, box_masses, box_moments, point_shares
from tests.support import paths
from tests.support.infinite_memories import LANES, SEG_LEN, memory_of, read, segments
from tests.support.published_infinite import GivenQueries, assert_close, layer_spec

TOLERANCE = 1e-10
SIZES: dict[str, Any] = {"num_basis": 8, "num_samples": 12, "tau": 0.75, "ridge": 0.5}
GIBBS: dict[str, Any] = {"density": "gibbs", "num_basis": 9, "gate": False}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    arrays = np.load(paths.GOLDEN / "infinite_video" / "gibbs_tiny.npz")
    return {name: torch.from_numpy(arrays[name]) for name in arrays if arrays[name].dtype == np.float64}


def published(golden: dict[str, Tensor]) -> Infinite:
    """The memory with the golden weights; the published code has no output projection, so it is the identity."""
    spec = layer_spec(d_model=6, num_heads=2, d_head=3, seg_len=8)
    options = Infinite.Options(**SIZES, density="gibbs", gibbs_boxes="published", gate=False)
    memory = Infinite(spec, options, GivenQueries(spec, object())).double()
    weights = {"key.weight": golden["param/W_k"], "value.weight": golden["param/W_v"]}
    memory.load_state_dict({**weights, "output.weight": torch.eye(6).double()})
    return memory


def published_histogram(mass: Tensor) -> Tensor:
    """Differences of a cumulative trapezoid rule on 129 edges: (B, 127).

    The outer two lie 1e-6 outside [0, 1], in no box, so scores are 0 there. The rule normalises the densities too.
    """
    shares = point_shares(8, mass)
    height, nothing = mass / shares[:-1], (1.0 - mass.sum(-1, keepdim=True)) / shares[-1]
    edges = torch.linspace(0.0, 1.0, 129, dtype=torch.float64)
    edges[0], edges[-1] = -1e-6, 1.0 + 1e-6
    density = torch.cat([nothing, height[..., torch.arange(1, 128) * 8 // 128], nothing], dim=-1)
    density = density / torch.trapezoid(density, edges)[..., None]
    found = torch.cumulative_trapezoid(density.sum(dim=(0, 2)), edges).diff()  # of all heads and queries
    return found / found.sum(dim=1, keepdim=True)


def test_calls_and_gradients_are_those_of_the_published_functions(golden: dict[str, Tensor]) -> None:
    memory = published(golden)
    state = memory.init_state(torch.arange(2), "cpu", torch.float64)
    full = torch.full((2,), 4)
    for call in range(3):
        rows = golden[f"c{call}_x"].clone().requires_grad_()
        query = golden[f"c{call}_q"].clone().requires_grad_()
        below = memory.over
        assert isinstance(below, GivenQueries)
        below.query = query.unflatten(-1, (2, 3)).permute(2, 0, 1, 3)
        given = state._replace(pending=rows, has_pending=torch.ones(2, dtype=torch.bool))
        signal, _ = memory.append_pending(given, torch.float64)
        assert_close(signal, golden[f"c{call}_B"], TOLERANCE, "states")
        mass = memory.density(below.query, memory.project_signal(signal, torch.float64).keys).mass
        assert mass is not None
        density = mass / point_shares(8, mass)[:-1]
        points = torch.arange(9) * 111  # of 999 steps; the tenth is t = 1, which no box holds
        at_points = density.transpose(0, 1)[..., points * 8 // 999]
        assert_close(at_points, golden[f"c{call}_density"][..., :-1], TOLERANCE)
        last = (1.0 - mass.sum(-1)) / point_shares(8, mass)[-1]
        assert_close(last.transpose(0, 1), golden[f"c{call}_density"][..., -1], TOLERANCE)
        assert_close(published_histogram(mass.detach()), golden[f"c{call}_sticky_p"], TOLERANCE, "states")
        output = memory(torch.zeros(2, 4, 6, dtype=torch.float64), given, full)
        assert output.aux == {}
        assert_close(output.y, golden[f"c{call}_y"], TOLERANCE)
        weights = [memory.get_parameter(name) for name in ("key.weight", "value.weight")]
        found = torch.autograd.grad((output.y * golden[f"c{call}_w"]).sum(), [rows, query, *weights])
        for gradient, name in zip(found, ("x", "q", "W_k", "W_v"), strict=True):
            assert_close(gradient, golden[f"c{call}_grad_{name}"], TOLERANCE, "gradients")
        state = output.state


@pytest.mark.parametrize("boxes", ["closed", "published"])
def test_a_coefficient_is_the_shrunk_mean_of_the_rows_in_its_box(boxes: str) -> None:
    memory, (rows, *_) = memory_of(**GIBBS, gibbs_boxes=boxes, padding="none"), segments(1)
    signal = read(memory, [rows, rows])[-1].state.coefficients
    for box in range(9):
        inside = [row for row in range(SEG_LEN) if (row + 1) * 9 // SEG_LEN == box]
        if boxes == "closed" and box == 8:
            inside.append(SEG_LEN - 1)  # at t = 1
        expected = rows[:, inside].sum(dim=1) / (len(inside) + memory.options.ridge)
        torch.testing.assert_close(signal[:, box], expected, rtol=0, atol=1e-12)


def test_a_reading_is_the_integral_of_the_signal_under_the_gibbs_density() -> None:
    """By midpoints, which are exact for steps: p(t) = exp z(t) / integral, context = integral of p(t) V(t)."""
    memory, inputs = memory_of(**GIBBS), segments(4)
    outputs = read(memory, inputs)
    state = outputs[-2].state
    signal, _ = memory.append_pending(state, torch.float64)
    below = memory.over(inputs[-1], state.over, torch.full((LANES,), SEG_LEN))
    times = (torch.arange(9 * 40, dtype=torch.float64) + 0.5) / (9 * 40)
    x = memory.geometry.evaluate(times) @ signal  # (B, P, D)
    contexts = []
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        key, value = (memory.get_parameter(name)[rows] for name in ("key.weight", "value.weight"))
        z = below.query[head] @ (x @ key.T).mT / 2.0
        p = z.exp() / z.exp().mean(dim=-1, keepdim=True)
        contexts.append((p @ (x @ value.T)) / len(times))
    expected = below.y + torch.cat(contexts, dim=-1) @ memory.output.weight.T
    torch.testing.assert_close(outputs[-1].y, expected, rtol=0, atol=1e-12)


def test_only_published_boxes_lose_the_newest_row() -> None:
    """At every update but the first: there rows lie in the middle of their bins."""
    inputs = segments(3)
    altered = [*inputs[:2], inputs[2].clone()]
    altered[1] = inputs[1].clone()
    altered[1][:, -1] += 1.0
    for boxes, is_lost in (("closed", False), ("published", True)):
        memory = memory_of(**GIBBS, gibbs_boxes=boxes)
        one, other = (read(memory, given)[-1].state.coefficients for given in (inputs, altered))
        assert torch.equal(one, other) is is_lost


def test_an_empty_memory_reads_zero_and_large_scores_do_not_overflow() -> None:
    memory, (x,) = memory_of(**GIBBS), segments(1)
    below = memory.over(x, memory.over.init_state(torch.arange(LANES), "cpu", x.dtype), torch.full((LANES,), SEG_LEN))
    assert torch.equal(read(memory, [x])[0].y, below.y)
    for boxes in ("closed", "published"):
        mass = box_masses(torch.full((1, 1, 1, 4), 1e4), torch.eye(4)[None, None] + 0.0, boxes=boxes)
        assert mass.isfinite().all() and mass.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("num_basis", [7, 8, 999, 1500])
def test_boxes_weigh_the_points_of_the_trapezoid_rule_that_they_hold(num_basis: int) -> None:
    weights = torch.full((1000,), 1.0, dtype=torch.float64)
    weights[[0, -1]] = 0.5
    expected = torch.zeros(num_basis + 1, dtype=torch.float64)
    expected.index_add_(0, torch.arange(1000) * num_basis // 999, weights)
    torch.testing.assert_close(point_shares(num_basis, weights), expected / 999, rtol=0, atol=1e-15)
    mass = box_masses(torch.ones(1, 1, 1, 2), torch.ones(1, 1, num_basis, 2), boxes="published")
    assert mass.isfinite().all() and mass.sum() < 1.0


@pytest.mark.parametrize("num_bins", [3, 8, 128])
def test_bins_and_moments_are_those_of_the_steps(num_bins: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(2, 3, 5, 8, generator=generator, dtype=torch.float64).softmax(dim=-1)
    points = 8 * num_bins * 20
    times = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    fine = mass.repeat_interleave(points // 8, dim=-1) / (points // 8)
    torch.testing.assert_close(bin_mass(mass, num_bins), fine.unflatten(-1, (num_bins, -1)).sum(-1), rtol=0, atol=1e-12)
    mu, variance = box_moments(mass)
    torch.testing.assert_close(mu, fine @ times, rtol=0, atol=1e-12)
    torch.testing.assert_close(variance, fine @ times.square() - mu.square(), rtol=0, atol=1 / points)
    real = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    counted = torch.where(real[:, :, None], bin_mass(mass, num_bins), 0.0).sum(dim=(0, 2))
    torch.testing.assert_close(box_histogram(mass, real, num_bins=num_bins), counted, rtol=0, atol=1e-12)


def test_sticky_sampling_follows_what_was_read() -> None:
    memory, inputs = memory_of(**GIBBS, sampling="sticky", num_bins=9), segments(4)
    outputs = read(memory, inputs)
    state = outputs[-2].state
    signal, _ = memory.append_pending(state, torch.float64)
    below = memory.over(inputs[-1], state.over, torch.full((LANES,), SEG_LEN))
    mass = memory.density(below.query, memory.project_signal(signal, torch.float64).keys).mass
    assert mass is not None
    histogram = outputs[-1].state.histogram
    torch.testing.assert_close(histogram, mass.sum(dim=(0, 2)), rtol=0, atol=1e-12)
    only = torch.zeros_like(histogram)
    only[:, 4] = 1.0
    assert (memory.positions(outputs[-1].state._replace(histogram=only)) == 4 / 9).all()
    assert (memory.positions(outputs[-1].state).diff(dim=1) >= 0).all()


def test_its_signal_stays_bounded_for_any_sizes() -> None:
    """Coefficients are means of rows, less what the ridge takes: none is larger than the largest row."""
    sizes: dict[str, Any] = {"num_basis": 64, "num_samples": 64, "tau": 0.75, "ridge": 0.5}
    state = read(memory_of(density="gibbs", gate=False, **sizes), segments(40))[-1].state
    assert state.coefficients.abs().max() < max(rows.abs().max() for rows in segments(40))
