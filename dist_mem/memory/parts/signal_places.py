"""Where the rows of an infinity-former's signal are: their places in [0, 1], followed from the start of a document.

A contraction moves every row; sticky sampling moves it by where the memory was read, so its place follows from the
whole history, which the state does not have. Shape letters: B lanes, P rows of a lane so far, R bins, D model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.memory.parts.basis import Geometry, first_positions, regression, update_positions
from dist_mem.memory.parts.inspection import Spans

NUM_BINS = 256  # R, equal parts of [0, 1] that `Infinite.inspect` gives as rows


class Trace(NamedTuple):
    """What the inspection of a signal knows of the past."""

    over: Any  # the trace of the memory below
    places: tuple[Tensor, ...]  # of every lane, (P,) float64 on the CPU, increasing


def append(places: Tensor, moved_by: Tensor | None, num_rows: int, geometry: Geometry, *, is_first: bool) -> Tensor:
    """Return the places of a lane's rows after an update with `num_rows` new ones: (P + E,).

    Args:
        moved_by: (S,) increasing, the positions at which the past was sampled; None: evenly.
        is_first: nothing is kept of the past.
    """
    if is_first:
        return first_positions(num_rows, geometry.padding)[0]
    new = update_positions(geometry.num_samples, num_rows, tau=geometry.tau, padding=geometry.padding)[1]
    if moved_by is None:
        return torch.cat([geometry.tau * places, new])
    # A row moves with the nearest sample before it.
    rank = torch.searchsorted(moved_by.cpu(), places, right=True).double()
    return torch.cat([geometry.tau * rank / geometry.num_samples, new])


def bin_spans(places: Tensor, spans: Spans, num_bins: int = NUM_BINS) -> Spans:
    """Return the tokens of each of R bins of [0, 1], (R,): those of the rows that are nearest to a point in it."""
    if not len(places):
        nothing = torch.zeros(num_bins, dtype=torch.int64)
        return Spans(nothing, nothing)
    borders = (places[1:] + places[:-1]) / 2
    edges = torch.linspace(0.0, 1.0, num_bins + 1, dtype=torch.float64)
    first = torch.searchsorted(borders, edges[:-1], right=True)
    last = torch.searchsorted(borders, edges[1:], right=False)
    return Spans(spans.begin[first], spans.end[torch.maximum(first, last)])


def shares(places: Tensor) -> Tensor:
    """Return the share of [0, 1] that is nearest to each row, (P,) float64: they sum to 1 (Voronoi cells)."""
    if not len(places):
        return places
    borders = ((places[1:] + places[:-1]) / 2).clamp(0.0, 1.0)
    ends = places.new_tensor([0.0]), places.new_tensor([1.0])
    return torch.cat([ends[0], borders, ends[1]]).diff()


def without_rows(coefficients: Tensor, places: Tensor, taken: Tensor, geometry: Geometry) -> Tensor:
    """Return coefficients (N, D) less the regression of the signal at the rows `taken`, (P,) bool.

    The signal is smooth, so a little of what is taken out stays, and a little of what is beside it goes.
    """
    if not taken.any():
        return coefficients
    borders = (places[1:] + places[:-1]) / 2
    samples = _samples(geometry)
    nearest = torch.searchsorted(borders, samples, right=True)
    basis = geometry.evaluate(samples)
    removed = _projection(geometry)[:, taken[nearest]] @ basis[taken[nearest]]  # (N, N)
    return coefficients - removed.to(coefficients) @ coefficients


def _samples(geometry: Geometry) -> Tensor:
    number = 2 * geometry.num_samples
    return (torch.arange(number, dtype=torch.float64) + 0.5) / number


@lru_cache(maxsize=8)
def _projection(geometry: Geometry) -> Tensor:
    """Return G^T for rows at the samples, (N, 2 S) float64."""
    return regression(_samples(geometry), torch.empty(0, dtype=torch.float64), geometry=geometry)
