"""The signal of an infinity-former's long-term memory: how rows enter it, how it is contracted, and how it is read.

dist_mem/memory/infinite.py makes a memory of it. Shape letters: B lanes, T segment, E evicted rows, S samples, N basis
functions, D model, H heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dist_mem.memory.base import LayerSpec, Memory, MemoryState, OverMemory
from dist_mem.memory.parts import fused_signal
from dist_mem.memory.parts.basis import Fit, Geometry, evaluate_at, expected_basis, fit_first, fit_matrices
from dist_mem.memory.parts.boxes import bin_mass, box_histogram, box_masses, box_moments
from dist_mem.memory.parts.densities import affine_densities, divergence, make_projection, moments
from dist_mem.memory.parts.infinite_options import InfiniteOptions, check_growth, check_options
from dist_mem.memory.parts.kernel_choice import by_kernels, choose
from dist_mem.memory.parts.sticky import bin_masses, read_histogram, sample_positions
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.layers import Dropout, merge_heads, split_heads


class SignalState(NamedTuple):
    over: MemoryState  # of the memory below
    coefficients: Tensor  # (B, N, D) float32 at least, of the signal before `pending`; 0 without memory
    num_tokens: Tensor  # (B,) int64, tokens in the signal; 0 without memory
    pending: Tensor  # (B, E, D), rows that the memory below evicted in the last segment
    has_pending: Tensor  # (B,) bool
    histogram: Tensor  # (B, num_bins) float32 at least, where the last segment read; for sticky sampling
    document: Tensor  # (B,) int64, document id, a counter of the random draws
    segment: Tensor  # (B,) int64, index of the segment in the document, another such counter
    pending_len: Tensor | tuple[()] = ()  # (B,) int64, how many rows of `pending` are real; (): all


class SignalRows(NamedTuple):
    """What queries read of a signal."""

    keys: Tensor  # (H, B, R, K) float32 at least, from which the densities are computed
    values: Tensor  # (H, B, N, K)


class Density(NamedTuple):
    """Where each query reads the signal: normal densities, or the masses of Gibbs densities in boxes."""

    mu: Tensor | None = None  # (H, B, T) in (0, 1)
    variance: Tensor | None = None  # (H, B, T)
    mass: Tensor | None = None  # (H, B, T, N), of boxes; None: a normal density

    def histogram(self, real: Tensor, *, num_bins: int) -> Tensor:
        """Return what all heads and real queries read in equal bins of [0, 1], (B, num_bins) without gradient."""
        if self.mass is not None:
            return box_histogram(self.mass.detach(), real, num_bins=num_bins)
        mu, variance = self.moments()
        return read_histogram(mu.detach(), variance.detach(), real, num_bins=num_bins)

    def bins(self, num_bins: int) -> Tensor:
        """Return each query's mass in equal bins of [0, 1], (H, B, T, num_bins)."""
        return (
            bin_mass(self.mass, num_bins) if self.mass is not None else bin_masses(*self.moments(), num_bins=num_bins)
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance, both (H, B, T)."""
        if self.mass is not None:
            return box_moments(self.mass)
        assert self.mu is not None and self.variance is not None
        return self.mu, self.variance


def norm_of(memory: Memory) -> nn.Module:
    """Return the layer norm of a memory's input, the identity with post-norm.

    Raises:
        ValueError: the memory has no `norm`.
    """
    norm = getattr(memory, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ValueError(
            "memory.store is normed, but the memory below has no layer norm `norm`: set memory.store to raw, or "
            "memory.over.kind to a memory that has one"
        )
    return norm


class Signal(OverMemory):
    """The parameters of a long-term memory over another one, and what is computed with its signal."""

    computes = "signal"
    over: Memory

    def __init__(self, spec: LayerSpec, options: InfiniteOptions, over: Memory) -> None:
        super().__init__(spec, options, over)
        check_options(options)
        width = spec.num_heads * spec.d_head
        self.carries_gradient, self.num_after = over.carries_gradient, over.num_after
        self.evicts_parts = over.evicts_parts
        self.takes_short_first = over.takes_short_first  # and then what it evicts is the segment itself
        if options.store == "normed":
            norm_of(over)
        self.gate = nn.Conv1d(spec.d_model, spec.d_model, kernel_size=3, padding=1) if options.gate else None
        # Weights of the networks for mean and variance.
        self.densities = nn.Parameter(torch.zeros(2, options.num_basis)) if options.density == "affine" else None
        self.density_bias = nn.Parameter(torch.zeros(2)) if options.density_bias else None
        heads = {"num_heads": spec.num_heads, "d_head": spec.d_head}
        self.key = make_projection(options.projections, spec.d_model, **heads)
        self.value = make_projection(options.projections, spec.d_model, **heads)
        self.output = nn.Linear(width, spec.d_model, bias=False)
        self.dropout = Dropout(spec.dropout)
        self.basis: dict[str, Any] = {"widths": tuple(options.basis_widths), "num_basis": options.num_basis}
        if options.density == "gibbs":
            self.basis = {"widths": (), "num_basis": options.num_basis, "boxes": options.gibbs_boxes}
        self.geometry = Geometry(
            **self.basis,
            ridge=options.ridge,
            tau=options.tau,
            num_samples=options.num_samples,
            num_rows=over.evicted_len,
            padding=options.padding,
        )
        check_growth(self.geometry, forgets=options.memory_threshold is not None)
        fit_matrices(self.geometry, device="cpu", dtype=torch.float64)  # now: a forward may have tensors without values

    @property
    def norm(self) -> nn.Module:
        return norm_of(self.over)

    @property
    def kept_len(self) -> int:
        return self.over.kept_len

    @property
    def tokens_per_row(self) -> int:
        return self.over.tokens_per_row

    def choose_kernels(self, device_type: str, num_queries: int) -> BackEndChoice:
        """Return whether our kernels read the signal, or torch's operators."""
        return choose(
            self.spec.back_end,
            device_type,
            num_queries,
            width=self.spec.d_head,
            refused="memory.density is gibbs, whose masses are a softmax" if self.options.density == "gibbs" else None,
            reason="our kernels keep the expectations in registers",
        )

    def append_pending(self, state: SignalState, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the coefficients (B, N, D) of past and pending rows, and how many tokens they hold (B,)."""
        old, num_tokens, has_pending = state.coefficients, state.num_tokens, state.has_pending
        fit = fit_matrices(self.geometry, device=old.device, dtype=old.dtype)
        if self.options.memory_threshold is not None:
            full = has_pending & (num_tokens >= self.options.memory_threshold)
            old, num_tokens = old.masked_fill(full[:, None, None], 0.0), num_tokens.masked_fill(full, 0)
        rows = self.pending_input(state, dtype)
        is_first = (num_tokens == 0)[:, None, None]
        num_new: Tensor | int = self.spec.seg_len
        by_kernel = self.options.sampling == "linear" and not isinstance(state.pending_len, Tensor)
        if by_kernel and self.geometry.boxes is None and by_kernels(self, old, self.spec.seg_len):
            signal = fused_signal.append_rows(fit, rows, old, has_new=has_pending, is_first=is_first.flatten())
            return signal, num_tokens + num_new * has_pending
        rows = rows.to(old.dtype)
        if isinstance(state.pending_len, Tensor):
            num_new = state.pending_len
            fitted = torch.where(is_first, fit_first(rows, num_new, geometry=self.geometry), fit.new @ rows)
        else:
            fitted = torch.where(is_first, fit.first, fit.new) @ rows
        appended = self.contract(old, state, fit) + fitted  # no past contracts to 0
        signal = torch.where(has_pending[:, None, None], appended, old)
        return signal, num_tokens + num_new * has_pending

    def pending_input(self, state: SignalState, dtype: torch.dtype) -> Tensor:
        """Return the pending rows as input of the regression: (B, E, D)."""
        rows = state.pending.to(dtype)
        if self.options.store == "normed":
            rows = self.norm(rows)
        if isinstance(state.pending_len, Tensor):
            real = torch.arange(rows.shape[1], device=rows.device) < state.pending_len[:, None]
            rows = torch.where(real[..., None], rows, 0.0)  # a layer norm turns padding into its bias
        if self.gate is None:
            return rows
        return rows * self.gate(rows.transpose(1, 2)).transpose(1, 2).sigmoid()

    def contract(self, coefficients: Tensor, state: SignalState, fit: Fit) -> Tensor:
        """Return the part of the new coefficients that is the past, sampled at S points spread evenly in (0, tau]."""
        if self.options.sampling == "linear":
            return fit.linear @ coefficients
        return fit.past @ (evaluate_at(self.geometry, self.positions(state), coefficients) @ coefficients)

    def positions(self, state: SignalState) -> Tensor:
        """Return the positions at which sticky sampling samples the past: (B, S)."""
        return sample_positions(
            state.histogram,
            self.options.sampling,
            num_samples=self.options.num_samples,
            counters=(self.spec.seed, self.spec.layer_index, state.document, state.segment),
        )

    def project_signal(self, signal: Tensor, dtype: torch.dtype) -> SignalRows:
        """Return what queries read of a signal (B, N, D), projected in `dtype`, that of the activations."""
        rows = signal  # of boxes
        if self.densities is not None:
            rows = self.densities.to(signal.dtype) @ signal  # (B, 2, D)
        elif self.geometry.boxes is None:
            rows = self.geometry.evaluate(self.sample_places(signal)) @ signal  # (B, S, D)
        keys = split_heads(self.key(rows.to(dtype)), self.spec.num_heads).to(rows.dtype)
        return SignalRows(keys, split_heads(self.value(signal.to(dtype)), self.spec.num_heads))

    def sample_places(self, like: Tensor) -> Tensor:
        """Return where `density: softmax_moments` samples the signal, (S,), in the dtype of `like`."""
        number = self.options.num_samples
        return (torch.arange(number, device=like.device, dtype=like.dtype) + 0.5) / number

    def density(self, query: Tensor, keys: Tensor) -> Density:
        """Return the density under which each query (H, B, T, K) reads the signal with these keys, see `SignalRows`."""
        floor = self.options.variance_floor
        if self.options.density == "softmax_moments" and by_kernels(self, query, query.shape[2]):
            # The dtype that `project_signal` projects in.
            mu, variance = fused_signal.moments(query, keys.to(query.dtype))
            return Density(mu, variance + floor)
        exact = query.to(keys.dtype)
        if self.geometry.boxes is not None:
            return Density(mass=box_masses(exact, keys, boxes=self.geometry.boxes))
        if self.densities is not None:
            mu, variance = affine_densities(exact, keys, self.density_bias)
            return Density(mu, variance.clamp(min=floor))
        mu, variance = moments(exact, keys, self.sample_places(keys))
        return Density(mu, variance + floor)

    def read(self, density: Density, values: Tensor) -> Tensor:
        """Return the expected signal under each head's densities, (B, T, D).

        An empty memory reads 0, because no layer here has a bias.
        """
        if density.mu is not None and by_kernels(self, values, density.mu.shape[2]):
            return self.output(merge_heads(fused_signal.read_signal(*density.moments(), values, **self.basis)))
        expected = density.mass if density.mass is not None else expected_basis(*density.moments(), **self.basis)
        return self.output(merge_heads(expected.to(values.dtype) @ values))

    def regulariser(self, density: Density, counted: Tensor) -> dict[str, Tensor]:
        """Return as `kl` the weighted divergence (B,), reduced by `kl_heads`, averaged over `counted` (B, T).

        A Gibbs density has none: its width follows from the scores.
        """
        if density.mass is not None:
            return {}
        options = self.options
        mu, variance = density.moments()
        kl = divergence(mu, variance, prior_std=options.prior_std, prior_mean=options.prior_mean)
        reduced = kl.sum(dim=0) if options.kl_heads == "sum" else kl.mean(dim=0)
        total = torch.where(counted, reduced, 0.0).sum(dim=1)
        return {"kl": options.kl_weight * total / counted.sum(dim=1).clamp(min=1)}
