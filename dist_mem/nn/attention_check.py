"""Compare fused attention with `simple` on the device at hand, before a training uses it.

Compilers have made wrong kernels of right programs without an error: Triton 3.4 to 3.7.0 for the H100, in products of a
transposed sum (flash-linear-attention's issue 640). Shape letters: B lanes, T queries, J keys, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from dist_mem.nn.attention import attend, masked_softmax, simple_scores
from dist_mem.nn.attention_inputs import AttentionRead, Inputs, Relative, newest_rows, visible_keys
from dist_mem.nn.layers import AttentionLayer

# Of the case: several tiles, and a lane whose context is short.
HEADS, QUERIES, CONTEXT, LENGTHS = 2, 160, 96, (96, 33)
_LIMIT = 8.0  # of an error relative to the largest number, in units of the last place
_SPLIT = 2.0**-18  # unit of a product of float32 by three of TF32
_TF32 = 2.0**-10


class LayerAttention(NamedTuple):
    """What a layer uses: a back end for heads of a width, and its scores by distance."""

    back_end: str
    width: int  # K
    num_by_distance: int  # K, 1 where they are a number per head and distance, 0 where there are none


def kernels_of(model: nn.Module, device_type: str, num_queries: int) -> set[LayerAttention]:
    """Return the fused attention that the model's layers use for segments of `num_queries` tokens."""
    found = set()
    for layer in model.modules():
        if isinstance(layer, AttentionLayer):
            back_end = layer.choose(device_type, num_queries).back_end
            by_distance = 0 if layer.relative_width is None else 1 if layer.has_numbers else layer.relative_width
            projection = cast(nn.Linear, layer.key_value)
            width = projection.out_features // (2 * (layer.num_kv_heads or layer.num_heads))
            if back_end in ("sdpa", "triton"):
                found.add(LayerAttention(back_end, width, by_distance))
    return found


def check_attention(model: nn.Module, device: torch.device, dtype: torch.dtype, num_queries: int) -> None:
    """Raise ValueError if a back end that the model uses differs from `simple` on this device."""
    for kernel in sorted(kernels_of(model, device.type, num_queries)):
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            inputs = _case(kernel, device, dtype)
        if found := difference(partial(attend, back_end=kernel.back_end), inputs):
            raise ValueError(
                f"model.attention: {found} by {kernel.back_end} for heads of {kernel.width} numbers on this device: "
                "set model.attention=simple, and report this with the versions of torch, Triton and the GPU"
            )


def difference(attend_by: Callable[[Inputs], AttentionRead], inputs: Inputs) -> str | None:
    """Return where rows or a gradient differ from those of `simple` in float32, with both numbers; None: nowhere."""
    dtype = inputs.query.dtype
    unit = torch.finfo(dtype).eps
    if dtype == torch.float32:
        unit = _TF32 if torch.backends.cuda.matmul.allow_tf32 else _SPLIT
    for (what, found), (_, wanted) in zip(
        _results(attend_by, inputs), _results(_attend_simply, _in_float32(inputs)), strict=True
    ):
        error = (found.float() - wanted).abs()
        error = torch.where(error.isfinite(), error, torch.inf)
        place, allowed = int(error.argmax()), _LIMIT * unit * float(wanted.abs().max())
        if float(error.max()) > allowed:
            numbers = [float(part.flatten()[place]) for part in (found, wanted)]
            return (
                f"{what} is {numbers[0]:.4g} where simple's is {numbers[1]:.4g} (allowed: {allowed:.2g} more or less)"
            )
    return None


def _attend_simply(inputs: Inputs) -> AttentionRead:
    return AttentionRead(masked_softmax(simple_scores(inputs), inputs.visible) @ inputs.value, None)


def _case(kernel: LayerAttention, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return random inputs in the order of projections, (B, T, H, K)."""

    def random_rows(count: int, width: int) -> Tensor:
        return torch.randn(len(LENGTHS), count, HEADS, width, device=device).to(dtype).permute(2, 0, 1, 3)

    visible = visible_keys(
        newest_rows(torch.tensor(LENGTHS, device=device), CONTEXT), QUERIES, same_length=False, is_tail=True
    )
    query = random_rows(QUERIES, kernel.width) / kernel.width**0.5
    key, value = (random_rows(visible.num_keys, kernel.width) for _ in range(2))
    if not kernel.num_by_distance:
        return Inputs(query, key, value, visible)
    width = kernel.num_by_distance
    table = torch.randn(HEADS, width, visible.num_keys + 1, device=device).to(dtype)
    return Inputs(query, key, value, visible, Relative(random_rows(QUERIES, width) / width**0.5, table, QUERIES - 1))


def _in_float32(inputs: Inputs) -> Inputs:
    query, key, value, visible, relative, _ = inputs
    if relative is not None:
        relative = Relative(relative.query.float(), relative.table.float(), relative.first)
    return Inputs(query.float(), key.float(), value.float(), visible, relative)


def _results(attend_by: Callable[[Inputs], AttentionRead], inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows, and the gradients of a fixed function of them."""
    parts = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    if inputs.relative is not None:
        parts |= {"query of distances": inputs.relative.query, "table of distances": inputs.relative.table}
    leaves = [part.detach().requires_grad_() for part in parts.values()]
    relative = None if inputs.relative is None else Relative(leaves[3], leaves[4], inputs.relative.first)
    with torch.enable_grad():
        rows = attend_by(Inputs(leaves[0], leaves[1], leaves[2], inputs.visible, relative)).rows
        weights = torch.cos(torch.arange(rows.numel(), device=rows.device)).view(rows.shape)
        gradients = torch.autograd.grad((rows.float() * weights).sum(), leaves)
    yield "a row", rows.detach()
    yield from ((f"a gradient of the {name}", gradient) for name, gradient in zip(parts, gradients, strict=True))
