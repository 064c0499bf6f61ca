"""The signal of an infinite memory: where its rows are, and what taking a passage out of it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.data.shard import Index
from dist_mem.inspection.walk import walk
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.basis import Geometry, evaluate_basis, fit_matrices
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.memory.parts.signal_places import append, shares, without_rows
from dist_mem.papers.regression_error import watched
from tests.inspection.test_reading import KINDS, SEG_LEN, opened

FINE: dict[str, Any] = {"num_basis": 64, "basis_widths": [0.02, 0.05], "num_samples": 64, "tau": 0.8, "ridge": 1e-4}


@pytest.mark.parametrize("kind", ["infinite", "sticky", "gibbs", "infinite_over_lamemo", "infinite_over_compressive"])
def test_places_are_those_that_the_regression_error_follows(
    library: Path, index: Index, tmp_path: Path, kind: str
) -> None:
    """In order; and their shares of the signal sum to one."""
    trained, document = opened(library, index, tmp_path, kind)
    compared = 0
    with Inspector(trained.model.memories()) as inspector, watched(trained.model) as watches:
        for step in walk(trained, document):
            if step.is_kept:
                inspector.commit()
                for trace, watch in zip(inspector.traces, watches, strict=True):
                    assert torch.equal(trace.places[0], watch.places)
                    compared += len(watch.places)
    assert compared
    for trace in inspector.traces:
        assert (trace.places[0].diff() >= 0).all()
        assert float(shares(trace.places[0]).sum()) == pytest.approx(1.0, abs=1e-12)


def test_the_signal_is_gone_where_it_is_forgotten_and_stays_elsewhere(
    library: Path, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of six segments: measured, a quarter of its norm is left, and the others change by a fifteenth.

    Rows next to each other are unrelated here, which is the hardest case for smooth functions.
    """
    monkeypatch.setitem(KINDS, "fine", {"kind": "infinite", "over": {"kind": "none"}, **FINE})
    trained, document = opened(library, index, tmp_path, "fine")
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document.part(0, 7 * SEG_LEN)):
            inspector.commit()
            blocks = step.output.state.blocks
        begin, end = torch.tensor([-4 * SEG_LEN]), torch.tensor([-3 * SEG_LEN])
        forgotten = inspector.forget(blocks, begin, end)
    for memory, trace, before, after in zip(inspector.memories, inspector.traces, blocks, forgotten, strict=True):
        assert isinstance(memory, Infinite)
        places = trace.places[0]
        rows = torch.arange(-len(places), 0) - SEG_LEN  # the newest segment is not in the signal yet
        taken = (rows >= int(begin)) & (rows < int(end))
        assert int(taken.sum()) == SEG_LEN
        kept, left = (_signal(memory, state.coefficients[0], places) for state in (before, after))
        gone = (left[taken].norm() / kept[taken].norm()).item()
        changed = ((left - kept)[~taken].norm() / kept[~taken].norm()).item()
        assert gone < 0.4, f"left of the passage: {gone:.4f}"
        assert changed < 0.15, f"changed elsewhere: {changed:.4f}"


# The test above; the defaults for segments of 64; the published sorting. (num_basis, widths, ridge, tau, S, E, padding)
GEOMETRIES = {
    "fine": Geometry(64, (0.02, 0.05), 1e-4, 0.8, 64, 8, "published"),
    "defaults": Geometry(256, (0.005, 0.01), 0.5, 0.75, 256, 64, "published"),
    "sorting": Geometry(150, (0.01, 0.05), 1.0, 0.75, 150, 150, "published"),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_what_is_left_is_what_smooth_functions_cannot_lack(name: str, correlation: float) -> None:
    """Less is left where the passage was than in a signal that it never entered, which is all of the rows beside it.

    And what is left there and changed elsewhere is at most twice the least that any signal of these functions has.
    """
    geometry, num_updates, passage = GEOMETRIES[name], 6, 2
    rows = _rows(num_updates * geometry.num_rows, correlation)
    whole, places = _read(rows, geometry)
    taken = torch.arange(len(rows)) // geometry.num_rows == passage
    never, _ = _read(rows.masked_fill(taken[:, None], 0.0), geometry)
    where = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    basis = evaluate_basis(where, widths=geometry.widths, num_basis=geometry.num_basis)
    is_taken = taken[torch.searchsorted((places[1:] + places[:-1]) / 2, where, right=True)]
    wanted = (basis @ whole).masked_fill(is_taken[:, None], 0.0)
    found = basis @ without_rows(whole, places, taken, geometry)
    least = basis @ torch.linalg.lstsq(basis, wanted, driver="gelsd").solution
    assert found[is_taken].norm() < (basis @ never)[is_taken].norm()
    assert (found - wanted).norm() < 2.0 * (least - wanted).norm()
    assert (least - wanted).norm() > 0.02 * wanted.norm(), "the functions can do it: then it should be done"


def _rows(number: int, correlation: float) -> Tensor:
    """Return unit-variance rows, each correlated with the one before, (P, 16) float64."""
    noise = torch.randn(number, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in range(1, number):
        noise[row] = correlation * noise[row - 1] + (1.0 - correlation**2) ** 0.5 * noise[row]
    return noise


def _read(rows: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the coefficients (N, D) after updates with all rows, and the places of the rows."""
    fit = fit_matrices(geometry, device="cpu", dtype=torch.float64)
    first, *later = rows.split(geometry.num_rows)
    coefficients = fit.first @ first
    places = append(torch.empty(0), None, geometry.num_rows, geometry, is_first=True)
    for new in later:
        coefficients = fit.linear @ coefficients + fit.new @ new
        places = append(places, None, geometry.num_rows, geometry, is_first=False)
    return coefficients, places


def _signal(memory: Infinite, coefficients: Tensor, places: Tensor) -> Tensor:
    """Return the signal at places, (P, D)."""
    return evaluate_basis(places.to(coefficients), **memory.basis) @ coefficients
