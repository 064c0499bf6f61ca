"""Checks of the infinity-former's options beyond their types."""

from __future__ import annotations

from typing import Any

from dist_mem.memory.parts.basis import PADDINGS, Geometry, growth
from dist_mem.memory.parts.densities import DENSITIES, KL_HEADS, PROJECTIONS
from dist_mem.memory.parts.sticky import SAMPLINGS

STORES = ("raw", "normed")
MOST_ENTRIES = 2**28  # of a regression matrix, 2 GiB in float64
CHOICES = {
    "sampling": SAMPLINGS,
    "padding": PADDINGS,
    "density": DENSITIES,
    "projections": PROJECTIONS,
    "kl_heads": KL_HEADS,
    "store": STORES,
}


def check_options(options: Any) -> None:
    """Raise ValueError for values that the types allow but the memory does not."""
    for name, words in CHOICES.items():
        if getattr(options, name) not in words:
            raise ValueError(f"memory.{name} is {getattr(options, name)!r}, but must be one of {', '.join(words)}")
    for name in ("num_basis", "num_samples", "num_bins", "ridge", "prior_std", "variance_floor"):
        if not getattr(options, name) > 0:
            raise ValueError(f"memory.{name} is {getattr(options, name)}, but must be greater than 0")
    if not 0.0 < options.tau < 1.0:
        raise ValueError(f"memory.tau is {options.tau}, but must lie between 0 and 1")
    if not options.widths or not all(width > 0 for width in options.widths):
        raise ValueError(f"memory.widths is {options.widths}, but must be a list of numbers greater than 0")
    if options.num_basis % len(options.widths):
        raise ValueError(
            f"memory.num_basis is {options.num_basis}, but must be a multiple of {len(options.widths)}, the number of "
            "memory.widths: every centre has one basis function of each width"
        )
    for name in ("output_init", "kl_weight"):
        if getattr(options, name) < 0:
            raise ValueError(f"memory.{name} is {getattr(options, name)}, but must be at least 0")
    if options.memory_threshold is not None and options.memory_threshold < 1:
        raise ValueError(
            f"memory.memory_threshold is {options.memory_threshold}, but must be at least 1; null never forgets"
        )
    if options.density_bias and options.density != "affine":
        raise ValueError(
            f"memory.density_bias is true, but memory.density = {options.density} has no affine networks (eq. 9-10): "
            "set memory.density_bias to false"
        )


def check_growth(geometry: Geometry, *, forgets: bool) -> None:
    """Raise ValueError for matrices that are too large, and for a signal that grows at every update.

    A growing signal that is never forgotten becomes infinite. With 64 functions of widths 0.005 and 0.01, coefficients
    were 3e23 after 8,896 tokens. This check is not in the paper.
    """
    num_rows = geometry.num_samples + geometry.num_rows
    if num_rows * geometry.num_basis > MOST_ENTRIES:
        raise ValueError(
            f"memory.num_basis is {geometry.num_basis}, whose regression on {num_rows:,} rows (memory.num_samples, and "
            f"those of train.seg_len that enter at once) has more than {MOST_ENTRIES:,} entries: make one of them less"
        )
    factor = 0.0 if forgets else growth(geometry)
    if factor >= 1.0:
        raise ValueError(
            f"memory.widths are {list(geometry.widths)}, too narrow for memory.num_basis = {geometry.num_basis} with "
            f"memory.num_samples = {geometry.num_samples}: the remembered signal grows {factor:.2f} times at every "
            "update; take wider ones, or more basis functions"
        )
