"""Options of the infinity-former, and the checks beyond their types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dist_mem.config.keys import TEXT, key
from dist_mem.memory.base import Memory, check_choices
from dist_mem.memory.parts.basis import Geometry, growth

MOST_ENTRIES = 2**28  # of a regression matrix, 2 GiB in float64


@dataclass
class InfiniteOptions(Memory.Options):
    """Options of the infinity-former.

    Defaults are for segments of about 64 tokens; comments give the published GPT-2 values where they differ.
    """

    over: Any = field(default_factory=lambda: {"kind": "none"})  # the memory below; none: this one alone
    num_basis: int = key(256, at_most=2_048)  # N; published: 512
    basis_widths: list[float] = field(default_factory=lambda: [0.005, 0.01])  # published sorting: 0.01, 0.05
    ridge: float = 0.5  # published sorting: 1
    tau: float = 0.75  # share of [0, 1] that the past is contracted to, as published for sorting; GPT-2: 0.5
    # S, points at which the past is sampled to contract it; published: 512
    num_samples: int = key(256, at_most=65_536)
    # The paper has row i of L at i / L (sec. 2.2), contracted or appended likewise, and no rows beyond [0, 1].
    padding: str = "published"  # published: bin middles, zero rows on both sides of the signal | none: the paper
    sampling: str = "linear"  # linear | sticky, as published | stratified: sticky with less noise
    num_bins: int = key(128, at_most=65_536)  # of the histogram of sticky sampling
    # affine: the paper's networks | softmax_moments: of a softmax over the samples, see `moments` | gibbs: exp of the
    # scores, over boxes (infinity-Video, parts/boxes.py); basis_widths, variance_floor and those of the KL are not used
    density: str = "affine"
    # Of gibbs. closed: t = 1 is in the last box, integrals are exact | published: its row is lost, trapezoid rule
    gibbs_boxes: str = "closed"
    density_bias: bool = False  # of the affine networks, as in eq. 9-10; the released code has none
    projections: str = "full"  # full: D x D keys and values, as released | heads: d x d on each head's slice, eq. 8
    store: str = "raw"  # raw: rows of the block's input | normed: after its layer norm, as released for dialogue
    gate: bool = True  # a convolution over three rows, then a sigmoid, on new rows
    prior_std: float = 0.05  # sigma_0 of the KL regulariser
    prior_mean: float | None = None  # None: widths only, as in the paper; the published GPT-2 configuration has -1
    kl_weight: float = 1e-6  # published: 1e-6 to 1e-5
    kl_heads: str = "mean"  # mean: over the heads, as released | sum: eq. 20, H times as much
    variance_floor: float = 1e-4  # published sorting: 1e-6
    # tokens after which all is forgotten; published GPT-2: 2048
    memory_threshold: int | None = key(None, at_most=TEXT)
    output_init: float = 1.0  # first weights of the output, times model.init_std; 0: begins as the memory below


def check_options(options: InfiniteOptions) -> None:
    """Raise ValueError for values that the types allow but the memory does not."""
    check_choices(
        options,
        sampling=("linear", "sticky", "stratified"),
        padding=("published", "none"),
        density=("affine", "softmax_moments", "gibbs"),
        gibbs_boxes=("closed", "published"),
        projections=("full", "heads"),
        kl_heads=("mean", "sum"),
        store=("raw", "normed"),
    )
    for name in ("num_basis", "num_samples", "num_bins", "ridge", "prior_std", "variance_floor"):
        if not getattr(options, name) > 0:
            raise ValueError(f"memory.{name} is {getattr(options, name)}, but must be greater than 0")
    if not 0.0 < options.tau < 1.0:
        raise ValueError(f"memory.tau is {options.tau}, but must lie between 0 and 1")
    if not options.basis_widths or not all(width > 0 for width in options.basis_widths):
        raise ValueError(f"memory.basis_widths is {options.basis_widths}, but must be a list of numbers greater than 0")
    if options.density != "gibbs" and options.num_basis % len(options.basis_widths):
        raise ValueError(
            f"memory.num_basis is {options.num_basis}, but must be a multiple of {len(options.basis_widths)}, the "
            "number of memory.basis_widths: every centre has one basis function of each width"
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
    # Boxes are means of rows, which cannot grow.
    factor = 0.0 if forgets or geometry.boxes is not None else growth(geometry)
    if factor >= 1.0:
        raise ValueError(
            f"memory.basis_widths are {list(geometry.widths)}, too narrow for memory.num_basis = {geometry.num_basis} "
            f"with memory.num_samples = {geometry.num_samples}: the remembered signal grows {factor:.2f} times at "
            "every update; take wider ones, or more basis functions"
        )
