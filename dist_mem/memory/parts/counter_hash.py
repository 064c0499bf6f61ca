"""Random numbers without a generator: a hash of counters (rule 8 of the memory contract).

The same counters give the same numbers: for a lane alone or in a batch, on CPU and GPU, on recomputation and after a
resume. There is no state to save. The hash is SplitMix64 (Steele et al. 2014) on int64 tensors, whose products wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit integers
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def _fold(word: Tensor, shift: int) -> Tensor:
    """Return word ^ (word >> shift), with zeros shifted in."""
    return word ^ ((word >> shift) & (2 ** (64 - shift) - 1))


def mix(word: Tensor) -> Tensor:
    """Return SplitMix64's output for the int64 counter `word`: every bit depends on every bit."""
    word = word + _STEP
    word = _fold(word, 30) * _FIRST
    word = _fold(word, 27) * _SECOND
    return _fold(word, 31)


def uniform(num_draws: int, *counters: Tensor | int) -> Tensor:
    """Return numbers in [0, 1), (B, num_draws) float64, determined by the counters and their order.

    Each counter is (B,) int64 or an int; at least one is a tensor.
    """
    tensors = [counter for counter in counters if isinstance(counter, Tensor)]
    word = torch.zeros_like(tensors[0])
    for counter in counters:
        word = mix(word ^ counter)
    draws = mix(word[:, None] ^ torch.arange(num_draws, device=word.device))
    return ((draws >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
