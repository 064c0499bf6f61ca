"""Which back end computes a linear memory (`memory.kernels`), and the check of fla's kernels on the device at hand.

Compilers have made wrong kernels of right programs, without an error (flash-linear-attention's issues 640, 984, 1138).
So the first use of a kernel in a process compares it with the recurrence on a small case, in which a lane is short:
outputs, matrix and all gradients. A kernel that differs is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.parts.linear_kernels import (
    WIDEST,
    LinearRows,
    gated_norm,
    kernel_convolution,
    kernel_rule,
    spreads_decays,
    unit_rows,
    why_not,
)
from dist_mem.memory.parts.linear_rule import RuleTokens, recurrent_rule
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.convolution import convolve

KERNELS = ("auto", "torch", "fla")  # memory.kernels
LANES, SEG_LEN, SHORT, HEADS, KERNEL = 2, 100, 37, 2, 4  # of the case; SHORT: real tokens of the second lane
_LIMIT = 4.0  # of an error relative to the largest number, in units of the last place of a product's inputs
_TF32 = 2.0**-10  # this unit of products of float32 on tensor cores


def choose(
    kernels: str, device_type: str, dtype: torch.dtype, *, d_key: int, d_value: int, delta: bool, by_row: bool
) -> BackEndChoice:
    """Return the back end of `memory.kernels` for activations of a dtype, torch or fla, and why.

    Args:
        device_type: cuda without a GPU here, as for plans and fake tensors: no kernel is run.
        by_row: decays differ by row of the matrix.

    Raises:
        ValueError: memory.kernels is fla, which cannot run.
    """
    if kernels == "torch" or device_type == "meta":  # meta: operations are counted, of no device
        return BackEndChoice("torch", "memory.kernels")
    reason = _why_not_on(device_type, dtype, d_key, is_forced=kernels == "fla")
    if reason is None and torch.cuda.is_available():
        reason = difference(dtype, d_key, d_value, delta, by_row)
    if reason is None:
        spread = "; decays per head as decays per row, because Triton below 3.7.1 compiles theirs wrongly for this GPU"
        said = "flash-linear-attention's kernels, which agree with the recurrence on this device"
        return BackEndChoice("fla", said + (spread if spreads_decays() and not by_row else ""))
    if kernels == "fla":
        raise ValueError(f"memory.kernels is fla, but {reason}: set memory.kernels to auto or torch")
    return BackEndChoice("torch", reason)


@torch.compiler.assume_constant_result
def back_end(
    kernels: str, device_type: str, dtype: torch.dtype, d_key: int, d_value: int, delta: bool, by_row: bool
) -> str:
    """Return the back end of `choose`, as a constant of compiled code."""
    return choose(kernels, device_type, dtype, d_key=d_key, d_value=d_value, delta=delta, by_row=by_row).back_end


def _why_not_on(device_type: str, dtype: torch.dtype, d_key: int, *, is_forced: bool) -> str | None:
    """Return why fla's kernels cannot, or as `auto` shall not, compute this; None if they do."""
    if device_type != "cuda":
        return f"flash-linear-attention's kernels run on GPUs, and this device is {device_type}"
    if dtype == torch.float64:
        return "flash-linear-attention's kernels compute in float32 at most, and the activations are float64"
    if d_key > WIDEST:
        return f"flash-linear-attention's kernels take keys of at most {WIDEST} numbers, and memory.d_key is {d_key}"
    is_planned = is_forced and not torch.cuda.is_available()
    if not is_planned and (reason := why_not()):
        return reason
    if dtype == torch.float32 and not is_forced and not torch.backends.cuda.matmul.allow_tf32:
        return "flash-linear-attention's kernels multiply float32 as TF32, and train.tf32 is false"
    return None


@cache
def difference(dtype: torch.dtype, d_key: int, d_value: int, delta: bool, by_row: bool) -> str | None:
    """Compare the kernels with the recurrence on the GPU: where they differ most, if beyond the limit; None if not."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([torch.cuda.current_device()]):
        torch.manual_seed(0)
        try:
            return differs("cuda", dtype, d_key, d_value, delta=delta, by_row=by_row)
        except Exception as error:  # of a compiler, or of a launch that asks for more than this GPU has
            text = " ".join(str(error).split())[:300]
            return f"flash-linear-attention's kernels fail on this device ({type(error).__name__}: {text})"


def differs(device: str, dtype: torch.dtype, d_key: int, d_value: int, *, delta: bool, by_row: bool) -> str | None:
    """Return where a kernel differs from the recurrence, with both numbers, or how it fails; None if they agree."""
    limit = _LIMIT * (_TF32 if dtype == torch.float32 else torch.finfo(dtype).eps)
    cases = (
        _rule_case(device, dtype, d_key, d_value, delta=delta, by_row=by_row),
        _unit_case(device, dtype, d_key),
        _norm_case(device, dtype, d_value),
        _convolution_case(device, dtype, d_key),
    )
    for what, found, expected in (part for case in cases for part in case):
        error = (found.float() - expected).abs()
        error = torch.where(error.isfinite(), error, torch.inf)
        place, scale = int(error.argmax()), float(expected.abs().max())
        if float(error.max()) > limit * scale:
            numbers = float(found.flatten()[place]), float(expected.flatten()[place])
            return (
                f"{what} of flash-linear-attention's kernel is {numbers[0]:.4g} on this device where the recurrence's "
                f"is {numbers[1]:.4g} (allowed: {limit * scale:.2g}): report it with the versions of Triton, fla-core "
                "and the GPU"
            )
    return None


_Compared = Iterator[tuple[str, Tensor, Tensor]]  # what it is, of the kernel, of the reference in float32


def _compare_kernel(
    inputs: dict[str, Tensor],
    kernel: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    outputs: tuple[str, ...],
) -> _Compared:
    """Yield outputs and gradients of both, of a fixed function of all outputs."""
    found = []
    for function, exact in ((kernel, False), (reference, True)):
        leaves = [(part.float() if exact else part).detach().requires_grad_() for part in inputs.values()]
        results = function(*leaves)
        weights = [torch.cos(torch.arange(part.numel(), device=part.device)).view(part.shape) for part in results]
        loss = torch.stack([(part.float() * one).sum() for part, one in zip(results, weights, strict=True)]).sum()
        found.append([*results, *torch.autograd.grad(loss, leaves)])
    names = (*outputs, *(f"the gradient of the {name}" for name in inputs))
    yield from ((name, ours.detach(), exact.detach()) for name, ours, exact in zip(names, *found, strict=True))


def _rule_case(device: str, dtype: torch.dtype, d_key: int, d_value: int, *, delta: bool, by_row: bool) -> _Compared:
    """Compare the rule from a matrix that holds something; the second lane is short."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(LANES, *shape, device=device)

    real = torch.arange(SEG_LEN, device=device) < torch.tensor([SEG_LEN, SHORT], device=device)[:, None]
    is_real = real[:, :, None].float()
    rows = SEG_LEN, HEADS
    inputs = {
        "queries": (draw(*rows, d_key) / d_key**0.5).to(dtype),
        "keys": F.normalize(draw(*rows, d_key), dim=-1).to(dtype),
        "values": (draw(*rows, d_value) * is_real[..., None]).to(dtype),
        "decays": F.logsigmoid(draw(*rows, *([d_key] if by_row else [])) + 3)
        * (is_real[..., None] if by_row else is_real),
        "matrix": draw(HEADS, d_key, d_value),
    }
    if delta:
        inputs["betas"] = draw(*rows).sigmoid() * is_real

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, matrix: Tensor, *beta: Tensor
    ) -> tuple[Tensor, ...]:
        return kernel_rule(LinearRows(query, key, value, decay, *(beta or (None,))), matrix, scale=1.0)

    def recurrence(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, matrix: Tensor, *beta: Tensor
    ) -> tuple[Tensor, ...]:
        decay = decay if by_row else decay[..., None]
        written = beta[0] if delta else torch.ones_like(query[..., 0])
        parts = (part.transpose(1, 2) for part in (query, key, value, decay, written))
        read, new = recurrent_rule(RuleTokens(*parts), matrix, delta=delta)
        return read.transpose(1, 2), new

    return _compare_kernel(inputs, kernel, recurrence, ("what is read", "the matrix"))


def _unit_case(device: str, dtype: torch.dtype, d_key: int) -> _Compared:
    rows = torch.randn(LANES, SEG_LEN, HEADS, d_key, device=device).to(dtype)

    def kernel(rows: Tensor) -> tuple[Tensor, ...]:
        return (unit_rows(rows),)

    def reference(rows: Tensor) -> tuple[Tensor, ...]:
        return (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6),)

    return _compare_kernel({"rows": rows}, kernel, reference, ("a row of length 1",))


def _norm_case(device: str, dtype: torch.dtype, width: int) -> _Compared:
    rows, gate = (torch.randn(LANES, SEG_LEN, HEADS, width, device=device).to(dtype) for _ in range(2))
    inputs = {"rows": rows, "gate": gate, "gain": torch.randn(width, device=device).to(dtype)}

    def kernel(rows: Tensor, gate: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        return (gated_norm(rows, gate, gain, eps=1e-6, silu=True),)

    def reference(rows: Tensor, gate: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        return (F.rms_norm(rows, (width,), gain, 1e-6) * F.silu(gate),)

    return _compare_kernel(inputs, kernel, reference, ("a norm with its gate",))


def _convolution_case(device: str, dtype: torch.dtype, width: int) -> _Compared:
    widths, all_of = [width, width, 2 * width], 4 * width
    shapes = {"rows": (LANES, SEG_LEN, all_of), "rows before": (LANES, KERNEL - 1, all_of), "taps": (all_of, KERNEL)}
    inputs = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}

    def kernel(rows: Tensor, tail: Tensor, taps: Tensor) -> tuple[Tensor, ...]:
        return kernel_convolution(rows, tail, taps, widths, silu=True)

    def reference(rows: Tensor, tail: Tensor, taps: Tensor) -> tuple[Tensor, ...]:
        return F.silu(convolve(torch.cat([tail, rows], dim=1), taps)).split(widths, dim=-1)

    return _compare_kernel(inputs, kernel, reference, 3 * ("a convolution",))
