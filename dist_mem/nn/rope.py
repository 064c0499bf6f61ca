"""Rotary positions for texts longer than those of the first training (`model.rope`), as transformers computes them.

Pair i of a head of width K turns by w_i = theta^(-2 i / K) radians a token; each kind replaces w_i. All is computed in
float64 and rounded once. Sources: Chen et al. 2023, "Extending context window of large language models via position
interpolation" (linear); Peng et al. 2023, "YaRN", sec. 3 (dynamic is its "Dynamic NTK"); Llama 3.1 as published.
"""

from __future__ import annotations

import math

from dist_mem.config import RopeConfig


def frequencies(rope: RopeConfig, width: int, *, theta: float, num_keys: int) -> tuple[float, ...]:
    """Return the radians a token of all pairs of a head, K // 2 numbers.

    Args:
        rope: its `original_positions` is a number.  width: K.
        num_keys: rows that a segment attends to at most, context and segment. Only `dynamic` reads it: its theta grows
            with the part of it that exceeds `model.num_positions`. Positions count from the segment's first token, so
            unlike in transformers, where it is the length of the text so far, it depends on nothing that was read:
            rows that are not filled yet count too. The two agree over a text of J tokens, read in segments by a memory
            that keeps all of it, and over every text of at most `num_positions`, where nothing is scaled.
    """
    factor, positions = rope.factor, rope.original_positions
    assert factor is not None and positions is not None
    if rope.kind == "dynamic":
        longer = factor * max(num_keys, positions) / positions - (factor - 1)
        theta *= longer ** (width / (width - 2))
    plain = [theta ** (-2 * pair / width) for pair in range(width // 2)]
    if rope.kind == "dynamic":
        return tuple(plain)
    if rope.kind == "linear":
        kept = [0.0] * len(plain)
    elif rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = [_share((positions * each / (2 * math.pi) - low) / (high - low)) for each in plain]
    else:
        kept = _yarn_shares(rope, width, theta=theta)
    return tuple(each * (share + (1 - share) / factor) for each, share in zip(plain, kept, strict=True))


def _yarn_shares(rope: RopeConfig, width: int, *, theta: float) -> list[float]:
    """Return the shares of the pairs that are not scaled: 1 up to beta_fast, 0 from beta_slow on, linear between."""
    positions = rope.original_positions
    assert positions is not None

    def pair_with(num_turns: float) -> float:
        """Return which pair, a real number, makes so many turns in `positions` tokens."""
        return width * math.log(positions / (2 * math.pi * num_turns)) / (2 * math.log(theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)  # K - 1 as published, though the last pair is K / 2 - 1
    length = last - first or 0.001
    return [1 - _share((pair - first) / length) for pair in range(width // 2)]


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def attention_factor(rope: RopeConfig | None) -> float:
    """Return the factor of cosines and sines, of queries as of keys, so that scores get its square (YaRN, eq. 22)."""
    if rope is None or rope.kind != "yarn":
        return 1.0
    assert rope.factor is not None
    return rope.attention_factor or 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
