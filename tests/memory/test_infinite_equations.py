"""The infinity-former's memory against the paper's equations, written out one query and one head at a time, in float64.

Martins et al. 2022: eq. 5 (regression), 8 (keys and values), 9-10 (densities), 11 (reading), 13-15 (contraction), 18
(gate), 20 (divergence), with positions i / L as in sec. 2.2. Losses and the gradients of all parameters are compared.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.memory.infinite import Infinite
from tests.support.infinite_memories import D_HEAD, LANES, NUM_HEADS, SEG_LEN, SMALL, WIDTH, memory_of, read, segments

NUM_BASIS, NUM_SAMPLES, WIDTHS, TAU, RIDGE = (
    SMALL[name] for name in ("num_basis", "num_samples", "basis_widths", "tau", "ridge")
)
KL_WEIGHT, PRIOR_STD, FLOOR = 0.3, 0.2, 1e-4
OPTIONS: dict[str, Any] = {
    "kl_weight": KL_WEIGHT, "prior_std": PRIOR_STD, "variance_floor": FLOOR, "padding": "none",
    "over": {"kind": "causal"},
}  # fmt: skip
SEGMENTS = segments(4)
PRINTED = {"density_bias": True, "projections": "heads", "kl_heads": "sum"}  # as the paper prints it


def centres_and_widths() -> list[tuple[float, float]]:
    """Of every basis function, in our order."""
    number = NUM_BASIS // len(WIDTHS)
    return [(centre / (number - 1), width) for width in WIDTHS for centre in range(number)]


def normal(t: Tensor | float, mean: float, variance: Tensor | float) -> Tensor:
    variance = torch.as_tensor(variance, dtype=torch.float64)
    return torch.exp(-0.5 * (t - mean) ** 2 / variance) / torch.sqrt(2 * math.pi * variance)


def psi(t: float) -> Tensor:
    """Eq. 4's basis functions at one place, (N,)."""
    place = torch.tensor(t, dtype=torch.float64)
    return torch.stack([normal(place, mean, width**2) for mean, width in centres_and_widths()])


def regression(rows: Tensor, places: list[float]) -> Tensor:
    """Eq. 5: B (N, D) of rows (P, D) at places."""
    f = torch.stack([psi(place) for place in places], dim=1)  # (N, P)
    return torch.linalg.inv(f @ f.T + RIDGE * torch.eye(NUM_BASIS, dtype=torch.float64)) @ f @ rows


class Written:
    """The equations, with the parameters of a memory."""

    def __init__(self, memory: Infinite) -> None:
        self.memory, self.options = memory, memory.options

    def entering(self, x: Tensor) -> Tensor:
        """New rows (L, D) of the segment before, without gradient but through norm and gate (eq. 18)."""
        rows = x.detach()
        if self.options.store == "normed":
            norm = self.memory.over.norm
            centred = rows - rows.mean(dim=1, keepdim=True)
            rows = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
        gate = self.memory.gate
        assert gate is not None
        padded = torch.cat([torch.zeros_like(rows[:1]), rows, torch.zeros_like(rows[:1])])
        smooth = [
            sum(gate.weight[:, :, offset] @ padded[row + offset] for offset in range(3)) + gate.bias
            for row in range(len(rows))
        ]
        return torch.stack(smooth).sigmoid() * rows

    def appended(self, signal: Tensor | None, rows: Tensor) -> Tensor:
        length = len(rows)
        if signal is None:
            return regression(rows, [(i + 1) / length for i in range(length)])
        past = torch.stack([signal.T @ psi((m + 1) / NUM_SAMPLES) for m in range(NUM_SAMPLES)])  # eq. 13-14
        places = [TAU * (m + 1) / NUM_SAMPLES for m in range(NUM_SAMPLES)]
        places += [TAU + (1 - TAU) * (i + 1) / length for i in range(length)]
        return regression(torch.cat([past, rows]), places)  # eq. 15

    def projected(self, weight: Tensor, signal: Tensor, head: int) -> Tensor:
        """K_h or V_h (N, d) of eq. 8."""
        if self.options.projections == "heads":
            return signal[:, head * D_HEAD : (head + 1) * D_HEAD] @ weight[head].T
        return signal @ weight[head * D_HEAD : (head + 1) * D_HEAD].T

    def reading(self, signal: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Z_LTM (T, D) and the divergence of the lane, of queries (H, T, K)."""
        bias = self.memory.density_bias
        densities, contexts, kl = self.memory.densities, [], []
        assert densities is not None
        for head in range(NUM_HEADS):
            keys = self.projected(self.memory.key.weight, signal, head)
            values = self.projected(self.memory.value.weight, signal, head)
            rows = []
            for q in query[head]:
                scores = keys @ q / math.sqrt(D_HEAD)
                affine = densities @ scores + (0.0 if bias is None else bias)
                mu, variance = affine[0].sigmoid(), torch.nn.functional.softplus(affine[1]).clamp(min=FLOOR)
                expected = torch.stack([normal(mu, c, variance + w**2) for c, w in centres_and_widths()])
                rows.append(values.T @ expected)  # eq. 11
                ratio = variance / PRIOR_STD**2
                kl.append(0.5 * (ratio - ratio.log() - 1.0))
            contexts.append(torch.stack(rows))
        z = torch.cat(contexts, dim=1) @ self.memory.output.weight.T
        total = torch.stack(kl).sum() / SEG_LEN  # eq. 20, a token
        return z, KL_WEIGHT * (total if self.options.kl_heads == "sum" else total / NUM_HEADS)


def upstream(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(LANES, SEG_LEN, WIDTH, generator=generator, dtype=torch.float64)


def written_loss(memory: Infinite) -> Tensor:
    """The loss of all segments by the equations; the signal that an update contracts has no gradient."""
    written, loss = Written(memory), torch.zeros((), dtype=torch.float64)
    for lane in range(LANES):
        signal: Tensor | None = None
        for number, x in enumerate(SEGMENTS):
            empty = memory.over.init_state(torch.arange(LANES), "cpu", torch.float64)
            below = memory.over(x, empty, torch.full((LANES,), SEG_LEN))
            y = below.y[lane]
            if number > 0:
                past = None if signal is None else signal.detach()
                signal = written.appended(past, written.entering(SEGMENTS[number - 1][lane]))
                z, kl = written.reading(signal, below.query[:, lane])
                y, loss = y + z, loss + kl
            loss = loss + (y * upstream(number)[lane]).sum()
    return loss


@pytest.mark.parametrize(
    "options",
    [{}, {"kl_heads": "sum"}, {"projections": "heads"}, {"density_bias": True}, {"store": "normed"}, PRINTED],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_equations(options: dict[str, Any]) -> None:
    memory = memory_of(**OPTIONS, **options)
    losses = [
        (output.y * upstream(number)).sum() + output.aux["kl"].sum()
        for number, output in enumerate(read(memory, SEGMENTS))
    ]
    loss = torch.stack(losses).sum()
    names, parameters = zip(*memory.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    expected_loss = written_loss(memory)
    expected = torch.autograd.grad(expected_loss, parameters)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=0)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        assert theirs.abs().max() > 1e-6, name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * theirs.abs().max().item(), msg=name)
