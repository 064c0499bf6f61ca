"""The signal of an infinite memory: where its rows are, and what taking a passage out of it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.data.shard import Index
from dist_mem.inspection.regression_error import watched
from dist_mem.inspection.walk import walk
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts.basis import evaluate_basis
from dist_mem.memory.parts.inspector import Inspector
from tests.inspection.test_reading import KINDS, SEG_LEN, opened

FINE: dict[str, Any] = {"num_basis": 64, "widths": [0.02, 0.05], "num_samples": 64, "tau": 0.8, "ridge": 1e-4}


@pytest.mark.parametrize("kind", ["infinite", "sticky", "infinite_over_transformer_xl", "infinite_over_compressive"])
def test_places_are_those_that_the_regression_error_follows(
    library: Path, index: Index, tmp_path: Path, kind: str
) -> None:
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


def _signal(memory: Infinite, coefficients: Tensor, places: Tensor) -> Tensor:
    """Return the signal at places, (P, D)."""
    return evaluate_basis(places.to(coefficients), **memory.basis) @ coefficients
