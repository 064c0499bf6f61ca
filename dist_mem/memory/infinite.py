"""The infinity-former's long-term memory (Martins et al. 2022) over any short-term memory.

The rows that leave the memory below become a continuous signal on [0, 1]: its coefficients over N basis functions are
all that is kept, however long the document. A new segment contracts the past and appends what was evicted; every query
reads under a normal density, and the reading is added to the attention of the memory below. Rows wait one segment in
the state, so that the gate in front of the regression gets its gradient; there is none through time.

Deviations from the published code (GPT-2 copy), besides those of options: the memory lives as long as its document
(`memory_threshold` for the published wipe); regression matrices in float64; the unused query projection is left out;
the gate starts like all other weights, not from torch's default; the KL is a mean over the real queries of a lane, 0
where it has no memory yet, where the published one is over those of all lanes that have one. Shape letters: B lanes, T
segment, E evicted rows, S samples, N basis functions, D model, H heads, K head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.flops import Flops, product
from dist_mem.layers import Dropout, merge_heads, split_heads
from dist_mem.memory.base import LayerSpec, Memory, MemoryOutput, Stem
from dist_mem.memory.parts.basis import PADDINGS, Fit, Geometry, evaluate_basis, expected_basis, fit_matrices, growth
from dist_mem.memory.parts.sticky import SAMPLINGS, read_histogram, sample_positions

DENSITIES = ("affine", "moments")


class State(NamedTuple):
    over: Any  # state of the memory below
    coefficients: Tensor  # (B, N, D) float32 at least, of the signal before `pending`; 0 without memory
    num_tokens: Tensor  # (B,) int64, tokens in the signal; 0 without memory
    pending: Tensor  # (B, E, D), what the memory below evicted in the last segment
    has_pending: Tensor  # (B,) bool
    histogram: Tensor  # (B, num_bins) float32 at least, where the last segment read; of sticky sampling
    document: Tensor  # (B,) int64, and
    segment: Tensor  # (B,) int64, its number in the document: counters of the random draws


class Infinite(Memory):
    """Defaults are for segments of about 64 tokens; the published GPT-2 values are given where they differ."""

    @dataclass
    class Options:
        over: Any = field(default_factory=lambda: {"kind": "none"})  # the memory below; none: this one alone
        num_basis: int = 256  # N; published: 512
        widths: list[float] = field(default_factory=lambda: [0.005, 0.01])  # published sorting: 0.01, 0.05
        ridge: float = 0.5  # published sorting: 1
        tau: float = 0.75  # share of [0, 1] that the past is contracted to, as published for sorting; GPT-2: 0.5
        num_samples: int = 256  # S, points at which the past is sampled to contract it; published: 512
        padding: str = "published"  # published: zero rows on both sides of the signal | none: the paper's plain form
        sampling: str = "linear"  # linear | sticky, as published | stratified: sticky with less noise
        num_bins: int = 128  # of the histogram of sticky sampling
        density: str = "affine"  # affine: the paper's networks | moments: of a softmax over the samples, see `moments`
        gate: bool = True  # a convolution over three rows, then a sigmoid, on new rows
        prior_std: float = 0.05  # sigma_0 of the KL regulariser
        prior_mean: float | None = None  # None: widths only, as in the paper; the published GPT-2 configuration has -1
        kl_weight: float = 1e-6  # published: 1e-6 to 1e-5
        variance_floor: float = 1e-4  # published sorting: 1e-6
        memory_threshold: int | None = None  # tokens after which all is forgotten; published GPT-2: 2048
        output_init: float = 1.0  # first weights of the output, times model.init_std; 0: begins as the memory below

    def __init__(self, spec: LayerSpec, options: Any, over: Memory) -> None:
        super().__init__(spec, options)
        check_options(options)
        width = spec.num_heads * spec.d_head
        self.over = over
        self.gate = nn.Conv1d(spec.d_model, spec.d_model, kernel_size=3, padding=1) if options.gate else None
        # Weights of mu's and the variance's networks.
        self.densities = nn.Parameter(torch.zeros(2, options.num_basis)) if options.density == "affine" else None
        self.key = nn.Linear(spec.d_model, width, bias=False)
        self.value = nn.Linear(spec.d_model, width, bias=False)
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
    def evicted_len(self) -> int:
        return self.over.evicted_len

    @classmethod
    def small_options(cls, seg_len: int) -> dict[str, Any]:
        return {"num_basis": 8, "widths": [0.1, 0.2], "num_samples": 2 * seg_len, "kl_weight": 0.1}

    def stem(self) -> Stem:
        return self.over.stem()

    @torch.no_grad()
    def begin(self) -> None:
        self.over.begin()
        if self.options.output_init != 1.0 and not self.output.weight.is_meta:
            self.output.weight.mul_(self.options.output_init)

    def share(self, first: Memory) -> None:
        assert isinstance(first, Infinite)
        self.over.share(first.over)

    def apart(self) -> list[nn.Parameter]:
        return self.over.apart()

    @property
    def num_rows(self) -> int:
        return self.over.num_rows

    def flops(self) -> Flops | None:
        spec, options = self.spec, self.options
        below = self.over.flops()
        if below is None:
            return None
        seg_len, d_model, width = spec.seg_len, spec.d_model, spec.num_heads * spec.d_head
        num_basis, evicted_len, learns = options.num_basis, self.evicted_len, 1 if options.gate else 0
        fitted = product(num_basis, evicted_len, d_model, gradients=learns)
        if options.gate:
            fitted += product(evicted_len, 3 * d_model, d_model, gradients=1)
        past = num_basis if options.sampling == "linear" else 2 * options.num_samples
        contracted = product(num_basis, past, d_model, gradients=0)
        if self.densities is None:
            num_keys = options.num_samples
            read = product(num_keys, num_basis, d_model, gradients=learns)
            read += product(num_keys, d_model, width, gradients=1 + learns)
        else:
            num_keys = 2
            read = product(2, num_basis, d_model, gradients=1 + learns) + product(2, d_model, width)
        read += product(seg_len, width, num_keys) + product(num_basis, d_model, width, gradients=1 + learns)
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
        new_state = State(
            over=below.state,
            coefficients=signal.detach(),
            num_tokens=num_tokens,
            pending=evicted.rows.detach().to(state.pending.dtype, copy=True),
            has_pending=evicted.valid,
            histogram=histogram,
            document=state.document,
            segment=state.segment + 1,
        )
        stem_len = below.y.shape[1] - reading.shape[1]
        y = below.y + F.pad(self.dropout(reading), (0, 0, stem_len, 0))
        kl = self.regulariser(mu, variance, real & (num_tokens > 0)[:, None])
        # Nothing ever leaves the signal; a second one over this one is made of the same evicted rows.
        return MemoryOutput(y, new_state, {**below.aux, "kl": below.aux.get("kl", 0.0) + kl}, below.query, evicted)

    def append_pending(self, state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Coefficients (B, N, D) of past and pending rows, and how many tokens they hold (B,)."""
        old, num_tokens, has_pending = state.coefficients, state.num_tokens, state.has_pending
        fit = fit_matrices(self.geometry, device=old.device, dtype=old.dtype)
        if self.options.memory_threshold is not None:
            full = has_pending & (num_tokens >= self.options.memory_threshold)
            old, num_tokens = old.masked_fill(full[:, None, None], 0.0), num_tokens.masked_fill(full, 0)
        rows = self.gated(state.pending.to(dtype)).to(old.dtype)
        matrix = torch.where((num_tokens == 0)[:, None, None], fit.first, fit.new)
        appended = self.contract(old, state, fit) + matrix @ rows  # no past contracts to 0
        signal = torch.where(has_pending[:, None, None], appended, old)
        return signal, num_tokens + self.spec.seg_len * has_pending

    def gated(self, rows: Tensor) -> Tensor:
        """New rows (B, E, D) as the regression sees them."""
        if self.gate is None:
            return rows
        return rows * self.gate(rows.transpose(1, 2)).transpose(1, 2).sigmoid()

    def contract(self, coefficients: Tensor, state: State, fit: Fit) -> Tensor:
        """What the past, sampled at S points and laid out evenly in (0, tau], adds to the new coefficients."""
        if self.options.sampling == "linear":
            return fit.linear @ coefficients
        positions = self.positions(state).to(coefficients.dtype)
        return fit.past @ (evaluate_basis(positions, **self.basis) @ coefficients)

    def positions(self, state: State) -> Tensor:
        """Where sticky sampling samples the past: (B, S)."""
        return sample_positions(
            state.histogram,
            self.options.sampling,
            num_samples=self.options.num_samples,
            counters=(self.spec.seed, self.spec.layer_index, state.document, state.segment),
        )

    def read_densities(self, query: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Mean in (0, 1) and variance of the density under which each query reads, both (H, B, T).

        The networks are linear in the scores, w . (K q) = (K^T w) . q with K = signal W_K: no score is ever formed.
        """
        if self.densities is None:
            return self.moments(query, signal)
        weighted = (self.densities.to(signal.dtype) @ signal).to(query.dtype)  # (B, 2, D)
        keys = split_heads(self.key(weighted), self.spec.num_heads).to(signal.dtype)  # (H, B, 2, K)
        scores = query.to(signal.dtype) @ keys.transpose(-1, -2) / math.sqrt(self.spec.d_head)
        mu, variance = scores.unbind(-1)
        return mu.sigmoid(), F.softplus(variance).clamp(min=self.options.variance_floor)

    def moments(self, query: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of where a softmax over samples of the signal would look, both (H, B, T).

        As in continuous attention (Martins et al. 2020, "Sparse and continuous attention mechanisms", sec. 4): a query
        finds the rows that are like it, where the affine networks would have to learn where rows lie.
        """
        number = self.options.num_samples
        places = (torch.arange(number, device=signal.device, dtype=signal.dtype) + 0.5) / number
        rows = evaluate_basis(places, **self.basis) @ signal  # (B, S, D)
        keys = split_heads(self.key(rows.to(query.dtype)), self.spec.num_heads).to(signal.dtype)  # (H, B, S, K)
        scores = query.to(signal.dtype) @ keys.transpose(-1, -2) / math.sqrt(self.spec.d_head)
        attention = scores.softmax(dim=-1)
        mu = (attention * places).sum(dim=-1)
        spread = (attention * (places - mu[..., None]).square()).sum(dim=-1)  # E[t^2] - mu^2 would cancel in fp32
        return mu, spread + self.options.variance_floor

    def read(self, mu: Tensor, variance: Tensor, signal: Tensor, dtype: torch.dtype) -> Tensor:
        """The expected signal under the densities, by heads: (B, T, D). An empty memory reads 0: nothing has a bias."""
        values = split_heads(self.value(signal.to(dtype)), self.spec.num_heads)  # (H, B, N, K)
        expected = expected_basis(mu, variance, **self.basis).to(dtype)  # (H, B, T, N)
        return self.output(merge_heads(expected @ values))

    def regulariser(self, mu: Tensor, variance: Tensor, counted: Tensor) -> Tensor:
        """Weighted KL(N(mu, variance) || N(mu_0, sigma_0^2)) per lane (B,), the mean over heads and `counted` (B, T).

        Without `prior_mean` the term of the means is left out, as in eq. 20, whose logarithm lacks the square.
        """
        ratio = variance / self.options.prior_std**2
        kl = 0.5 * (ratio - ratio.log() - 1.0)
        if self.options.prior_mean is not None:
            kl = kl + 0.5 * ((mu - self.options.prior_mean) / self.options.prior_std).square()
        total = torch.where(counted, kl.mean(dim=0), 0.0).sum(dim=1)
        return self.options.kl_weight * total / counted.sum(dim=1).clamp(min=1)


def check_options(options: Any) -> None:
    """Raise ValueError for what the types let pass."""
    for name, words in (("sampling", SAMPLINGS), ("padding", PADDINGS), ("density", DENSITIES)):
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
    if options.output_init < 0:
        raise ValueError(f"memory.output_init is {options.output_init}, but must be at least 0")
    if options.memory_threshold is not None and options.memory_threshold < 1:
        raise ValueError(
            f"memory.memory_threshold is {options.memory_threshold}, but must be at least 1; null never forgets"
        )


def check_growth(geometry: Geometry, *, forgets: bool) -> None:
    """Raise ValueError for a signal that grows at every update, and is never forgotten: it ends in infinity.

    Not in the paper. With 64 functions of widths 0.005 and 0.01 coefficients were 3e23 after 8,896 tokens.
    """
    factor = 0.0 if forgets else growth(geometry)
    if factor >= 1.0:
        raise ValueError(
            f"memory.widths are {list(geometry.widths)}, too narrow for memory.num_basis = {geometry.num_basis} with "
            f"memory.num_samples = {geometry.num_samples}: what is remembered grows {factor:.2f} times at every "
            "update; take wider ones, or more basis functions"
        )
