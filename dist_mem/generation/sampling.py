"""Sampling of the next token: greedy, by temperature, from the k likeliest (top-k) or from the nucleus (top-p)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.parts.counter_hash import uniform


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: temperature is applied first, then top-k, then top-p on the remaining tokens."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None  # only the k likeliest tokens; None: all
    top_p: float | None = None  # only the likeliest tokens that together reach this probability; None: all
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError for a value that is not a number, and ValueError for a number out of range."""
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) or (value is None and name.startswith("top_"))):
                raise TypeError(f"{name} is {value!r}, but must be a number")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, but must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, but must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, but must be greater than 0 and at most 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but must be a signed number of 64 bits")


def choose(log_probs: Tensor, sampling: Sampling, *, stream: Tensor, step: Tensor | int) -> Tensor:
    """Draw one token per lane, (B,) int64 on the CPU; (seed, stream, step) determine it, independent of other lanes.

    Args:
        log_probs: (B, V), of the next token; -inf for tokens that must not be drawn.
        stream: (B,) int64, random number stream of each lane.
        step: index of the draw in the stream: (B,) int64, or an int for all lanes.
    """
    if sampling.temperature == 0.0:
        return log_probs.argmax(dim=-1).cpu()
    probs = kept_probabilities(log_probs, sampling)
    draw = uniform(1, sampling.seed, stream.to(probs.device), torch.as_tensor(step, device=probs.device))
    # In vocabulary order: in order of probability, another tie-break would map the same draw to another token.
    total = probs.cumsum(dim=-1)
    token = torch.searchsorted(total, draw * total[:, -1:], right=True).squeeze(1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)  # rounding may exceed it
    return torch.minimum(token, last).cpu()


def kept_probabilities(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of the tokens that may be drawn, 0 for the others: (B, V) float64, rows sum to 1.

    The nucleus is the smallest set of likeliest tokens whose probability is at least p (Holtzman et al. 2020, "The
    curious case of neural text degeneration", sec. 3.1), so it includes the first token that reaches p.
    """
    scores = log_probs.to(torch.float64)
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return scores.softmax(dim=-1)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = -math.inf
    probs = ranked.softmax(dim=-1)
    if sampling.top_p is not None:
        before = F.pad(probs.cumsum(dim=-1)[:, :-1], (1, 0))
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)
