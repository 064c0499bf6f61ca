"""Compare the numbers of a device with those of the CPU: every memory, and every back end of attention.

The reference is computed on the CPU in float64. In float64 the device must equal it; in float32 and bfloat16 its error
may be a few times that of the CPU in the same type, as kernels add in another order.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lib.gpu_models import every_memory, model_keys
from lib.speed import configuration
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.contract.subject import total_loss
from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.model import MemoryLM
from dist_mem.nn.attention import BACK_ENDS, attend, mask_scores, simple_scores
from dist_mem.nn.attention_inputs import Inputs, Relative, visible_keys
from dist_mem.runtime.gpu import set_arithmetic

MEMORY, ATTENTION = "memory ", "attention "  # names of the cases begin so
SIZE = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_head": 16, "d_inner": 128, "seg_len": 32}
LANES, SEGMENTS, VOCAB = 3, 3, 50
WIDTHS = (64, 128)  # K of attention
KINDS = (("relative", True, False), ("reach", True, True), ("plain", False, False))
EQUAL = 1e-9  # largest error in float64: the norm of a difference, relative to that of the tensor
SMALL = 1e-3  # share of the largest norm of its kind below which a tensor, as a gradient that cancels, is not resolved
TIMES = 3.0  # the error of a narrower type may be that of the CPU times this, and LEAST
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

Computed = dict[str, Tensor]
Compute = Callable[[torch.device, torch.dtype], Computed]


def measure(name: str, device: str) -> dict[str, Any]:
    """Return the status and the errors of a case."""
    compute: Compute
    reference: Compute | None
    set_arithmetic(tf32=False)  # as a run does; torch allows it for convolutions
    torch.set_num_threads(1)  # small tensors: more threads only get in the way of each other
    if name.startswith(MEMORY):
        block = every_memory(SIZE["seg_len"])[name.removeprefix(MEMORY)]
        compute, reference = partial(steps, block), None
    else:
        back_end, _, width = name.removeprefix(ATTENTION).partition(", K ")
        if back_end == "triton" and device == "cpu":
            return {"status": "needs a GPU"}
        kinds = KINDS[:2] if back_end == "triton" else KINDS  # our kernels have scores by distance only
        compute = partial(rows, back_end, int(width), kinds)
        reference = partial(rows, "simple", int(width), kinds)
    return compared(compute, torch.device(device), reference)


def compared(compute: Compute, device: torch.device, reference: Compute | None) -> dict[str, Any]:
    """Compare the device with the reference on the CPU in float64; None: the same computation."""
    cpu = torch.device("cpu")
    is_own = reference is None
    simple = reference or compute
    expected = simple(cpu, torch.float64)
    found: dict[str, Any] = {}
    is_right = True
    if is_own:  # fused kernels have no float64
        error, place = worst(compute(device, torch.float64), expected)
        found |= {"float64": error, "float64_at": place, "float64_limit": EQUAL}
        is_right &= error <= EQUAL
    for dtype, least in LEAST.items():
        error, place = worst(compute(device, dtype), expected)
        limit = least + TIMES * worst(simple(cpu, dtype), expected)[0]
        text = str(dtype).removeprefix("torch.")
        found |= {text: error, f"{text}_at": place, f"{text}_limit": limit}
        is_right &= error <= limit
    return {"status": "passed" if is_right else "failed", **found}


def worst(found: Computed, expected: Computed) -> tuple[float, str]:
    """Return the largest error of a tensor, relative to its norm, and its place; inf for what is lost."""
    if found.keys() != expected.keys():
        return math.inf, ", ".join(sorted(found.keys() ^ expected.keys()))
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    least: dict[str, float] = {}
    for name, norm in norms.items():
        kind = name.split()[0]
        least[kind] = max(least.get(kind, 0.0), SMALL * norm)
    errors = {name: _error(found[name].cpu(), expected[name], least[name.split()[0]]) for name in expected}
    place = max(errors, key=lambda name: errors[name])
    return errors[place], place


def _error(found: Tensor, expected: Tensor, least: float) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    difference = float((found.double() - expected).norm()) / max(float(expected.double().norm()), least, 1e-30)
    return difference if math.isfinite(difference) else math.inf


def steps(memory: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Computed:
    """Return losses, memories and gradients of several segments."""
    torch.manual_seed(0)
    config = configuration(memory, argparse.Namespace(**SIZE))
    keys = model_keys(memory, SIZE["seg_len"])
    config = change_config(config, {f"model.{name}": value for name, value in keys.items()})
    if device.type == "cuda":  # our kernels for segments of any length; in float64 torch's operators compute
        config = change_config(config, {"model.attention": "sdpa" if memory["kind"] == "titans" else "triton"})
    model = MemoryLM(model_spec(config, VOCAB)).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (SEGMENTS, LANES, SIZE["seg_len"]), generator=generator).to(device)
    valid_len = torch.full((LANES,), SIZE["seg_len"], device=device)
    state = model.init_state(torch.arange(LANES), device, dtype)
    losses = []
    for segment in tokens:
        output = model(segment, segment.roll(-1, 1), valid_len, state=state)
        (total_loss(output) / segment.numel()).backward()
        losses.append(output.nll.detach())
        state = detach_state(output.state)
    found = {"losses": torch.stack(losses)} | {f"state {name}": part for name, part in named_tensors(state).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def rows(
    back_end: str, width: int, kinds: Sequence[tuple[str, bool, bool]], device: torch.device, dtype: torch.dtype
) -> Computed:
    """Return the rows of attention and its gradients; of each kind, whether distances count and reach is equal."""
    heads, queries, context = 4, 128, 128
    found: Computed = {}
    for name, relative, same_length in kinds:
        generator = torch.Generator().manual_seed(3)
        learned: list[Tensor] = []

        def draw(*shape: int, generator: torch.Generator = generator, learned: list[Tensor] = learned) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.25
            learned.append(drawn.to(device, dtype).requires_grad_())
            return learned[-1]

        lanes, num_keys = 2, context + queries
        query, key, value = (draw(heads, lanes, count, width) for count in (queries, num_keys, num_keys))
        position = (
            Relative(draw(heads, lanes, queries, width), draw(heads, width, num_keys + 1), queries - 1)
            if relative
            else None
        )
        valid = torch.arange(context, device=device) >= torch.tensor([context // 2, 0], device=device)[:, None]
        visible = visible_keys(valid, queries, same_length=same_length, is_tail=True)
        inputs = Inputs(query, key, value, visible, position)
        read = _simple(inputs) if back_end == "simple" else attend(inputs, back_end).rows
        given = torch.linspace(-1.0, 1.0, read.numel(), dtype=torch.float64).view(read.shape).to(device, dtype)
        found[f"{name}: rows"] = read.detach()
        for number, gradient in enumerate(torch.autograd.grad(read, learned, given)):
            found[f"{name}: gradient {number}"] = gradient
    return found


def _simple(inputs: Inputs) -> Tensor:
    weights = mask_scores(simple_scores(inputs), inputs.visible).softmax(dim=-1)
    return weights.to(inputs.value.dtype) @ inputs.value


def names() -> Sequence[str]:
    """Return the names of all cases."""
    kinds = [f"{MEMORY}{name}" for name in every_memory(SIZE["seg_len"])]
    back_ends = [name for name in BACK_ENDS if name != "auto"]
    return [*kinds, *(f"{ATTENTION}{name}, K {width}" for name in back_ends for width in WIDTHS)]
