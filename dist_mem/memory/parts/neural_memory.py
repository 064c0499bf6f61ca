"""A memory whose content is the weights of a small network, which every token trains by a step of gradient descent.

Source: Behrouz et al. 2024, "Titans" (arXiv 2501.00663), eqs. 8 to 18. The gradient is written out, not asked of
autograd, so the forward works without autograd, is traced by torch.compile, and is differentiable itself. Shape
letters: B lanes, T segment, C chunk, D model, I and O the widths before and after a layer of the network.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.memory.parts.learned_start import LearnedStart
from dist_mem.nn.convolution import convolve, draw_taps
from dist_mem.nn.layers import Projection
from dist_mem.nn.named_tuples import replace
from dist_mem.nn.unit_attention import unit

Weights = tuple[Tensor, ...]  # (B, I, O) of every layer of the network


class NeuralTokens(NamedTuple):
    """What the network learns from and is read with, float32 at least."""

    query: Tensor  # (B, T, D)
    key: Tensor  # (B, T, D)
    value: Tensor  # (B, T, D), what the network shall return for the key
    step: Tensor  # (B, T), theta
    momentum: Tensor  # (B, T), log of eta
    kept: Tensor  # (B, T), log of 1 - alpha
    is_real: Tensor  # (B, T), 1 for real tokens and 0 for padding, which changes nothing


class LearningResult(NamedTuple):
    read: Tensor  # (B, T, D), what the network returns for the query of every token after it has learned the token
    weights: Weights
    momentum: Weights
    error: Tensor  # (B, T), squared distance between what the network returned and the value


def recall(rows: Tensor, weights: Weights) -> Tensor:
    """Return what the network returns for rows (B, T, D)."""
    for layer in weights[:-1]:
        rows = F.silu(rows @ layer)
    return rows @ weights[-1]


def chunk_sizes(seg_len: int, chunk_len: int) -> list[int]:
    """Return the sizes of a segment's chunks, of which the last may be shorter."""
    return [min(chunk_len, seg_len - begin) for begin in range(0, seg_len, chunk_len)]


def learn(
    tokens: NeuralTokens,
    weights: Weights,
    momentum: Weights,
    *,
    chunk_len: int,
    max_gradient: float | None = None,
    first: Weights | None = None,
) -> LearningResult:
    """Let the network learn a segment: eqs. 13 and 14 for every token, with gradients at the chunk's first weights.

    Weights at a token are A W + B S - sum_s c_s (input_s x gradient_s) with numbers A, B and c_s, so reading them is
    linear attention to the chunk in every layer (eqs. 16 to 18), and they are never computed. `max_gradient` limits
    the norm of each token's gradient, and with it that of the weights. `first`: of a chunk whose first tokens have been
    learned already; the tokens must be of this chunk.
    """
    read, errors = [], []
    sizes = chunk_sizes(tokens.step.shape[1], chunk_len)
    for chunk in zip(*(part.split(sizes, dim=1) for part in tokens), strict=True):
        one = NeuralTokens(*chunk)
        inputs, gradients, error = gradients_of(one, weights if first is None else first)
        if max_gradient is not None:
            one = replace(one, step=one.step * share_kept(inputs, gradients, max_gradient))
        left, since, shares = mixture(one)
        shares = shares * one.step[:, None]
        # Of the momentum itself: what the last token leaves of it, and of the gradients since.
        last_left, last_shares = decays(one.momentum)[:, -1:] * one.step[:, None], one.momentum.sum(1).exp()
        rows, new_weights, new_momentum = one.query, [], []
        for index, (layer, speed, before, gradient) in enumerate(
            zip(weights, momentum, inputs, gradients, strict=True)
        ):
            reads = torch.baddbmm((left[..., None] * rows) @ layer, since[..., None] * rows, speed)
            rows = torch.baddbmm(reads, shares * (rows @ before.mT), gradient, alpha=-1)
            rows = F.silu(rows) if index < len(weights) - 1 else rows
            moved, pushed = (shares[:, -1, :, None] * before).mT, (last_left.mT * before).mT
            mixed = torch.addcmul(left[:, -1, None, None] * layer, since[:, -1, None, None], speed)
            new_weights.append(torch.baddbmm(mixed, moved, gradient, alpha=-1))
            new_momentum.append(torch.baddbmm(last_shares[:, None, None] * speed, pushed, gradient, alpha=-1))
        weights, momentum = tuple(new_weights), tuple(new_momentum)
        read.append(rows)
        errors.append(error)
    return LearningResult(torch.cat(read, dim=1), weights, momentum, torch.cat(errors, dim=1))


def learn_on(
    tokens: NeuralTokens,
    row: Tensor,
    weights: Weights,
    momentum: Weights,
    first: Weights,
    *,
    chunk_len: int,
    max_gradient: float | None,
) -> tuple[LearningResult, Weights]:
    """Let the network learn further tokens of a segment, from another place in each lane, as `learn` does the whole.

    Args:
        row: (B, T) int64, consecutive places in the segment.
        first: weights at the beginning of the chunk of the token before these.

    Returns:
        What `learn` returns, and the weights at the beginning of the last token's chunk.
    """
    num_rows = row.shape[1]
    chunk = row // chunk_len
    read, error = torch.zeros_like(tokens.query), torch.zeros_like(tokens.step)
    for number in range((num_rows + chunk_len - 2) // chunk_len + 1):  # chunks that T rows may touch
        own = (chunk == chunk[:, :1] + number) & (tokens.is_real > 0)
        begins = (own & (row % chunk_len == 0)).any(1)[:, None, None]
        first = tuple(torch.where(begins, now, before) for now, before in zip(weights, first, strict=True))
        rates = {name: getattr(tokens, name) * own for name in ("step", "momentum", "kept", "is_real")}
        part = replace(tokens, **rates)
        learned = learn(part, weights, momentum, chunk_len=num_rows, max_gradient=max_gradient, first=first)
        weights, momentum = learned.weights, learned.momentum
        read, error = torch.where(own[..., None], learned.read, read), torch.where(own, learned.error, error)
    return LearningResult(read, weights, momentum, error), first


def gradients_of(tokens: NeuralTokens, weights: Weights) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the gradient of |network(key) - value|^2 (eq. 12, a sum) of every token, as two factors, and that error.

    The gradient of a layer's weights is the outer product of its input, (B, C, I), and of the gradient of its output,
    (B, C, O).
    """
    inputs, sums = [tokens.key], []
    for layer in weights[:-1]:
        sums.append(inputs[-1] @ layer)
        inputs.append(F.silu(sums[-1]))
    missing = inputs[-1] @ weights[-1] - tokens.value
    gradients = [2.0 * missing]
    for layer, before in zip(reversed(weights[1:]), reversed(sums), strict=True):
        share = before.sigmoid()
        slope = share * (1.0 + before * (1.0 - share))  # of SiLU
        gradients.insert(0, slope * (gradients[0] @ layer.mT))
    return inputs, gradients, missing.square().sum(-1)


def share_kept(inputs: list[Tensor], gradients: list[Tensor], max_gradient: float) -> Tensor:
    """Return the factors by which no token's gradient, of all layers together, is longer than the maximum: (B, C)."""
    pairs = zip(inputs, gradients, strict=True)
    squares = torch.stack([one.square().sum(-1) * other.square().sum(-1) for one, other in pairs]).sum(0)
    return max_gradient * squares.clamp(min=max_gradient**2).rsqrt()


def decays(logs: Tensor) -> Tensor:
    """Return the product of the factors after token s up to t, 0 for s > t: their logs (..., C) -> (..., C, C)."""
    total = logs.cumsum(-1)
    upper = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).triu(1)
    # Never e^(t - s) for s > t, which overflows.
    return (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()


def mixture(tokens: NeuralTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a token's weights consist of.

    Axes before the last are kept; the tokens of a chunk have (B, C).

    Returns:
        (B, C), share of the weights before the chunk. (B, C), share of the momentum before the chunk. (B, C, C), of
        the gradient of every token of the chunk, without its step.
    """
    arrived = decays(tokens.kept) * tokens.is_real[..., None, :]  # of the momentum at token s in the weights at token t
    left = tokens.kept.cumsum(-1).exp()
    since = (arrived @ tokens.momentum.cumsum(-1).exp()[..., None]).squeeze(-1)
    return left, since, arrived @ decays(tokens.momentum)


class ConvolvedRows(NamedTuple):
    rows: Tensor  # (B, T, W), after convolution and activation
    before: Tensor  # (B, kernel - 1 + T, W), before them, with those of earlier segments


class ConvolvedProjection(nn.Module):
    """A linear map, a convolution of every channel over a token and those before it, and SiLU (sec. 4.4)."""

    def __init__(self, d_model: int, width: int, *, kernel: int) -> None:
        super().__init__()
        self.map = Projection(d_model, width)
        # The last one meets the present token. Without a convolution there are none, and no parameter without effect.
        self.taps = nn.Parameter(torch.zeros(width, kernel)) if kernel > 1 else None

    def reset_parameters(self) -> None:
        if self.taps is not None:
            draw_taps(self.taps)

    def forward(self, rows: Tensor, tail: Tensor) -> ConvolvedRows:
        """Project rows (B, T, D) after `tail` (B, kernel - 1, W), what was projected of the tokens before them."""
        before = torch.cat([tail.to(rows.dtype), self.map(rows)], dim=1)
        return ConvolvedRows(F.silu(before if self.taps is None else convolve(before, self.taps)), before)


class NeuralMemory(nn.Module):
    """The network's learned first weights, and what every token is projected to: query, key, value and rates."""

    def __init__(self, d_model: int, *, depth: int, d_hidden: int, kernel: int, step_max: float) -> None:
        super().__init__()
        self.d_model, self.step_max = d_model, step_max
        widths = [d_model, *[d_hidden] * (depth - 1), d_model]
        self.shapes = list(pairwise(widths))
        self.query = ConvolvedProjection(d_model, d_model, kernel=kernel)
        self.key_value = ConvolvedProjection(d_model, 2 * d_model, kernel=kernel)
        self.rates = nn.Linear(d_model, 3)  # theta, eta and alpha, before their maps
        self.starts = nn.ModuleList(LearnedStart(*shape) for shape in self.shapes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw first weights that keep the size of what they map; begin with little forgetting.

        Initial rates: theta half of its maximum, eta 0.5, alpha 0.001. The paper gives none.
        """
        self.query.reset_parameters()
        self.key_value.reset_parameters()
        if self.rates.bias.is_meta:
            return
        self.rates.bias.copy_(torch.tensor([0.5, 0.5, 0.001]).logit())
        for module in self.starts:
            assert isinstance(module, LearnedStart)
            module.start.normal_(std=1 / math.sqrt(module.start.shape[0]))

    def start_weights(self, weights: Weights, is_fresh: Tensor) -> Weights:
        """Return the weights that a segment begins with: the learned ones in fresh lanes, (B,) bool."""
        return tuple(start(held, is_fresh) for start, held in zip(self.starts, weights, strict=True))

    def queries(self, rows: Tensor, tail: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the queries of rows (B, T, D), and what they were before the convolution."""
        projected = self.query(rows, tail)
        return unit(projected.rows.to(dtype)), projected.before

    def tokens(self, rows: Tensor, tail: Tensor, valid_len: Tensor, dtype: torch.dtype) -> tuple[NeuralTokens, Tensor]:
        """Return what the network learns of rows (B, T, D), and what it was before the convolution.

        Args:
            tail: (B, kernel - 1, 3 D), of queries, keys and values.
        """
        query, before = self.queries(rows, tail[..., : self.d_model], dtype)
        pairs = self.key_value(rows, tail[..., self.d_model :])
        key, value = pairs.rows.to(dtype).chunk(2, dim=-1)
        is_real = (torch.arange(rows.shape[1], device=rows.device) < valid_len[:, None]).to(dtype)
        step, momentum, forgotten = self.rates(rows).to(dtype).unbind(-1)
        step = self.step_max * step.sigmoid() * is_real
        momentum, kept = F.logsigmoid(momentum) * is_real, F.logsigmoid(-forgotten) * is_real
        tokens = NeuralTokens(query, unit(key), value, step, momentum, kept, is_real)
        return tokens, torch.cat([before, pairs.before], dim=-1)
