"""The kernels of flash-linear-attention that the operators of linear_kernels.py launch, for planning.

Each word is one kernel, each letter a tensor that it reads or writes; tests/memory/test_linear_kernels.py compares them
with what fla 0.6 launches. A kernel is bound by these bytes, not by its products. Shape letters: as there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from dist_mem.nn.kernel_shapes import LAUNCHED, KernelTraffic

CHUNK = 64  # C, tokens of a chunk; fla's kernels for vector decays solve it in blocks of 16


class _Words(NamedTuple):
    forward: str
    backward: str
    workspace: tuple[str, str]  # what they allocate for a while


_WORDS = {  # by delta rule, and decays by row
    (True, False): _Words(
        "nn p knnp kvnpnkv m kvkvnhmm kkvhnv",
        "kvnpnkv kvkvnhm kknvv kkknmmvhvv kkvnhvhkkkvn nn kvnnpkvkvnn kkk nnn nn",
        ("kvhv", "kvhvvhvkkkkv"),
    ),
    (True, True): _Words(
        "rr p kkrnpd kkrnpdp kkvnkvpr m kvkvrhmm v kvrhvp",
        "kkkkvnkvpr kvkvrhm kkvpvvP kkkrmmvhvv kkvvrnphvhrrvvrnP kkrnPPrrrrrrb bn nnn rr rk rk",
        ("dkvkhv", "kkkkvhvvhvvPPPrrrrrr"),
    ),
    (False, False): _Words("nn kvhnmm kkvhnv", "kvHnm knvHmm kkvnHvHkkn nn kknvvH nn", ("h", "HH")),
    (False, True): _Words(
        "rr kvhrmm kkrP kkrP v kvrhvP", "kvHrm krvHmm krPvvH vvP kkrPrr kkvrHvHrrrrr rk rk", ("h", "HHPrrrr")
    ),
}


def _sizes(query: Tensor, value: Tensor) -> dict[str, int]:
    """Return the bytes of each letter."""
    lanes, seg_len, heads, d_key = query.shape
    places, d_value, itemsize = lanes * seg_len * heads, value.shape[-1], query.element_size()
    states = lanes * math.ceil(seg_len / CHUNK) * heads * d_key * d_value
    return {
        **{"n": 4 * places, "b": 4 * places * math.ceil(d_key / 32)},  # a number per token and head, and as parts
        **{"k": itemsize * places * d_key, "v": itemsize * places * d_value, "r": 4 * places * d_key},  # rows
        **{"p": itemsize * places * CHUNK, "P": 4 * places * CHUNK, "d": 4 * places * 16},  # pairs in a chunk
        **{"h": itemsize * states, "H": 4 * states, "m": 4 * lanes * heads * d_key * d_value},  # matrices
    }


def _of_rule(given: tuple[Any, ...], *, first: int, backward: bool) -> KernelTraffic:
    """Return the kernels of a rule, whose query stands at place `first`; a cast to the same dtype is none."""
    query, _, value, decay, beta = given[first : first + 5]
    words, sizes = _WORDS[beta is not None, decay.dim() == 4], _sizes(query, value)
    kernels = (words.backward if backward else words.forward).split()

    def num_bytes(word: str) -> int:
        return sum(sizes[letter] for letter in word)

    moved = [num_bytes(word) for word in kernels if word != "rk" or query.element_size() != 4]
    return KernelTraffic(moved, num_bytes(words.workspace[backward]))


def _bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()


def _of_convolution(rows: Tensor, tail: Tensor, taps: Tensor, widths: list[int], silu: bool) -> KernelTraffic:
    before = _bytes(taps) * rows.shape[0]
    sizes = (_bytes(tail) + before, 2 * _bytes(rows) + before + _bytes(taps))
    parts = [width / rows.shape[2] for width in widths]
    return KernelTraffic([round(part * size) for part in parts for size in sizes], before)


def _of_convolution_backward(*given: Any) -> KernelTraffic:
    rows, tail, taps, silu = given[3:]
    whole, before = _bytes(rows), _bytes(taps) * rows.shape[0]
    sums = 4 * taps.numel() * rows.shape[0] * math.ceil(rows.shape[1] / CHUNK)  # the gradient of the taps, in parts
    read = before + _bytes(taps)
    again = [2 * whole + read] if silu else []  # the convolution, before silu
    moved = [2 * whole, _bytes(tail) + before, *again, (3 + silu) * whole + read + sums, sums, before, before, before]
    return KernelTraffic(moved, (1 + silu) * whole + sums)


LAUNCHED |= {
    "linear_rule": lambda *given: _of_rule(given, first=0, backward=False),
    "linear_rule_backward": lambda *given: _of_rule(given, first=2, backward=True),
    "linear_convolution": _of_convolution,
    "linear_convolution_backward": _of_convolution_backward,
}
