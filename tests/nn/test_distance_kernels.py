"""Our Triton kernels: equal to attention in float64 in Triton's interpreter.

The interpreter computes on CPU tensors in float32; whether a module's kernels are interpreted is decided when it is
imported, so each test runs in a process of its own. That they are small enough for sm_90: test_memory_kernels.py.
"""

import importlib
import os
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_mem.memory import memory_kinds
from dist_mem.memory.parts.look_ahead import visible_ahead
from dist_mem.nn import layers
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.attention_inputs import AttentionRead, Inputs, Relative, visible_keys
from dist_mem.nn.chunked_attention import attend_in_chunks, learned_tensors
from tests.support.contract_cases import assert_near, computed, subject
from tests.support.own_process import in_new_child

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it has no macOS wheels")
HEADS = 2


class Case(NamedTuple):
    """Sizes of an attention, and its kind."""

    width: int
    num_queries: int
    context_len: int
    lengths: list[int]  # valid rows of the context, by lane
    same_length: bool = False
    scalar: bool = False  # scores by distance do not depend on the query's direction, as T5's
    ahead: int = 0  # rows of the memory look ahead at so many keys


CASES = {
    "whole and ragged context": Case(16, 32, 32, [32, 13, 0]),
    "sizes between tiles": Case(16, 40, 24, [24, 7]),
    "no context": Case(16, 20, 0, [0]),
    "a width between powers of two": Case(10, 37, 19, [19, 7]),
    "same length": Case(16, 33, 31, [31, 5], same_length=True),
    "a number per distance": Case(16, 32, 32, [32, 13], scalar=True),
    "rows that look ahead, some at nothing": Case(16, 40, 40, [40, 13, 0], ahead=20),
    "heads of 64": Case(64, 40, 48, [48, 17]),
    "heads of 128": Case(128, 40, 48, [48, 17]),
}


def drawn(case: Case, dtype: torch.dtype) -> Inputs:
    """Return random inputs, whose rows have the order of projections, (B, T, H, K)."""
    generator = torch.Generator().manual_seed(5)

    def rows(count: int, width: int = case.width) -> Tensor:
        made = torch.randn(len(case.lengths), count, HEADS, width, generator=generator).to(dtype)
        return made.permute(2, 0, 1, 3).requires_grad_()

    valid = torch.arange(case.context_len) >= case.context_len - torch.tensor(case.lengths)[:, None]
    if case.ahead:
        window = torch.tensor(case.lengths).clamp(max=case.ahead)
        visible = visible_ahead(valid, window, case.ahead)
        num_columns, first = case.context_len + 1, case.context_len - case.ahead
    else:
        visible = visible_keys(valid, case.num_queries, same_length=case.same_length)
        num_columns, first = visible.num_keys + 1, case.num_queries - 1
    by_distance = 1 if case.scalar else case.width
    query, asking = rows(visible.num_queries), rows(visible.num_queries, by_distance)
    table = torch.randn(HEADS, by_distance, num_columns, generator=generator).to(dtype).requires_grad_()
    key, value = rows(visible.num_keys), rows(visible.num_keys)
    return Inputs(query, key, value, visible, Relative(asking, table, first))


def results(inputs: Inputs, read: AttentionRead) -> list[Tensor]:
    """Return rows and log-sums, and the gradients of a fixed function of both; log-sums of nothing count as 0."""
    assert read.log_sum is not None
    sums = torch.where(read.log_sum == -torch.inf, 0.0, read.log_sum)
    weights = [torch.linspace(-1.0, 1.0, part.numel(), dtype=part.dtype).view(part.shape) for part in (read.rows, sums)]
    loss = (read.rows * weights[0]).sum() + (sums * weights[1]).sum()
    return [read.rows, sums, *torch.autograd.grad(loss, learned_tensors(inputs))]


def interpreted() -> Any:
    """Return the module of the operators, whose kernels Triton interprets, with tiles of 16."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    module: Any = importlib.import_module("dist_mem.nn.distance_attention")
    module.LAUNCHES = dict.fromkeys(module.LAUNCHES, module.Launches(*3 * [module.TileLaunch(16, 4)]))
    return module


def compare_with_float64(cases: dict[str, Case]) -> None:
    attend = interpreted().distance_attention
    for name, case in cases.items():
        wide, inputs = drawn(case, torch.float64), drawn(case, torch.float32)
        expected = results(wide, attend_in_chunks(wide, log_sum=True))
        for one, wanted in zip(results(inputs, attend(inputs)), expected, strict=True):
            # Sums of 128 products in float32; without AVX-512 the interpreter adds them up in another order.
            assert (one - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.usefixtures("interpreter")
def test_rows_log_sums_and_gradients_equal_those_in_float64() -> None:
    in_new_child(compare_with_float64, CASES)


def compute_with_both(case: str) -> None:
    """Compare losses, states and gradients of a small model with those of `simple`."""
    interpreted()
    layers.choose_kernel = lambda device_type, *, relative_width: BackEndChoice(
        "chunked" if relative_width is None else "triton", ""
    )
    simple, fused = (
        computed(model := checked.model(), checked.read(model))
        for checked in (subject(case, attention=back_end) for back_end in ("simple", "triton"))
    )
    assert_near(fused, simple, 2e-3, case)


def has_scores_by_distance(kind: str) -> bool:
    return any(getattr(module, "relative_width", None) for module in subject(kind).model().modules())


KINDS = [kind for kind in memory_kinds() if has_scores_by_distance(kind)]


def test_memories_with_scores_by_distance_are_found() -> None:
    assert {"none", "transformer_xl", "compressive", "lamemo", "infinite", "memorizing"} <= set(KINDS)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", [*KINDS, "infinite over lamemo"])
def test_every_memory_with_scores_by_distance_has_the_results_of_simple(case: str) -> None:
    in_new_child(compute_with_both, case)
