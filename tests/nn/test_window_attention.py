"""Windows by torch's flash kernels: what they are given is what the mask says, lanes with unequal contexts included.

The kernels are for GPUs. In a process of its own, functions that follow their documentation take their place on CPU
tensors, in float64: sequences by their ends, seen from the lower right corner. Not shown here: the kernels themselves,
which `benchmarks/gpu.sh` compares on a device.
"""

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from dist_mem.nn.attention import masked_softmax, simple_scores
from dist_mem.nn.attention_inputs import Inputs, Visible, newest_rows, visible_keys
from dist_mem.nn.kernel_shapes import plan_for
from dist_mem.nn.window_attention import has_window_kernel, window_attention
from tests.support.own_process import in_child

HEADS, WIDTH = 2, 8


class Case(NamedTuple):
    num_queries: int
    context_len: int
    lengths: list[int]  # valid rows of the context, by lane
    same_length: bool = False


CASES = [
    Case(5, 0, [0, 0]),
    Case(5, 7, [7, 3, 0]),
    Case(7, 5, [0]),
    Case(1, 3, [2, 3]),
    Case(6, 6, [6, 2, 0], same_length=True),
    Case(9, 4, [4, 1], same_length=True),
]


def drawn(case: Case, *, by_head: bool) -> Inputs:
    """Return random inputs, in the order of projections, (B, T, H, K), or of what is made by head."""
    generator = torch.Generator().manual_seed(3)

    def rows(count: int) -> Tensor:
        made = torch.randn(len(case.lengths), count, HEADS, WIDTH, generator=generator, dtype=torch.float64)
        made = made.permute(2, 0, 1, 3)
        return (made.contiguous() if by_head else made).requires_grad_()

    valid = newest_rows(torch.tensor(case.lengths), case.context_len)
    visible = visible_keys(valid, case.num_queries, same_length=case.same_length, is_tail=True)
    return Inputs(rows(case.num_queries), rows(visible.num_keys), rows(visible.num_keys), visible)


def shares(query: Tensor, key: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of one sequence, (H, n, m), and log-sums, (H, n), of rows (n, H, K) and (m, H, K)."""
    place = torch.arange(len(query))[:, None] + len(key) - len(query)
    number = torch.arange(len(key))
    hidden = (number > place) | ((number < place - before) if before >= 0 else torch.zeros(1, dtype=torch.bool))
    scores = torch.einsum("nhk,mhk->hnm", query, key).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def sequences(tensors: list[Tensor], rest: tuple[Any, ...], window: dict[str, Any]) -> list[list[Tensor]]:
    """Check the rest of a call, and return the rows of every sequence: of a query's tensors, and of keys and values."""
    of_queries, of_keys, most_queries, most_keys, dropout, is_causal, *_ = rest
    assert (dropout, is_causal) == (0.0, window["window_size_left"] < 0)
    assert window["scale"] == 1.0 and window["window_size_right"] == 0
    if of_queries is None:
        return [list(lane) for lane in zip(*tensors, strict=True)]
    assert of_queries.dtype == of_keys.dtype == torch.int32
    sizes = {name: ends.diff().tolist() for name, ends in (("queries", of_queries), ("keys", of_keys))}
    assert max(sizes["queries"]) <= most_queries and max(sizes["keys"]) <= most_keys
    assert of_queries[0] == of_keys[0] == 0
    parts = [part.split(sizes["keys" if index in (1, 2) else "queries"]) for index, part in enumerate(tensors)]
    return [list(sequence) for sequence in zip(*parts, strict=True)]


def joined(parts: list[Tensor], ends: Tensor | None, dim: int = 0) -> Tensor:
    return torch.stack(parts) if ends is None else torch.cat(parts, dim=dim)


def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **window: Any) -> tuple[Tensor, ...]:
    rows, sums = [], []
    for asking, keys, values in sequences([query, key, value], rest, window):
        weights, log_sum = shares(asking, keys, window["window_size_left"])
        rows.append(torch.einsum("hnm,mhk->nhk", weights, values))
        sums.append(log_sum)
    seeds = [torch.zeros(size, dtype=torch.uint64) for size in ((2,), ())]
    return joined(rows, rest[0]), joined(sums, rest[0], dim=1), *seeds, query[:0]


def backward(
    of_rows: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, log_sum: Tensor, *rest: Any, **window: Any
) -> tuple[Tensor, ...]:
    assert torch.are_deterministic_algorithms_enabled()
    found: list[list[Tensor]] = [[], [], []]
    for asking, keys, values, read, upstream in sequences([query, key, value, rows, of_rows], rest, window):
        weights, _ = shares(asking, keys, window["window_size_left"])
        products = torch.einsum("nhk,mhk->hnm", upstream, values) - (upstream * read).sum(-1).T[..., None]
        of_scores = weights * products
        found[0].append(torch.einsum("hnm,mhk->nhk", of_scores, keys))
        found[1].append(torch.einsum("hnm,nhk->mhk", of_scores, asking))
        found[2].append(torch.einsum("hnm,nhk->mhk", weights, upstream))
    return tuple(joined(parts, rest[0]) for parts in found)


def compare_with_simple() -> None:
    import dist_mem.nn.window_attention as module

    aten, own = torch.library.Library("aten", "IMPL"), torch.library.Library("dist_mem", "IMPL")
    for name, function in (("forward", forward), ("backward", backward)):
        aten.impl(f"_flash_attention_{name}", function, "CPU")
    own.impl("window_attention", module._forward, "CPU")
    own.impl("window_attention_backward", module._backward, "CPU")
    for case in CASES:
        for by_head in (False, True):
            inputs = drawn(case, by_head=by_head)
            simple = masked_softmax(simple_scores(inputs), inputs.visible) @ inputs.value
            found = window_attention(inputs)
            weights = torch.linspace(-1.0, 1.0, simple.numel(), dtype=torch.float64).view(simple.shape)
            for one, wanted in zip(
                [found, *torch.autograd.grad((found * weights).sum(), inputs[:3])],
                [simple, *torch.autograd.grad((simple * weights).sum(), inputs[:3])],
                strict=True,
            ):
                assert torch.allclose(one, wanted, rtol=0, atol=1e-12), case
            assert not torch.are_deterministic_algorithms_enabled()
            assert cast(Any, torch.utils.deterministic).fill_uninitialized_memory


def test_rows_and_gradients_are_those_of_the_mask_in_a_fixed_order() -> None:
    in_child(compare_with_simple)


@pytest.mark.parametrize("case", CASES)
def test_shapes_without_values_are_those_of_the_kernels(case: Case) -> None:
    inputs = drawn(case, by_head=False)
    query, key, value = (part.detach().to("meta").requires_grad_() for part in inputs[:3])
    visible = inputs.visible._replace(valid=inputs.visible.valid.to("meta"))
    rows = window_attention(Inputs(query, key, value, visible))
    assert rows.shape == inputs.query.shape and rows.stride() == inputs.query.stride()
    found = torch.autograd.grad(rows.sum(), (query, key, value))
    assert [part.shape for part in found] == [part.shape for part in inputs[:3]]


def test_only_what_the_kernels_compute_is_given_to_them() -> None:
    """Not a window with holes or without an end, wide heads, other dtypes, further scores, other devices."""
    inputs = drawn(CASES[1], by_head=False)
    visible, takes = inputs.visible, has_window_kernel
    query, key, value = (part.detach().to("meta", torch.bfloat16) for part in inputs[:3])
    half = Inputs(query, key, value, visible)

    def seen(**changes: Any) -> Inputs:
        return half._replace(visible=Visible(**{**visible._asdict(), **changes}))

    assert not takes(half)
    with plan_for("cuda"):
        assert takes(half) and takes(half._replace(query=half.query.half()))
        assert takes(seen(is_tail=False, valid=visible.valid[:, :0]))
        assert not takes(seen(is_tail=False)) and not takes(seen(upto=None)) and not takes(seen(upto=0))
        assert not takes(seen(sees=torch.ones(3, 5, dtype=torch.bool)))
        assert not takes(half._replace(query=half.query.float()))
        assert not takes(half._replace(bias=torch.zeros(1)))
        assert not takes(half._replace(query=half.query[..., :7]))
        assert not takes(half._replace(query=half.query.repeat(1, 1, 1, 33)))
