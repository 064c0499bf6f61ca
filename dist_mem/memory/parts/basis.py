"""Gaussian radial basis functions on [0, 1], their expectations, and the ridge regression onto them.

Rows x_p at positions t_p in [0, 1] become a continuous signal x(t) = sum_j B_j psi_j(t) with coefficients B = G^T X,
where G^T = (F F^T + ridge I)^-1 F and F (N, P) holds the basis at the positions. G depends on the geometry only: it is
solved once in float64 and cached for all layers. Source: Martins et al. 2022, "infinity-former", sec. 3.1, eq. 3-5, and
the authors' code. parts/boxes.py has boxes for them. Shape letters: B lanes, E new rows, S samples of the past, N basis
functions, W widths, P positions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.memory.parts.boxes import evaluate_boxes
from dist_mem.nn.constants import constant

_LOWEST = -60.0  # log of the least expectation: exp is up to twelve times as slow where float32 underflows


class Geometry(NamedTuple):
    """All parameters of the regression."""

    num_basis: int  # N
    widths: tuple[float, ...]  # standard deviations of the basis functions; N / W centres have each of them
    ridge: float
    tau: float  # the past is contracted to [0, tau], new rows fill the rest
    num_samples: int  # S
    num_rows: int  # E
    padding: str  # published | none
    boxes: str | None = None  # closed | published: boxes instead of Gaussians, which have no widths

    def evaluate(self, positions: Tensor) -> Tensor:
        """Return the basis functions at positions (...), for boxes best in float64: (..., N)."""
        if self.boxes is not None:
            return evaluate_boxes(positions, num_basis=self.num_basis, boxes=self.boxes)
        return evaluate_basis(positions, widths=self.widths, num_basis=self.num_basis)


class Fit(NamedTuple):
    """Regression matrices: the coefficients are their products with rows, oldest first."""

    first: Tensor  # (N, E), for a memory's first rows
    past: Tensor  # (N, S), for samples of the contracted past; solved together with `new`
    new: Tensor  # (N, E), for the new rows
    linear: Tensor  # (N, N), `past` times the basis at m / S, m = 1..S: contracts the coefficients directly


class ExpectedBasis(torch.autograd.Function):
    """E[psi_j] under normal densities; the backward is written by hand, so that only the result is stored.

    The basis function of centre c and width s is the normal density of that mean and standard deviation; its
    expectation under N(mu, v) is the normal density at mu - c with variance v + s^2. Order: by width, then by centre.
    """

    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor, widths: tuple[float, ...], num_basis: int) -> Tensor:
        distance, total = _distances(mu, variance, widths, num_basis)
        log_height = -0.5 * torch.log(2.0 * math.pi * total)
        exponent = torch.addcmul(log_height[..., None], distance.square_().unsqueeze(-2), (-0.5 / total)[..., None])
        expected = exponent.clamp_(min=_LOWEST).exp_().flatten(-2)
        ctx.save_for_backward(mu, variance, expected)
        ctx.widths = widths
        return expected

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        mu, variance, expected = ctx.saved_tensors
        distance, total = _distances(mu, variance, ctx.widths, expected.shape[-1])
        product = (grads[0] * expected).unflatten(-1, (len(ctx.widths), -1))
        mass = product.sum(-1)
        first = product.mul_(distance.unsqueeze(-2)).sum(-1)
        second = product.mul_(distance.unsqueeze(-2)).sum(-1)
        to_mu = (first / total).sum(-1)
        to_variance = ((second / total - mass) / (2.0 * total)).sum(-1)
        return to_mu, to_variance, None, None


def _distances(mu: Tensor, variance: Tensor, widths: tuple[float, ...], num_basis: int) -> tuple[Tensor, Tensor]:
    """Return c - mu (..., N / W), and v + s^2 (..., W)."""
    centres = torch.linspace(0.0, 1.0, num_basis // len(widths), device=mu.device, dtype=mu.dtype)
    squares = constant(tuple(width**2 for width in widths), device=mu.device, dtype=mu.dtype)
    return centres - mu[..., None], variance[..., None] + squares


def expected_basis(mu: Tensor, variance: Tensor, *, widths: tuple[float, ...], num_basis: int) -> Tensor:
    """Return E[psi] under N(mu, variance), both (...) -> (..., N); see `ExpectedBasis`."""
    return ExpectedBasis.apply(mu, variance, widths, num_basis)


def evaluate_basis(positions: Tensor, *, widths: tuple[float, ...], num_basis: int) -> Tensor:
    """Return psi at positions (...) -> (..., N)."""
    return expected_basis(positions, torch.zeros_like(positions), widths=widths, num_basis=num_basis)


def evaluate_at(geometry: Geometry, positions: Tensor, like: Tensor) -> Tensor:
    """Return psi at positions (...), float64, on the device and in the dtype of `like`: (..., N)."""
    dtype = like.dtype if geometry.boxes is None else positions.dtype  # borders of boxes need exact positions
    return geometry.evaluate(positions.to(like.device, dtype)).to(like.dtype)


def first_positions(num_rows: int, padding: str) -> tuple[Tensor, Tensor]:
    """Return the positions of a memory's first rows (E,) and of the zero rows around them.

    The published code places rows at bin middles and zeros beyond them, at the same spacing, to -0.5 and 1.5; the paper
    has neither.
    """
    if padding == "none":
        return _fractions(num_rows), torch.empty(0, dtype=torch.float64, device="cpu")
    margin = num_rows // 2
    places = torch.arange(-margin, num_rows + margin, dtype=torch.float64, device="cpu").add(0.5) / num_rows
    rows = places[margin : margin + num_rows]
    return rows, torch.cat([places[:margin], places[margin + num_rows :]])


def update_positions(num_samples: int, num_rows: int, *, tau: float, padding: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of the samples of the past (S,), of the new rows (E,) and of the zero rows around them."""
    past, new = tau * _fractions(num_samples), tau + (1.0 - tau) * _fractions(num_rows)
    if padding == "none":
        return past, new, torch.empty(0, dtype=torch.float64, device="cpu")
    num_places = 2 * (num_samples + num_rows)
    shift = 1.0 / (2 * num_rows + num_samples)  # sic; half a step would be 1 / num_places
    places = torch.linspace(-0.5 + shift, 1.5 - shift, num_places, dtype=torch.float64, device="cpu")
    return past, new, places[(places < 0.0) | (places > 1.0)]


def _fractions(number: int) -> Tensor:
    """Return 1 / n, 2 / n, ..., 1."""
    return torch.arange(1, number + 1, dtype=torch.float64, device="cpu") / number


def regression(positions: Tensor, zeros: Tensor, *, geometry: Geometry) -> Tensor:
    """Return G^T for rows at `positions` (P,) and zero rows at `zeros`, whose columns are dropped: (N, P) float64."""
    design = geometry.evaluate(torch.cat([positions, zeros])).T.contiguous()
    ridge = geometry.ridge * torch.eye(geometry.num_basis, dtype=torch.float64, device="cpu")
    return torch.linalg.solve(design @ design.T + ridge, design[:, : len(positions)])


def solve(geometry: Geometry) -> Fit:
    """Solve for the matrices in float64; explicit float32 inverses, as published, are wrong by 1 to 5 %."""
    first = regression(*first_positions(geometry.num_rows, geometry.padding), geometry=geometry)
    past, new, zeros = update_positions(
        geometry.num_samples, geometry.num_rows, tau=geometry.tau, padding=geometry.padding
    )
    update = regression(torch.cat([past, new]), zeros, geometry=geometry)
    past_matrix, new_matrix = update.split([geometry.num_samples, geometry.num_rows], dim=1)
    samples = geometry.evaluate(_fractions(geometry.num_samples))
    return Fit(first, past_matrix.contiguous(), new_matrix.contiguous(), past_matrix @ samples)


def fit_first(rows: Tensor, num_rows: Tensor, *, geometry: Geometry) -> Tensor:
    """Return coefficients (B, N, D) of a memory's first rows (B, E, D), of which the first `num_rows` (B,) are real.

    Does for any number of rows up to E what `solve` does for E. A matrix for each number would take E N E floats
    (0.5 GB for 512 functions and rows), so the regression is solved here, in float64, every time.
    """
    max_rows, real = rows.shape[1], num_rows.clamp(min=1)[:, None]
    margin = max_rows // 2 if geometry.padding == "published" else 0
    place = torch.arange(-margin, max_rows + margin, device=rows.device)
    lane_margin = real // 2 if geometry.padding == "published" else torch.zeros_like(real)
    used = (place >= -lane_margin) & (place < real + lane_margin)  # (B, P)
    offset = 0.5 if geometry.padding == "published" else 1.0
    positions = torch.where(used, (place + offset) / real.to(torch.float64), 0.0)
    basis = geometry.evaluate(positions)
    design = torch.where(used[..., None], basis, 0.0)  # (B, P, N)
    ridge = geometry.ridge * torch.eye(geometry.num_basis, dtype=torch.float64, device=rows.device)
    real_design = torch.where((place >= 0) & (place < real), 1.0, 0.0)[..., None] * design
    right = real_design[:, margin : margin + max_rows].mT @ rows.to(torch.float64)
    return torch.linalg.solve_ex(design.mT @ design + ridge, right).result.to(rows.dtype)


def growth(geometry: Geometry) -> float:
    """Return the spectral radius of the contraction: the largest factor by which an update scales old coefficients.

    Above 1 the signal grows without bound, as it does where widths are much smaller than the distance of the centres.
    If the radius is well below 1, a bound of it that is below 1 is returned.
    """
    if geometry not in _GROWTH:  # every layer calls this
        contraction = fit_matrices(geometry, device="cpu", dtype=torch.float64).linear
        if type(contraction) is not Tensor:  # a fake tensor, which has no values
            return 0.0
        _GROWTH[geometry] = _spectral_radius(contraction)
    return _GROWTH[geometry]


def _spectral_radius(matrix: Tensor) -> float:
    """Return the spectral radius of a matrix (N, N), or a bound of it below 1.

    It is at most the n-th root of a norm of the n-th power. With N = 1,024, a few products take a twentieth of the time
    of the eigenvalues, which is ten seconds.
    """
    power = matrix
    for doublings in range(_MOST_DOUBLINGS + 1):
        norm = float(torch.linalg.matrix_norm(power))
        if norm < 1.0:
            return float(norm ** (0.5**doublings))
        power = power @ power
    return float(torch.linalg.eigvals(matrix).abs().max())


_MOST_DOUBLINGS = 6  # of the exponent; the matrices of configs/ need up to 5
_GROWTH: dict[Geometry, float] = {}
_SOLVED: dict[tuple[Geometry, torch.device, torch.dtype], Fit] = {}


def fit_matrices(geometry: Geometry, *, device: torch.device | str, dtype: torch.dtype) -> Fit:
    """Return the matrices of `solve`, computed once for each geometry, device and dtype in this process."""
    key = (geometry, torch.device(device), dtype)
    if key in _SOLVED:
        return _SOLVED[key]
    with torch.inference_mode(False), torch.no_grad():  # training cannot use tensors made in inference mode
        if key[1:] == (torch.device("cpu"), torch.float64):
            fit = solve(geometry)
        else:
            exact = fit_matrices(geometry, device="cpu", dtype=torch.float64)
            fit = Fit(*(part.to(device, dtype) for part in exact))
    if type(fit.first) is Tensor:  # a fake tensor, which has no values, must not be cached
        _SOLVED[key] = fit
    return fit
