"""Comparison with reference vectors. The largest errors are noted for the table of benchmarks/parity.py."""

from __future__ import annotations

import re

from torch import Tensor

noted: dict[str, float] = {}  # outputs, states or gradients -> the largest error since it was cleared
allowed = 0.0  # more than a test's own tolerance, for files in float32


def assert_close(
    ours: Tensor, golden: Tensor, what: str, *, kind: str | None = None, tolerance: float = 1e-10, floor: float = 1e-12
) -> None:
    """Assert that two arrays agree up to `tolerance` times the largest entry.

    Args:
        what: key or description of the array.
        kind: outputs, states or gradients; None: that of `what`.
        floor: the least that counts as the largest entry; infinity: the error is not divided.
    """
    assert ours.shape == golden.shape, f"{what}: shape {tuple(ours.shape)} instead of {tuple(golden.shape)}"
    golden = golden.detach()
    scale = 1.0 if floor == float("inf") else golden.abs().max().clamp(min=floor)
    error = float((ours.detach() - golden).abs().max() / scale)
    note(kind or kind_of(what), error)
    assert error <= max(tolerance, allowed), f"{what}: error {error:.1e}"


def note(kind: str, error: float) -> None:
    """Note an error if it is the largest of its kind."""
    noted[kind] = max(noted.get(kind, 0.0), error)


def kind_of(what: str) -> str:
    """Return whether a key or a description is of outputs, states or gradients."""
    if "grad" in what:
        return "gradients"
    is_state = re.search(r"state|S_after|/S$|memory tokens|cache|matrix|^norm|/database/", what)
    return "states" if is_state else "outputs"
