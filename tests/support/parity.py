"""Comparison with reference vectors."""

from torch import Tensor


def assert_close(ours: Tensor, golden: Tensor, what: str, *, tolerance: float = 1e-10, floor: float = 1e-12) -> None:
    """Assert that two arrays agree up to `tolerance` times the largest entry.

    Args:
        what: key or description of the array.
        floor: the least that counts as the largest entry; infinity: the error is not divided.
    """
    assert ours.shape == golden.shape, f"{what}: shape {tuple(ours.shape)} instead of {tuple(golden.shape)}"
    golden = golden.detach()
    scale = 1.0 if floor == float("inf") else golden.abs().max().clamp(min=floor)
    error = float((ours.detach() - golden).abs().max() / scale)
    assert error <= tolerance, f"{what}: error {error:.1e}"
