"""The kernels of gpu.sh: each is called in one process and timed by CUDA events, beside its floor.

The floor is the roofline of what the same function calls on tensors without values (dist_mem/estimate). Kernels of
flash-linear-attention, if it can be imported, are peers. Shape letters: B lanes, T queries, J keys, H heads, K head
width, R rows, D width, V columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lib.common import seconds
from torch import Tensor

from dist_mem.config import TrainConfig
from dist_mem.estimate.counting import Allocations, MicroBatchCost
from dist_mem.estimate.step_time import seconds_by_group
from dist_mem.memory.parts import linear_rule
from dist_mem.nn.attention import attend
from dist_mem.nn.attention_inputs import Inputs, Relative, Visible
from dist_mem.nn.compilation import compile_once
from dist_mem.nn.cross_entropy import linear_cross_entropy
from dist_mem.nn.kernel_shapes import plan_for
from dist_mem.runtime.devices import Device, device_named, gpu_of

KERNEL = "kernel "  # names of the cases begin so
ROUNDS, TINY_ROUNDS = 20, 2
LANES, SEG_LEN = 16, 1024
Make = Callable[[torch.device, bool], "Call"]


class Call(NamedTuple):
    """A function, and what it takes."""

    function: Callable[..., Sequence[Tensor]]
    inputs: Sequence[Any]  # tensors that have a gradient, and others


def _rows(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.25).requires_grad_()


def _heads(lanes: int, rows: int, heads: int, width: int, device: torch.device) -> Tensor:
    """Return (H, B, T, K) in the order of a projection's output, (B, T, H, K)."""
    return _rows(lanes, rows, heads, width, device=device).detach().permute(2, 0, 1, 3).requires_grad_()


class Shape(NamedTuple):
    """Sizes of attention."""

    context: int  # rows before the first query
    num_heads: int = 12
    d_head: int = 64
    lanes: int = LANES


def attention(device: torch.device, tiny: bool, *, back_end: str, shape: Shape, by_distance: bool) -> Call:
    """Attention of one layer; half of the lanes have a half-empty context."""
    context, heads, width, lanes = shape
    queries = SEG_LEN
    if tiny:
        lanes, heads, queries, context = 2, 2, 32, min(32, context)
    keys = context + queries
    query, key, value = (_heads(lanes, rows, heads, width, device) for rows in (queries, keys, keys))
    begin = torch.arange(lanes, device=device) % 2 * (context // 2)
    valid = torch.arange(context, device=device) >= begin[:, None]
    visible = Visible(valid, queries, keys, upto=context, is_tail=True)
    more: list[Tensor] = []
    if by_distance:
        more = [_heads(lanes, queries, heads, width, device), _rows(heads, width, keys + 1, device=device)]

    def call(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> list[Tensor]:
        relative = Relative(more[0], more[1], queries - 1) if more else None
        return [attend(Inputs(query, key, value, visible, relative), back_end).rows]

    return Call(call, [query, key, value, *more])


def head(device: torch.device, tiny: bool) -> Call:
    """The cross-entropy of the vocabulary of GPT-2, or of a few words."""
    rows, width, columns = (64, 32, 501) if tiny else (LANES * SEG_LEN, 768, 50_257)
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    inputs = [_rows(rows, width, device=device), _rows(columns, width, device=device)]
    return Call(lambda rows, weight: [linear_cross_entropy(rows, targets, ((weight, None),))], inputs)


def linear_tokens(device: torch.device, tiny: bool, *, vector: bool) -> tuple[linear_rule.RuleTokens, Tensor]:
    """Return tokens and states of the linear family as Gated DeltaNet has them: T tokens, K 64, V 128, float32."""
    lanes, heads, count, width = (2, 2, 64, 16) if tiny else (LANES, 12, SEG_LEN, 64)
    draw = partial(_rows, device=device, dtype=torch.float32)
    shape = (lanes, heads, count)
    query, key = (
        torch.nn.functional.normalize(draw(*shape, width).detach(), dim=-1).requires_grad_() for _ in range(2)
    )
    decay = draw(*shape, width if vector else 1).detach().abs().neg().mul_(0.1).requires_grad_()
    write = torch.rand(*shape, device=device).requires_grad_()
    tokens = linear_rule.RuleTokens(query, key, draw(*shape, 2 * width), decay, write)
    return tokens, draw(lanes, heads, width, 2 * width)


def _chunked(*inputs: Tensor) -> list[Tensor]:
    *tokens, matrix = inputs
    return list(linear_rule.chunked_rule(linear_rule.RuleTokens(*tokens), matrix, delta=True, chunk_len=64))


def linear(device: torch.device, tiny: bool, *, vector: bool, compiles: bool) -> Call:
    """The delta rule by chunks of 64 tokens, as `memory.kernels=torch` computes it."""
    tokens, matrix = linear_tokens(device, tiny, vector=vector)
    return Call(compile_once(_chunked) if compiles and device.type != "meta" else _chunked, [*tokens, matrix])


def of_fla(device: torch.device, tiny: bool, *, name: str) -> Call:
    """The same rule by flash-linear-attention: (B, T, H, K) in bfloat16, decays and states in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    is_vector = name == "chunk_kda"
    tokens, matrix = linear_tokens(device, tiny, vector=is_vector)
    wide = [part.detach().transpose(1, 2).contiguous() for part in tokens]
    decay = (wide[3] if is_vector else wide[3].squeeze(-1)).requires_grad_()
    query, key, value, write = (part.bfloat16().requires_grad_() for part in (*wide[:3], wide[4]))
    rule = chunk_kda if is_vector else chunk_gated_delta_rule

    def call(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, matrix: Tensor) -> list[Tensor]:
        return list(rule(query, key, value, decay, write, scale=1.0, initial_state=matrix, output_final_state=True))

    return Call(call, [query, key, value, decay, write, matrix])


_FULL, _ALONE, _WIDE = Shape(SEG_LEN), Shape(0), Shape(SEG_LEN, num_heads=16, d_head=128, lanes=4)  # _WIDE: of 1.3b
CASES: dict[str, Make] = {
    **{
        f"attention by distance, M {shape.context}, K {shape.d_head}: {back_end}": partial(
            attention, back_end=back_end, shape=shape, by_distance=True
        )
        for back_end, shape in (("triton", _FULL), ("triton", _ALONE), ("triton", _WIDE), ("sdpa", _FULL))
    },
    **{
        f"attention, M {shape.context}, K {shape.d_head}: sdpa": partial(
            attention, back_end="sdpa", shape=shape, by_distance=False
        )
        for shape in (_ALONE, _FULL, _WIDE)
    },
    "head, V 50257": head,
    "linear, scalar decay": partial(linear, vector=False, compiles=False),
    "linear, scalar decay, compiled": partial(linear, vector=False, compiles=True),
    "linear, vector decay": partial(linear, vector=True, compiles=False),
    "linear, scalar decay: fla's chunk_gated_delta_rule": partial(of_fla, name="chunk_gated_delta_rule"),
    "linear, vector decay: fla's chunk_kda": partial(of_fla, name="chunk_kda"),
}


def measure(name: str, device: str, *, tiny: bool) -> dict[str, Any]:
    """Return the milliseconds of forward and backward of one call, and their floor."""
    make = CASES[name.removeprefix(KERNEL)]
    is_peer = "fla's" in name
    if is_peer and (device == "cpu" or not find_spec("fla")):
        return {"status": "not installed" if device != "cpu" else "needs a GPU"}
    place = torch.device(device)
    if "triton" in name and device == "cpu":
        return {"status": "needs a GPU"}
    torch.manual_seed(0)
    call = make(place, tiny)
    outputs = call.function(*call.inputs)
    given = [torch.randn_like(output) for output in outputs]
    learned = [each for each in call.inputs if each.requires_grad]

    def both() -> None:
        torch.autograd.grad(call.function(*call.inputs), learned, given)

    rounds = TINY_ROUNDS if tiny else ROUNDS
    forward, whole = (milliseconds(each, rounds) for each in (lambda: call.function(*call.inputs), both))
    # A peer's products are those of our own rule, which are counted instead.
    floor = None if is_peer else 1e3 * floor_of(make, tiny, _card(place))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else None
    return {"status": "done", "forward_ms": forward, "both_ms": whole, "floor_ms": floor, "peak_memory_gb": peak}


def _card(place: torch.device) -> Device:
    """Return the device of the floor: this machine's GPU if its data sheet is known, else an H100."""
    found = gpu_of(torch.cuda.get_device_name()) if place.type == "cuda" else None
    return found or device_named("h100")


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """Return the median of the times of one call: by CUDA's events, or by the clock without a GPU."""
    for _ in range(2):  # compile, allocate
        call()
    if not torch.cuda.is_available():
        return 1e3 * statistics.median(seconds(call) for _ in range(rounds))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(marks))


def floor_of(make: Make, tiny: bool, device: Device) -> float:
    """Return the seconds that the counted bytes and products of forward and backward need at least."""
    with torch.device("meta"), plan_for("cuda"):
        call = make(torch.device("meta"), tiny)
        with Allocations() as counted:
            outputs = call.function(*call.inputs)
            learned = [each for each in call.inputs if each.requires_grad]
            torch.autograd.grad(outputs, learned, [torch.empty_like(output) for output in outputs])
    kernels = [(1.0, work) for work in counted.kernels]
    return sum(seconds_by_group(MicroBatchCost(0, 0, kernels), TrainConfig(), device).values())


def names() -> list[str]:
    """Return the names of all cases."""
    return [f"{KERNEL}{name}" for name in CASES]
