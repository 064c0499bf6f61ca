"""Options of the infinity-former, and the checks beyond their types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dist_mem.config.keys import TEXT, key
from dist_mem.memory.base import Memory
from dist_mem.memory.parts.basis import Geometry, growth

MOST_ENTRIES = 2**28  # of a regression matrix, 2 GiB in float64


@dataclass
class InfiniteOptions(Memory.Options):
    """Options of the infinity-former.

    Defaults are for segments of about 64 tokens; comments give the published GPT-2 values where they differ.
    """

    over: Any = field(default_factory=lambda: {"kind": "none"})  # the memory below; none: this one alone
    num_basis: int = key(256, at_least=1, at_most=2_048)  # N; published: 512
    basis_widths: list[float] = key([0.005, 0.01], above=0)  # published sorting: 0.01, 0.05
    ridge: float = key(0.5, above=0)  # published sorting: 1
    tau: float = key(0.75, above=0, below=1)  # share of [0, 1] that the past is contracted to, as published; GPT-2: 0.5
    # S, points at which the past is sampled to contract it; published: 512
    num_samples: int = key(256, at_least=1, at_most=65_536)
    # published: bin middles, zero rows on both sides of the signal | none: the paper, which has row i of L at i / L
    # (sec. 2.2), contracted or appended likewise, and no rows beyond [0, 1]
    padding: str = key("published", choices=("published", "none"))
    # linear | sticky, as published | stratified: sticky with less noise
    sampling: str = key("linear", choices=("linear", "sticky", "stratified"))
    num_bins: int = key(128, at_least=1, at_most=65_536)  # of the histogram of sticky sampling
    # affine: the paper's networks | softmax_moments: of a softmax over the samples, see `moments` | gibbs: exp of the
    # scores, over boxes (infinity-Video, parts/boxes.py); basis_widths, variance_floor and those of the KL are not used
    density: str = key("affine", choices=("affine", "softmax_moments", "gibbs"))
    # Of gibbs. closed: t = 1 is in the last box, integrals are exact | published: its row is lost, trapezoid rule
    gibbs_boxes: str = key("closed", choices=("closed", "published"))
    density_bias: bool = False  # of the affine networks, as in eq. 9-10; the released code has none
    # full: D x D keys and values, as released | heads: d x d on each head's slice, eq. 8
    projections: str = key("full", choices=("full", "heads"))
    # raw: rows of the block's input | normed: after its layer norm, as released for dialogue
    store: str = key("raw", choices=("raw", "normed"))
    gate: bool = True  # a convolution over three rows, then a sigmoid, on new rows
    prior_std: float = key(0.05, above=0)  # sigma_0 of the KL regulariser
    prior_mean: float | None = None  # None: widths only, as in the paper; the published GPT-2 configuration has -1
    kl_weight: float = key(1e-6, at_least=0)  # published: 1e-6 to 1e-5
    # mean: over the heads, as released | sum: eq. 20, H times as much
    kl_heads: str = key("mean", choices=("mean", "sum"))
    variance_floor: float = key(1e-4, above=0)  # published sorting: 1e-6
    # tokens after which all is forgotten; None: never; published GPT-2: 2048
    memory_threshold: int | None = key(None, at_least=1, at_most=TEXT)
    # first weights of the output, times model.init_std; 0: begins as the memory below
    output_init: float = key(1.0, at_least=0)


def check_options(options: InfiniteOptions) -> None:
    """Raise ValueError for values that the types allow but the memory does not."""
    if not options.basis_widths:
        raise ValueError("memory.basis_widths is [], but must have at least one width")
    if options.density != "gibbs" and options.num_basis % len(options.basis_widths):
        raise ValueError(
            f"memory.num_basis is {options.num_basis}, but must be a multiple of {len(options.basis_widths)}, the "
            "number of memory.basis_widths: every centre has one basis function of each width"
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
