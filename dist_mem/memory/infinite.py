"""The infinity-former's long-term memory (Martins et al. 2022) over any short-term memory.

The rows that leave the memory below become a continuous signal on [0, 1]. Only its coefficients over N basis functions
are kept, however long the document is. A new segment contracts the past and appends the evicted rows. Every query reads
under a normal density, and the reading is added to the attention of the memory below. Rows are pending in the state for
one segment, so that the gate in front of the regression gets a gradient; there is none through time.

Deviations from the published code (GPT-2 copy), besides those of options: the memory lives as long as its document
(`memory_threshold` for the published wipe); regression matrices are in float64; the unused query projection is left
out; the gate is initialised like all other weights, not by torch's default; the KL is a mean over the real queries of
a lane, and 0 for a lane without memory, where the published one is a mean over those of all lanes with memory. With
`store: normed` rows are stored raw and normalised when they enter the signal: so the block's layer norm learns from
them one segment later, as in the authors' dialogue code, but with the weights of that later segment. Shape letters: B
lanes, T segment, E evicted rows, S samples, N basis functions, D model, H heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.memory.base import LayerSpec, Memory, MemoryOutput, MemoryState, Stem
from dist_mem.memory.parts.basis import Fit, Geometry, evaluate_basis, expected_basis, fit_first, fit_matrices
from dist_mem.memory.parts.densities import affine_densities, divergence, make_projection, moments
from dist_mem.memory.parts.infinite_options import InfiniteOptions, check_growth, check_options
from dist_mem.memory.parts.inspection import Inspection
from dist_mem.memory.parts.signal_inspection import forget_signal, inspect_signal
from dist_mem.memory.parts.signal_places import Trace
from dist_mem.memory.parts.sticky import read_histogram, sample_positions
from dist_mem.nn.flops import Flops, product
from dist_mem.nn.layers import Dropout, merge_heads, split_heads


class State(NamedTuple):
    over: MemoryState  # of the memory below
    coefficients: Tensor  # (B, N, D) float32 at least, of the signal before `pending`; 0 without memory
    num_tokens: Tensor  # (B,) int64, tokens in the signal; 0 without memory
    pending: Tensor  # (B, E, D), rows that the memory below evicted in the last segment
    has_pending: Tensor  # (B,) bool
    histogram: Tensor  # (B, num_bins) float32 at least, where the last segment read; for sticky sampling
    document: Tensor  # (B,) int64, document id, a counter of the random draws
    segment: Tensor  # (B,) int64, index of the segment in the document, another such counter
    pending_len: Tensor | tuple[()] = ()  # (B,) int64, how many rows of `pending` are real; (): all


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


class Infinite(Memory):
    """Continuous long-term memory over another memory."""

    Options = InfiniteOptions

    def __init__(self, spec: LayerSpec, options: InfiniteOptions, over: Memory) -> None:
        super().__init__(spec, options)
        check_options(options)
        width = spec.num_heads * spec.d_head
        self.over = over
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
        self.basis: dict[str, Any] = {"widths": tuple(options.widths), "num_basis": options.num_basis}
        self.geometry = Geometry(
            **self.basis,
            ridge=options.ridge,
            tau=options.tau,
            num_samples=options.num_samples,
            num_rows=over.evicted_len,
            padding=options.padding,
        )
        check_growth(self.geometry, forgets=options.memory_threshold is not None)

    @property
    def norm(self) -> nn.Module:
        return norm_of(self.over)

    @property
    def kept_len(self) -> int:
        return self.over.kept_len

    @property
    def evicted_len(self) -> int:
        return self.over.evicted_len

    @property
    def takes_short_first(self) -> bool:
        return self.over.takes_short_first  # and then what it evicts is the segment itself

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_basis": 8, "widths": [0.1, 0.2], "num_samples": 2 * seg_len, "kl_weight": 0.1}

    def stem(self) -> Stem:
        return self.over.stem()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.over.reset_parameters()
        if self.options.output_init != 1.0 and not self.output.weight.is_meta:
            self.output.weight.mul_(self.options.output_init)

    def tie_parameters(self, first: Memory) -> None:
        assert isinstance(first, Infinite)
        self.over.tie_parameters(first.over)

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        return self.over.auxiliary_parameters()

    @property
    def num_rows(self) -> int:
        return self.over.num_rows

    def flops(self) -> Flops | None:
        spec, options = self.spec, self.options
        below = self.over.flops()
        if below is None:
            return None
        seg_len, d_model, width = spec.seg_len, spec.d_model, spec.num_heads * spec.d_head
        num_basis, evicted_len = options.num_basis, self.evicted_len
        norm_learns = options.store == "normed" and spec.norm == "pre"
        learns = int(options.gate or norm_learns)  # whether the signal gets a gradient
        fitted = product(num_basis, evicted_len, d_model, gradients=learns)
        if spec.short_first:
            fitted += product(num_basis, evicted_len, d_model, gradients=learns)
            num_places = evicted_len + 2 * (evicted_len // 2) * (options.padding == "published")
            fitted += product(num_basis, num_places, num_basis, gradients=0)
        if options.gate:
            fitted += product(evicted_len, 3 * d_model, d_model, gradients=1 + norm_learns)
        past = num_basis if options.sampling == "linear" else 2 * options.num_samples
        contracted = product(num_basis, past, d_model, gradients=0)
        inner = d_model if options.projections == "full" else d_model // spec.num_heads
        if self.densities is None:
            num_keys = options.num_samples
            read = product(num_keys, num_basis, d_model, gradients=learns)
            read += product(num_keys, inner, width, gradients=1 + learns)
        else:
            num_keys = 2
            read = product(2, num_basis, d_model, gradients=1 + learns) + product(2, inner, width)
        read += product(seg_len, width, num_keys) + product(num_basis, inner, width, gradients=1 + learns)
        return below + fitted + contracted + read + product(seg_len, num_basis + d_model, width)

    def init_state(self, document_ids: Tensor, device: torch.device | str, dtype: torch.dtype) -> State:
        num_lanes, d_model, options = document_ids.shape[0], self.spec.d_model, self.options
        exact = torch.promote_types(dtype, torch.float32)
        return State(
            over=self.over.init_state(document_ids, device, dtype),
            coefficients=torch.zeros(num_lanes, options.num_basis, d_model, device=device, dtype=exact),
            num_tokens=torch.zeros(num_lanes, device=device, dtype=torch.int64),
            pending=torch.zeros(num_lanes, self.evicted_len, d_model, device=device, dtype=dtype),
            has_pending=torch.zeros(num_lanes, device=device, dtype=torch.bool),
            histogram=torch.ones(num_lanes, options.num_bins, device=device, dtype=exact),
            document=document_ids.to(device=device, dtype=torch.int64, copy=True),
            segment=torch.zeros(num_lanes, device=device, dtype=torch.int64),
            pending_len=torch.zeros(num_lanes, device=device, dtype=torch.int64) if self.spec.short_first else (),
        )

    def forward(self, x: Tensor, state: State, valid_len: Tensor) -> MemoryOutput:
        below = self.over(x, state.over, valid_len)
        signal, num_tokens = self.append_pending(state, x.dtype)
        mu, variance = self.read_densities(below.query, signal)
        reading = self.read(mu, variance, signal, x.dtype)
        real = torch.arange(reading.shape[1], device=x.device) < valid_len[:, None]
        histogram = state.histogram
        if self.options.sampling != "linear":
            detached = mu.detach(), variance.detach()
            histogram = read_histogram(*detached, real, num_bins=self.options.num_bins)
        evicted = below.evicted
        pending = evicted.rows.detach().to(state.pending.dtype, copy=True)
        if self.spec.short_first:
            pending = torch.where(real[..., None], pending, 0.0)
        new_state = State(
            over=below.state,
            coefficients=signal.detach(),
            num_tokens=num_tokens,
            pending=pending,
            has_pending=evicted.valid,
            histogram=histogram,
            document=state.document,
            segment=state.segment + 1,
            pending_len=valid_len.to(torch.int64, copy=True) if self.spec.short_first else (),
        )
        y = below.y + F.pad(self.dropout(reading), (0, 0, below.y.shape[1] - reading.shape[1], 0))
        kl = self.regulariser(mu, variance, real & (num_tokens > 0)[:, None])
        # Nothing ever leaves the signal; a second signal over this one would take the same evicted rows.
        aux = {**below.aux, "kl": below.aux.get("kl", 0.0) + kl}
        return MemoryOutput(y, new_state, aux, below.query, evicted, below.logs)

    def append_pending(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the coefficients (B, N, D) of past and pending rows, and how many tokens they hold (B,)."""
        old, num_tokens, has_pending = state.coefficients, state.num_tokens, state.has_pending
        fit = fit_matrices(self.geometry, device=old.device, dtype=old.dtype)
        if self.options.memory_threshold is not None:
            full = has_pending & (num_tokens >= self.options.memory_threshold)
            old, num_tokens = old.masked_fill(full[:, None, None], 0.0), num_tokens.masked_fill(full, 0)
        rows = self.entering(state, dtype).to(old.dtype)
        is_first = (num_tokens == 0)[:, None, None]
        num_new: Tensor | int = self.spec.seg_len
        if isinstance(state.pending_len, Tensor):
            num_new = state.pending_len
            fitted = torch.where(is_first, fit_first(rows, num_new, geometry=self.geometry), fit.new @ rows)
        else:
            fitted = torch.where(is_first, fit.first, fit.new) @ rows
        appended = self.contract(old, state, fit) + fitted  # no past contracts to 0
        signal = torch.where(has_pending[:, None, None], appended, old)
        return signal, num_tokens + num_new * has_pending

    def entering(self, state: State, dtype: torch.dtype) -> Tensor:
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

    def contract(self, coefficients: Tensor, state: State, fit: Fit) -> Tensor:
        """Return the part of the new coefficients that is the past, sampled at S points spread evenly in (0, tau]."""
        if self.options.sampling == "linear":
            return fit.linear @ coefficients
        positions = self.positions(state).to(coefficients.dtype)
        return fit.past @ (evaluate_basis(positions, **self.basis) @ coefficients)

    def positions(self, state: State) -> Tensor:
        """Return the positions at which sticky sampling samples the past: (B, S)."""
        return sample_positions(
            state.histogram,
            self.options.sampling,
            num_samples=self.options.num_samples,
            counters=(self.spec.seed, self.spec.layer_index, state.document, state.segment),
        )

    def read_densities(self, query: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean in (0, 1) and variance of the density under which each query reads, both (H, B, T)."""
        exact, floor = query.to(signal.dtype), self.options.variance_floor
        if self.densities is not None:
            weighted = self.densities.to(signal.dtype) @ signal  # (B, 2, D)
            mu, variance = affine_densities(exact, self.keys(weighted, query.dtype), self.density_bias)
            return mu, variance.clamp(min=floor)
        number = self.options.num_samples
        places = (torch.arange(number, device=signal.device, dtype=signal.dtype) + 0.5) / number
        rows = evaluate_basis(places, **self.basis) @ signal  # (B, S, D)
        mu, variance = moments(exact, self.keys(rows, query.dtype), places)
        return mu, variance + floor

    def keys(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Project rows of the signal (B, R, D) to keys (H, B, R, K), in the dtype of the activations."""
        return split_heads(self.key(rows.to(dtype)), self.spec.num_heads).to(rows.dtype)

    def read(self, mu: Tensor, variance: Tensor, signal: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the expected signal under each head's densities, (B, T, D).

        An empty memory reads 0, because no layer here has a bias.
        """
        values = split_heads(self.value(signal.to(dtype)), self.spec.num_heads)  # (H, B, N, K)
        expected = expected_basis(mu, variance, **self.basis).to(dtype)  # (H, B, T, N)
        return self.output(merge_heads(expected @ values))

    @torch.no_grad()
    def inspect(self, x: Tensor, state: State, valid_len: Tensor, trace: Trace | None = None) -> Inspection:
        return inspect_signal(self, x, state, valid_len, trace)

    def forget(self, state: State, begin: Tensor, end: Tensor, trace: Trace | None = None) -> State:
        return forget_signal(self, state, begin, end, trace)

    def regulariser(self, mu: Tensor, variance: Tensor, counted: Tensor) -> Tensor:
        """Return the weighted divergence (B,), reduced over heads by `kl_heads`, averaged over `counted` (B, T)."""
        options = self.options
        kl = divergence(mu, variance, prior_std=options.prior_std, prior_mean=options.prior_mean)
        reduced = kl.sum(dim=0) if options.kl_heads == "sum" else kl.mean(dim=0)
        total = torch.where(counted, reduced, 0.0).sum(dim=1)
        return options.kl_weight * total / counted.sum(dim=1).clamp(min=1)
