"""Attention with scores by distance by our own kernels on GPUs (distance_kernels.py), as operators that compile.

A compiled block keeps an operator as it is, and tensors without values get its shapes only, for planning. Nothing of
all queries and keys is kept for the backward; during it, one layer's gradients of scores stand in memory once, in the
dtype of the activations. Shape letters: B lanes, T queries, J keys, H heads, K head width, C columns.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.nn.attention_inputs import AttentionRead, Inputs, Visible

WIDEST = 128  # K; wider heads do not fit into the registers of an H100
_HAS_TRITON = find_spec("triton") is not None
_LEAST = 16  # rows and columns of a product on tensor cores


class TileLaunch(NamedTuple):
    """Sizes of a kernel."""

    size: int  # queries and keys of a tile
    warps: int  # of a program
    stages: int = 1  # loads that are begun ahead


class Launches(NamedTuple):
    forward: TileLaunch
    keys: TileLaunch
    queries: TileLaunch


# By bytes of a number and largest K: on sm_90 none spills more than 64 bytes or takes more than 113 KB of shared memory
# (tests/nn/test_distance_kernels.py compiles them).
LAUNCHES = {
    (2, 64): Launches(TileLaunch(64, 4, 2), TileLaunch(64, 8), TileLaunch(64, 4, 2)),
    (2, 128): Launches(TileLaunch(64, 8), TileLaunch(32, 4, 2), TileLaunch(64, 8, 2)),
    (4, 64): Launches(TileLaunch(32, 8), TileLaunch(32, 8, 2), TileLaunch(32, 8)),
    (4, 128): Launches(TileLaunch(16, 8), TileLaunch(16, 8, 2), TileLaunch(16, 8)),
}


def why_not() -> str | None:
    """Return why the kernels cannot run on this machine's GPU; None if they can, or if there is no GPU, for plans."""
    return None if _HAS_TRITON or not torch.cuda.is_available() else "Triton is not installed"


def launches(query: Tensor) -> Launches:
    """Return the sizes of the kernels for queries of this width and dtype."""
    itemsize, width = query.element_size(), query.shape[-1]
    return next(found for (size, largest), found in LAUNCHES.items() if itemsize == size and width <= largest)


def distance_attention(inputs: Inputs) -> AttentionRead:
    """Compute attention with scores by distance, and the log of the sum of exponentials, both with a gradient."""
    query, key, value, visible, relative, _ = inputs
    assert relative is not None and inputs.bias is None, "AttentionLayer.choose"
    asking, table = relative.query, relative.table
    rows, log_sum = _DistanceAttention.apply(query, key, value, asking, table, visible, relative.first)
    return AttentionRead(rows, log_sum)


class _DistanceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, asking: Tensor, table: Tensor, visible: Visible, first: int
    ) -> tuple[Tensor, Tensor]:
        marks, band = _marks(visible), _band(visible, first)
        tensors = (query, key, value, asking, table, *marks)
        rows, log_sum = torch.ops.dist_mem.distance_attention(*tensors, *band)
        ctx.save_for_backward(rows, log_sum, *tensors)
        ctx.band = band
        ctx.set_materialize_grads(False)
        return rows, log_sum

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor | None, of_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, log_sum, *tensors = ctx.saved_tensors
        of_rows = torch.zeros_like(rows) if of_rows is None else of_rows
        *found, to_pairs = torch.ops.dist_mem.distance_attention_backward(
            of_rows, of_log_sum, rows, log_sum, *tensors, *ctx.band
        )
        asking, table = tensors[3:5]
        to_table = torch.bmm(asking.flatten(1, 2).mT, to_pairs.flatten(1, 2))
        return *found, to_table[..., : table.shape[-1]], None, None


def _marks(visible: Visible) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return which keys are valid (B, J), which queries see keys (B, T) or None, and each lane's first valid key (B,).

    A lane's tiles before its first valid key are skipped, without a wait for the device.
    """
    valid = visible.keys()
    first_key = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), valid.shape[1]).amin(dim=1)
    sees = None if visible.sees is None else visible.sees.to(torch.uint8)
    return valid.to(torch.uint8), sees, first_key.to(torch.int32)


def _band(visible: Visible, first: int) -> tuple[int, int, int]:
    """Return the column of query 0 and key 0, and the limits of `Visible`, which are beyond all keys where none is."""
    most = visible.num_queries + visible.num_keys
    above, upto = visible.above, visible.upto
    return first, -most if above is None else above, most if upto is None else upto


_OPS = torch.library.Library("dist_mem", "FRAGMENT")
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor asking, Tensor table, Tensor valid, Tensor? sees, "
    "Tensor first_key, int first, int above, int upto"
)
_OPS.define(f"distance_attention({_INPUTS}) -> (Tensor, Tensor)")
_OPS.define(
    f"distance_attention_backward(Tensor of_rows, Tensor? of_log_sum, Tensor rows, Tensor log_sum, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def like_projected(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor (H, B, T, K) in the order of a projection's output, (B, T, H, K)."""
    heads, lanes, count, width = rows.shape
    return rows.new_empty(lanes, count, heads, width, dtype=dtype).permute(2, 0, 1, 3)


def _outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    return like_projected(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _gradients(query: Tensor, key: Tensor, asking: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and asking, and of the scores of all queries and columns."""
    columns = -(-table.shape[-1] // 8) * 8  # products of odd sizes run on slow kernels of GPUs
    to_pairs = query.new_zeros(*query.shape[:3], columns)
    return *map(like_projected, (query, key, key, asking)), to_pairs


class _Operands(NamedTuple):
    """What both operators are given, as in `_INPUTS`."""

    query: Tensor  # (H, B, T, K), scaled
    key: Tensor  # (H, B, J, K)
    value: Tensor  # (H, B, J, K)
    asking: Tensor  # (H, B, T, K), or one number per query
    table: Tensor  # (H, K, C), or (H, 1, C)
    valid: Tensor  # (B, J) uint8
    sees: Tensor | None  # (B, T) uint8
    first_key: Tensor  # (B,) int32
    first: int
    above: int
    upto: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, J and C."""
        return self.query.shape[1], self.query.shape[2], self.key.shape[2], self.table.shape[-1]


def _operands(*given: Any) -> _Operands:
    """Return the operands with rows whose last axis is contiguous, as the kernels read them."""
    rows: list[Any] = [make_dense(part) for part in given[:4]]
    return _Operands(*rows, *given[4:])


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    from dist_mem.nn import distance_kernels as kernels

    of = _operands(*given)
    rows, log_sum = _outputs(of.query)
    launch = launches(of.query).forward
    by = (*strides(of.query, of.key, of.value, of.asking), *of.table.stride(), *strides(rows))
    kernels.forward[_grid(of.query, of.query.shape[2], launch)](
        *(*of[:8], rows, log_sum, *by, *of.sizes, *of[8:]), SEES=of.sees is not None, **_options(of, launch)
    )
    return rows, log_sum


def _backward(
    of_rows: Tensor, of_log_sum: Tensor | None, rows: Tensor, log_sum: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    from dist_mem.nn import distance_kernels as kernels

    of_rows, of = make_dense(of_rows), _operands(*given)
    query, key, value, asking, table, valid, sees, first_key, *band = of
    to_query, to_key, to_value, to_asking, to_pairs = _gradients(query, key, asking, table)
    chosen, delta = launches(query), torch.empty_like(log_sum)
    if of_log_sum is not None:
        of_log_sum = of_log_sum.contiguous()
    if sees is not None:  # the weights of a query that sees no key are 0
        log_sum = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)
    options = _options(of, chosen.queries)
    by_query = _grid(query, query.shape[2], chosen.queries)
    kernels.row_products[by_query](
        *(rows, of_rows, of_log_sum, delta, *strides(rows, of_rows), *of.sizes[:2]),
        **{name: options[name] for name in ("WIDTH", "PADDED", "SIZE", "num_warps", "num_stages")},
        SUMS=of_log_sum is not None,
    )
    place = (*of.sizes, to_pairs.shape[-1], *band)
    kernels.backward_keys[_grid(query, key.shape[2], chosen.keys)](
        *(query, key, value, asking, table, valid, first_key, of_rows, log_sum, delta, to_key, to_value, to_pairs),
        *(*strides(query, key, value, asking), *table.stride(), *strides(of_rows, to_key), *place),
        **_options(of, chosen.keys),
    )
    kernels.backward_queries[by_query](
        *(key, table, first_key, to_pairs, to_query, to_asking),
        *(*strides(key), *table.stride(), *strides(to_query, to_asking), *place),
        **options,
    )
    return to_query, to_key, to_value, to_asking, to_pairs


def make_dense(rows: Tensor) -> Tensor:
    """Return the same with a contiguous last axis, as kernels read it."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def strides(*parts: Tensor) -> tuple[int, ...]:
    """Return the strides of heads, lanes and rows of each tensor."""
    return tuple(stride for part in parts for stride in part.stride()[:3])


def _grid(query: Tensor, num_rows: int, launch: TileLaunch) -> tuple[int, int]:
    return -(-num_rows // launch.size), query.shape[0] * query.shape[1]


def _options(of: _Operands, launch: TileLaunch) -> dict[str, Any]:
    """Return the constants of a kernel."""
    width = of.query.shape[-1]
    return {
        **{"WIDTH": width, "PADDED": padded_width(width), "SCALAR": of.asking.shape[-1] == 1},
        **{"SIZE": launch.size, "num_warps": launch.warps, "num_stages": launch.stages},
        "PRECISION": precision(),
    }


def padded_width(width: int) -> int:
    """Return the power of two that a row of this width takes in a kernel."""
    return max(_LEAST, 1 << (width - 1).bit_length())


def precision() -> str:
    """Return how kernels multiply float32: by three products of TF32, about as exact, unless torch may use one."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _meta_backward(of_rows: Tensor, of_log_sum: Tensor | None, rows: Tensor, log_sum: Tensor, *rest: Any) -> Any:
    query, key, _, asking, table, *_ = rest
    return _gradients(query, key, asking, table)


for _device in ("CUDA", "CPU"):  # CPU: Triton's interpreter, for tests
    _OPS.impl("distance_attention", _forward, _device)
    _OPS.impl("distance_attention_backward", _backward, _device)
_OPS.impl("distance_attention", lambda query, *rest: _outputs(query), "Meta")
_OPS.impl("distance_attention_backward", _meta_backward, "Meta")
