"""Linear memories by flash-linear-attention's kernels (the package fla-core), as operators that compile.

The kernels compute what linear_rule.py and convolution.py do, in chunks of 64 tokens: the products have inputs in the
dtype of the activations and sums in float32, the matrix is float32. A compiled block keeps an operator as it is, and
tensors without values get its shapes only, for planning. Four kernels cover all rules, by `delta` and by decay:

| decay | delta rule | without it |
|---|---|---|
| a number per head (0: none) | chunk_gated_delta_rule | chunk_simple_gla |
| a number per row | chunk_kda | chunk_gla |

fla's tuner chooses launches by their time in a process, so that a resumed run could have other bits: here every kernel
has one launch. fla is imported by the first call only; it takes seconds. Shape letters: B lanes, T segment, H heads, K
and V widths of a key and of a value, W channels of the convolution, C = 64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.parts.linear_launches import CHUNK

WIDEST = 256  # K of fla's kernels
WIDEST_KERNEL = 8  # tokens of its convolution, whose loops over them are written out
VERSIONS = ("0.6.",)  # of fla-core, whose functions below its entry points are called
INSTALL = "pip install 'dist-mem[fla]'"
_MISCOMPILED = ((3, 4), (3, 7, 1))  # Triton, from and below which fla refuses gated backwards on Hopper (its issue 640)


@cache
def why_not() -> str | None:
    """Return why fla cannot be called here, with the fix; None if it can."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"fla-core is not installed ({INSTALL})"
    if not found.startswith(VERSIONS):
        return f"fla-core {found} is installed, but dist_mem calls version {VERSIONS[0]}* ({INSTALL})"
    missing = [name for name in ("triton", "einops") if not find_spec(name)]
    return f"{missing[0]} is not installed, which fla-core needs (pip install {missing[0]})" if missing else None


@cache
def spreads_decays() -> bool:
    """Return whether a decay per head is given to the kernels for one per row, which Triton compiles rightly here.

    On Hopper, Triton 3.4.0 to 3.7.0 compile the backward for decays per head wrongly, and fla refuses to run it.
    """
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability()[0] != 9:
        return False
    import triton

    first, fixed = _MISCOMPILED
    return first <= tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3]) < fixed


class LinearLaunch(NamedTuple):
    """What a launch is chosen by; unnamed sizes of a tile count as these too."""

    tile: int = 64
    warps: int = 4
    stages: int = 2


LAUNCH = LinearLaunch()
OTHERS = {
    # Spills less on sm_90: docs/log/2026-11-28-linear-memories-on-flash-linear-attentions-kernels.md.
    "chunk_kda_fwd_kernel_inter_solve_fused": LinearLaunch(tile=32, warps=2),
    # fla refuses tiles as wide as a key, whose loads would go beyond the tensor; one launch is not asked.
    "chunk_gla_bwd_kernel_dv": LinearLaunch(tile=32),
    "chunk_gla_bwd_kernel_inter": LinearLaunch(tile=32),
}


def nearest(launches: list[Any], wanted: LinearLaunch) -> Any:
    """Return the one of a tuner's launches that is nearest to the wanted sizes, the first of equals."""

    def distance(launch: Any) -> float:
        tiles = [value for value in launch.kwargs.values() if isinstance(value, int)]
        parts = [*((tile, wanted.tile) for tile in tiles), (launch.num_warps, wanted.warps)]
        parts.append((launch.num_stages, wanted.stages))
        return sum(max(have / want, want / have) for have, want in parts)

    return min(launches, key=distance)


def _tuners() -> Iterator[Any]:
    """Yield every tuner of the modules of fla that are imported."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, Autotuner) and not isinstance(value, type):
                value = vars(value).get("fn") if hasattr(value, "__dict__") else None
            if isinstance(value, Autotuner):
                yield value


def _fix_launches() -> None:
    """Leave every tuner one launch; with one, it measures nothing."""
    for tuner in _tuners():
        wanted = OTHERS.get(tuner.base_fn.__name__, LAUNCH)
        tuner.configs = [nearest(tuner.configs, wanted)]


_FUNCTIONS = {  # below fla's entry points, which torch.compile may not trace
    "fla.ops.gated_delta_rule.chunk": ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"),
    "fla.ops.kda.chunk_fwd": ("chunk_kda_fwd",),
    "fla.ops.kda.chunk_bwd": ("chunk_kda_bwd",),
    "fla.ops.simple_gla.chunk": ("chunk_simple_gla_fwd", "chunk_simple_gla_bwd"),
    "fla.ops.gla.chunk": ("chunk_gla_fwd", "chunk_gla_bwd"),
    "fla.ops.utils": ("chunk_local_cumsum",),
    "fla.ops.utils.constant": ("RCP_LN2",),
    "fla.modules.norm.l2norm": ("l2norm_fwd", "l2norm_bwd"),
    "fla.modules.norm.fused_norm_gate": ("layer_norm_gated_fwd", "layer_norm_gated_bwd"),
    "fla.modules.causal_conv1d.ops": ("causal_conv1d_fwd", "causal_conv1d_bwd"),
}


@cache
def fla() -> SimpleNamespace:
    """Import fla's functions, and fix their launches."""
    modules = {name: import_module(name) for name in _FUNCTIONS}
    _fix_launches()
    return SimpleNamespace(**{name: getattr(modules[of], name) for of, names in _FUNCTIONS.items() for name in names})


class LinearRows(NamedTuple):
    """What the kernels read of every token; one with decay 0, and beta 0 or, without beta, value 0 changes nothing."""

    query: Tensor  # (B, T, H, K), in the dtype of the activations
    key: Tensor  # (B, T, H, K)
    value: Tensor  # (B, T, H, V)
    decay: Tensor  # (B, T, H) or, per row of the matrix, (B, T, H, K) float32: log of alpha, at most 0
    beta: Tensor | None  # (B, T, H) float32, of the delta rule; None: the value is written


def kernel_rule(rows: LinearRows, matrix: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Apply the rule to a segment: what tokens read (B, T, H, V) of queries times `scale`, and the new matrix.

    Args:
        matrix: (B, H, K, V) float32, before the segment; gradients flow to it and from the new one.
    """
    found: tuple[Tensor, Tensor] = _Rule.apply(*rows, matrix, scale)
    return found


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        matrix: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        read, new, *kept = torch.ops.dist_mem.linear_rule(query, key, value, decay, beta, matrix, scale)
        ctx.save_for_backward(query, key, value, decay, beta, matrix, *kept)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return read, new

    @staticmethod
    def backward(ctx: Any, of_read: Tensor | None, of_new: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, decay, beta, matrix, *kept = ctx.saved_tensors
        of_read = torch.zeros_like(value) if of_read is None else of_read
        found = torch.ops.dist_mem.linear_rule_backward(
            of_read, of_new, query, key, value, decay, beta, matrix, *kept, ctx.scale
        )
        *rest, to_beta, to_matrix = found
        return *rest, None if beta is None else to_beta, to_matrix, None


def unit_rows(rows: Tensor) -> Tensor:
    """Divide each row by sqrt(its squared length + 1e-6): (B, T, H, K)."""
    found: Tensor = _LinearUnitRows.apply(rows)
    return found


class _LinearUnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        unit, factors = torch.ops.dist_mem.fla_unit_rows(rows)
        ctx.save_for_backward(unit, factors)
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        found: Tensor = torch.ops.dist_mem.fla_unit_rows_backward(gradients[0], *ctx.saved_tensors)
        return found


def gated_norm(rows: Tensor, gate: Tensor, gain: Tensor, *, eps: float, silu: bool) -> Tensor:
    """Return the root-mean-square norm of rows (B, T, H, V), times silu or sigmoid of the gate of the same shape.

    Args:
        gain: (V,), of the norm.
    """
    found: Tensor = _GatedNorm.apply(rows, gate, gain, eps, silu)
    return found


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate: Tensor, gain: Tensor, eps: float, silu: bool) -> Tensor:
        gated, factors = torch.ops.dist_mem.gated_norm(rows, gate, gain, eps, silu)
        ctx.save_for_backward(rows, gate, gain, factors)
        ctx.eps, ctx.silu = eps, silu
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = (gradients[0], *ctx.saved_tensors, ctx.eps, ctx.silu)
        return *torch.ops.dist_mem.gated_norm_backward(*given), None, None


def kernel_convolution(
    rows: Tensor, tail: Tensor, taps: Tensor, widths: list[int], *, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `convolution.convolve`, without putting rows together with those before them, and silu after it.

    Args:
        rows: (B, T, W), the last axis contiguous.
        tail: (B, kernel - 1, W), the rows before them.
        taps: (W, kernel).
        widths: of the three parts of W that are returned, each contiguous.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Convolution.apply(rows, tail, taps, widths, silu)
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, tail: Tensor, taps: Tensor, widths: list[int], silu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rows, tail, taps)
        ctx.silu = silu
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.dist_mem.linear_convolution(rows, tail, taps, widths, silu)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.dist_mem.linear_convolution_backward(*gradients, *ctx.saved_tensors, ctx.silu)
        return *found, None, None


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_RULE = "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor matrix"
_KEPT = "Tensor total, Tensor scores, Tensor solved"  # sums of decays in each chunk; products of its tokens, solved
_OPS.define(f"linear_rule({_RULE}, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_OPS.define(
    f"linear_rule_backward(Tensor of_read, Tensor? of_new, {_RULE}, {_KEPT}, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_OPS.define("fla_unit_rows(Tensor rows) -> (Tensor, Tensor)")
_OPS.define("fla_unit_rows_backward(Tensor of_unit, Tensor unit, Tensor factors) -> Tensor")
_NORM = "Tensor rows, Tensor gate, Tensor gain"
_OPS.define(f"gated_norm({_NORM}, float eps, bool silu) -> (Tensor, Tensor)")
_OPS.define(
    f"gated_norm_backward(Tensor of_gated, {_NORM}, Tensor factors, float eps, bool silu) -> (Tensor, Tensor, Tensor)"
)
_CONVOLUTION = "Tensor rows, Tensor tail, Tensor taps"
_OPS.define(f"linear_convolution({_CONVOLUTION}, int[] widths, bool silu) -> (Tensor, Tensor, Tensor)")
_OPS.define(
    f"linear_convolution_backward(Tensor first, Tensor second, Tensor third, {_CONVOLUTION}, bool silu)"
    " -> (Tensor, Tensor, Tensor)"
)


def _spread_decay(decay: Tensor, query: Tensor) -> Tensor:
    """Return decays as the kernels take them here."""
    return decay[..., None].expand(query.shape) if decay.dim() == 3 and spreads_decays() else decay


def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, matrix: Tensor, scale: float
) -> tuple[Tensor, ...]:
    call, decay = fla(), _spread_decay(decay, query)
    query, key, value, decay, matrix = (part.contiguous() for part in (query, key, value, decay, matrix))
    none = query.new_empty(0)
    given: dict[str, Any] = {"q": query, "k": key, "v": value, "scale": scale}
    given |= {"initial_state": matrix, "output_final_state": True}
    if beta is not None:
        given["beta"] = beta.contiguous()
        if decay.dim() == 3:
            total, read, solved, new, *_ = call.chunk_gated_delta_rule_fwd(g=decay, **given)
            return read, new, total, none, solved
        read, new, total, scores, solved, *_ = call.chunk_kda_fwd(g=decay, **given)
        return read, new, total, scores, solved
    if decay.dim() == 3:
        total = call.chunk_local_cumsum(decay, chunk_size=CHUNK, scale=call.RCP_LN2)
        read, new = call.chunk_simple_gla_fwd(g=total, chunk_size=CHUNK, **given)
        return read, new, total, none, none.clone()
    total, scores, _, new, read = call.chunk_gla_fwd(g=decay, g_cumsum=None, chunk_size=CHUNK, **given)
    return read, new, total, scores, none


def _rule_backward(
    of_read: Tensor,
    of_new: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    matrix: Tensor,
    total: Tensor,
    scores: Tensor,
    solved: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    call = fla()
    of_read, query, key, value, matrix = (part.contiguous() for part in (of_read, query, key, value, matrix))
    of_new = None if of_new is None else of_new.contiguous()
    given: dict[str, Any] = {"q": query, "k": key, "v": value, "scale": scale}
    given |= {"initial_state": matrix, "do": of_read, "dht": of_new}
    if beta is not None:
        given["beta"] = beta.contiguous()
        if total.dim() == 3:
            found = call.chunk_gated_delta_rule_bwd(g=total, A=solved, **given)
        else:
            found = call.chunk_kda_bwd(g=total, Aqk=scores, Akk=solved, **given)
        to_query, to_key, to_value, to_beta, to_decay, to_matrix, *_ = found
        to_beta = to_beta.to(beta.dtype)
    else:
        to_beta = query.new_empty(0)
        if total.dim() == 3:
            *found, to_decay, to_matrix = call.chunk_simple_gla_bwd(g=total, g_gamma=None, chunk_size=CHUNK, **given)
            to_decay = call.chunk_local_cumsum(to_decay, chunk_size=CHUNK, reverse=True)
        else:
            *found, to_decay, to_matrix = call.chunk_gla_bwd(
                g=None, g_cumsum=total, h=None, A=scores, chunk_size=CHUNK, **given
            )
        to_query, to_key, to_value = found
    if to_decay.dim() > decay.dim():
        to_decay = to_decay.sum(-1)
    like = ((to_query, query), (to_key, key), (to_value, value), (to_decay, decay))
    return *(gradient.to(part.dtype) for gradient, part in like), to_beta, to_matrix


def _unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    unit, factors = fla().l2norm_fwd(rows.contiguous())
    return unit, factors


def _unit_rows_backward(of_unit: Tensor, unit: Tensor, factors: Tensor) -> Tensor:
    found: Tensor = fla().l2norm_bwd(unit, factors, of_unit.contiguous())
    return found


def _gated_norm(rows: Tensor, gate: Tensor, gain: Tensor, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    gated, _, factors, _ = fla().layer_norm_gated_fwd(
        flat,
        gate.reshape(flat.shape).contiguous(),
        gain.contiguous(),
        None,
        activation="silu" if silu else "sigmoid",
        eps=eps,
        is_rms_norm=True,
    )
    return gated.view(rows.shape), factors.view(rows.shape[:-1])


def _gated_norm_backward(
    of_gated: Tensor, rows: Tensor, gate: Tensor, gain: Tensor, factors: Tensor, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_gated, flat, gates = (part.reshape(-1, rows.shape[-1]).contiguous() for part in (of_gated, rows, gate))
    to_rows, to_gate, to_gain, *_ = fla().layer_norm_gated_bwd(
        of_gated,
        flat,
        gates,
        gain.contiguous(),
        None,
        activation="silu" if silu else "sigmoid",
        eps=eps,
        rstd=factors.flatten(),
        is_rms_norm=True,
    )
    return to_rows.view(rows.shape), to_gate.view(rows.shape), to_gain


def _pad_tail(tail: Tensor) -> Tensor:
    """Return the rows before a segment as fla keeps them, (B, W, kernel): the oldest of its columns is not read."""
    return F.pad(tail.mT, (1, 0)).contiguous()


def _convolution(
    rows: Tensor, tail: Tensor, taps: Tensor, widths: list[int], silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    parts = zip(*(part.split(widths, dim=axis) for part, axis in ((rows, 2), (tail, 2), (taps, 0))), strict=True)
    first, second, third = (
        fla().causal_conv1d_fwd(
            x=own,
            weight=weights.contiguous(),
            bias=None,
            residual=None,
            initial_state=_pad_tail(before),
            activation="silu" if silu else None,
        )[0]
        for own, before, weights in parts
    )
    return first, second, third


def _convolution_backward(
    first: Tensor, second: Tensor, third: Tensor, rows: Tensor, tail: Tensor, taps: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    to_rows, to_taps, _, _, to_before = fla().causal_conv1d_bwd(
        x=rows,
        dy=torch.cat([first, second, third], dim=-1),
        dht=None,
        weight=taps.contiguous(),
        initial_state=_pad_tail(tail),
        activation="silu" if silu else None,
    )
    return to_rows.contiguous(), to_before[..., 1:].mT.contiguous(), to_taps


def _meta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, matrix: Tensor, scale: float
) -> tuple[Tensor, ...]:
    total = query.new_empty(_spread_decay(decay, query).shape, dtype=torch.float32)
    none, pairs, is_vector = query.new_empty(0), (*query.shape[:3], CHUNK), total.dim() == 4
    scores = query.new_empty(pairs, dtype=query.dtype if beta is not None else torch.float32) if is_vector else none
    solved = none.clone() if beta is None else query.new_empty(pairs)
    return _empty_contiguous(value), _empty_contiguous(matrix), total, scores, solved


def _meta_rule_backward(of_read: Tensor, of_new: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(of_read.new_empty(0) if part is None else _empty_contiguous(part) for part in inputs[:6])


def _empty_contiguous(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _meta_unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_contiguous(rows), rows.new_empty(rows.shape[:-1], dtype=torch.float32)


for _name, _function, _meta in (
    ("linear_rule", _rule, _meta_rule),
    ("linear_rule_backward", _rule_backward, _meta_rule_backward),
    ("fla_unit_rows", _unit_rows, _meta_unit_rows),
    ("fla_unit_rows_backward", _unit_rows_backward, lambda of_unit, unit, factors: _empty_contiguous(unit)),
    ("gated_norm", _gated_norm, lambda rows, *rest: _meta_unit_rows(rows)),
    (
        "gated_norm_backward",
        _gated_norm_backward,
        lambda of_gated, rows, gate, gain, *rest: tuple(map(_empty_contiguous, (rows, gate, gain))),
    ),
    (
        "linear_convolution",
        _convolution,
        lambda rows, tail, taps, widths, silu: tuple(rows.new_empty(*rows.shape[:2], width) for width in widths),
    ),
    (
        "linear_convolution_backward",
        _convolution_backward,
        lambda first, second, third, rows, tail, taps, silu: tuple(map(_empty_contiguous, (rows, tail, taps))),
    ),
):
    for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
        _OPS.impl(_name, _function, _device)
    _OPS.impl(_name, _meta, "Meta")
