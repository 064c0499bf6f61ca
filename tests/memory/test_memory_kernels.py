"""Our kernels of memories: equal to torch's operators in float64 in Triton's interpreter, and small enough for sm_90.

As tests/nn/test_distance_kernels.py: the interpreter computes in float32, and each test runs in a process of its own.
"""

import importlib
import os
import sys
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dist_mem.memory import infini, memory_kinds
from dist_mem.memory.parts import rank_update
from dist_mem.memory.parts.basis import Fit, expected_basis
from dist_mem.memory.parts.densities import moments
from dist_mem.memory.parts.kernel_choice import UsesKernels, describe_kernels
from dist_mem.memory.parts.rank_update import LayerUpdate, UpdateLaunch
from dist_mem.memory.parts.stored_rows import Store, is_written, nearest, read_rows, readable_rows, weigh
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.unit_attention import unit
from tests.support.contract_cases import assert_near, computed, subject
from tests.support.own_process import in_child, in_new_child
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it has no macOS wheels")
HEADS, QUERIES = 2, 4


class Case(NamedTuple):
    """Sizes of a search, and its kind."""

    width: int
    mem_len: int
    number: int
    written: list[int]  # tokens, by lane
    search: str = "exact"
    reads_empty: bool = False
    forgets: bool = False  # some rows are hidden
    has_ties: bool = False


CASES = {
    "all rows in one part, of an empty lane none": Case(16, 16, 4, [40, 5, 0]),
    "rows in parts, and finds in parts": Case(10, 70, 8, [100, 13]),
    "every row": Case(24, 16, 16, [40, 13]),
    "rows not written, which are read": Case(16, 20, 5, [40, 3], reads_empty=True),
    "hidden rows": Case(16, 20, 5, [40, 13], forgets=True),
    "equal scores": Case(16, 70, 8, [100, 50], has_ties=True),
    "buckets": Case(16, 24, 6, [40, 13], search="buckets", forgets=True),
    "more rows than a program loads": Case(16, 19, 19, [50, 11], search="buckets"),
    "heads of 64": Case(64, 20, 5, [40, 13]),
}


def drawn(case: Case) -> tuple[Tensor, Store]:
    """Return queries (H, B, T, K) in the order of a projection, and a store; numbers are few where scores are equal."""
    torch.manual_seed(3)
    lanes = len(case.written)
    query = torch.randn(lanes, QUERIES, HEADS, case.width).permute(2, 0, 1, 3)
    keys, values = torch.randn(2, lanes, HEADS, case.mem_len, case.width)
    if case.has_ties:
        query, keys = (part.clamp(-1, 1).round() for part in (query, keys))
    shown: Any = torch.rand(lanes, case.mem_len) > 0.3 if case.forgets else ()
    store = Store(keys, values, torch.tensor(case.written), shown)
    filled = is_written(store)[:, None, :, None]
    return query, store._replace(keys=filled * keys, values=filled * values)


def with_small_tiles(name: str) -> Any:
    """Return a module of operators, whose kernels take 16 rows at a time."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    module: Any = importlib.import_module(f"dist_mem.memory.parts.{name}")
    for size in {"CHUNK", "READ_ROWS", "UNIT_ROWS", "TURNED", "COLUMNS"} & set(vars(module)):
        setattr(module, size, 16)
    module.CANDIDATES = 16  # so few that queries are searched one after another
    if hasattr(module, "TILES"):
        module.TILES = dict.fromkeys(module.TILES, (16, 4))
    return module


def search_and_compare(cases: dict[str, Case]) -> None:
    module = with_small_tiles("fused_rows")
    for name, case in cases.items():
        query, store = drawn(case)
        first = query.transpose(0, 1)
        expected = nearest(first, store, number=case.number, search=case.search, chunk_len=99, empty=case.reads_empty)
        found = module.nearest_rows(query, store.keys, module.marks_of(store), number=case.number, search=case.search)
        found = found.transpose(0, 1).long()
        readable = readable_rows(store, empty=False)[:, None, None].expand(*found.shape[:3], -1)

        def chosen(index: Tensor, readable: Tensor = readable) -> Tensor:
            return torch.zeros_like(readable).scatter(3, index, True) & readable

        if case.has_ties:  # of equal scores, the row of the lowest number
            scores = torch.where(readable, first @ store.keys.mT, -torch.inf)
            expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., : case.number]
        assert torch.equal(chosen(found), chosen(expected)), name
        assert torch.equal(found.sort(-1).values.diff(dim=-1) > 0, torch.ones_like(found[..., 1:], dtype=torch.bool))


def read_and_compare(cases: dict[str, Case]) -> None:
    module = with_small_tiles("fused_rows")
    for name, case in cases.items():
        query, store = drawn(case)
        marks, gain = module.marks_of(store), torch.rand(HEADS) + 0.5
        index = module.nearest_rows(query, store.keys, marks, number=case.number, search=case.search)
        wide = store._replace(keys=store.keys.double(), values=store.values.double())

        def plain(query: Tensor, gain: Tensor, wide: Store = wide, index: Tensor = index, case: Case = case) -> Tensor:
            scaled, rows = unit(query) * gain[:, None, None, None], index.transpose(0, 1).long()
            weights = weigh(scaled.transpose(0, 1), wide, rows, empty=case.reads_empty)
            return read_rows(weights, wide, rows).transpose(0, 1)

        how = {"number": case.number, "search": case.search, "empty": case.reads_empty}
        compare(
            name, plain, lambda *given, store=store, how=how: module.read_nearest(*given, store, **how), query, gain
        )


def compare(name: str, plain: Any, fused: Any, *given: Tensor) -> None:
    """Compare results in float64 and of a kernel, and the gradients of a fixed function of them."""
    found = []
    for function, dtype in ((plain, torch.float64), (fused, torch.float32)):
        inputs = [part.to(dtype).requires_grad_() for part in given]
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        weights = [torch.linspace(-1.0, 1.0, part.numel(), dtype=dtype).view(part.shape) for part in results]
        loss = torch.stack([(part * weight).sum() for part, weight in zip(results, weights, strict=True)]).sum()
        found.append([*results, *torch.autograd.grad(loss, inputs)])
    for wanted, one in zip(*found, strict=True):
        assert (one - wanted).abs().max() <= 5e-6 * max(1.0, float(wanted.detach().abs().max())), name


def compare_rows() -> None:
    module = with_small_tiles("fused_rows")
    rows, others = torch.randn(2, 3, 35, HEADS, 10).permute(0, 3, 1, 2, 4)
    gain, share = torch.randn(HEADS), torch.rand(HEADS, 3)
    compare("unit", lambda rows, gain: unit(rows) * gain[:, None, None, None], module.unit_rows, rows, gain)
    compare("unit without a scale", unit, module.unit_rows, rows)

    def mixed(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
        return share[..., None, None] * one + (1.0 - share[..., None, None]) * other

    compare("mix", mixed, module.mix_rows, rows, others, share)


def rows_of(*counts: int, width: int) -> list[Tensor]:
    """Return random rows of 3 lanes, (H, B, T, K) in the order of a projection."""
    return [torch.randn(3, count, HEADS, width).permute(2, 0, 1, 3) for count in counts]


def compare_signals() -> None:
    module = with_small_tiles("fused_signal")
    torch.manual_seed(0)
    for num_queries, num_basis, width in ((20, 40, 10), (16, 64, 16)):
        (values,), basis = rows_of(num_basis, width=width), {"widths": (0.02, 0.1), "num_basis": num_basis}
        mean, variance = torch.rand(2, HEADS, 3, num_queries)

        def plain(mean: Tensor, variance: Tensor, values: Tensor, basis: Any = basis) -> Tensor:
            return expected_basis(mean, variance, **basis) @ values

        fused = partial(module.read_signal, **basis)
        compare(f"{num_basis} functions", plain, fused, mean, 0.1 * variance + 1e-4, values)
        query, keys = rows_of(num_queries, num_basis, width=width)
        places = (torch.arange(num_basis).double() + 0.5) / num_basis
        compare(f"moments of {num_basis} samples", partial(moments, places=places), module.moments, query, keys)
    module.APPENDED = module.AppendLaunch(size=16, step=16, warps=4)
    has_new, is_first = torch.tensor([False, True, True]), torch.tensor([True, True, False])
    fit, old = (
        Fit(torch.randn(20, 18), torch.empty(0), torch.randn(20, 18), torch.randn(20, 20)),
        torch.randn(3, 20, 10),
    )
    old[is_first] = 0.0

    def appended(rows: Tensor) -> Tensor:
        first, _, new, linear = (part.double() for part in fit)
        fitted = torch.where(is_first[:, None, None], first, new) @ rows + linear @ old.double()
        return torch.where(has_new[:, None, None], fitted, old.double())

    fused = partial(module.append_rows, fit, old=old, has_new=has_new, is_first=is_first)
    compare("appended rows", appended, fused, torch.randn(3, 18, 10))


def compare_matrices() -> None:
    module = with_small_tiles("fused_matrix")
    torch.manual_seed(0)
    for width in (10, 16):
        query, key, value = rows_of(20, 20, 20, width=width)
        matrix, norm = torch.randn(3, HEADS, width, width), torch.rand(3, HEADS, width) + 0.1
        matrix[0], norm[0] = 0.0, 0.0  # an empty memory
        num_real = torch.tensor([20, 13, 0])

        def read(query: Tensor, matrix: Tensor, norm: Tensor) -> Tensor:
            return infini.recall(infini.sigma(query.transpose(0, 1)), infini.InfiniState(matrix, norm)).transpose(0, 1)

        compare("recall", read, module.recall, query, matrix, norm)
        for rule in ("delta", "linear"):

            def written(
                key: Tensor, value: Tensor, *state: Tensor, rule: str = rule, num_real: Tensor = num_real
            ) -> tuple[Tensor, Tensor]:
                features = infini.sigma(key.transpose(0, 1)) * (torch.arange(20) < num_real[:, None])[:, None, :, None]
                new = value.transpose(0, 1)
                new = new - infini.recall(features, infini.InfiniState(*state)) if rule == "delta" else new
                return state[0] + features.mT @ new, state[1] + features.sum(dim=2)

            fused = partial(module.write, num_real=num_real, rule=rule)
            compare(rule, written, fused, key, value, matrix, norm)
    for width in (10, 7):
        (rows,) = rows_of(20, width=width)

        def turned(rows: Tensor) -> Tensor:
            return infini.rotate(rows, infini.turns(20, rows)) * 0.3

        compare(f"turns of {width} numbers", turned, partial(module.turn, scale=0.3), rows)


@pytest.mark.usefixtures("interpreter")
def test_the_search_finds_the_nearest_rows_and_of_equal_ones_the_first() -> None:
    in_new_child(search_and_compare, CASES)


@pytest.mark.usefixtures("interpreter")
def test_what_is_read_and_its_gradients_equal_those_in_float64() -> None:
    in_new_child(
        read_and_compare, {name: case for name, case in CASES.items() if not case.has_ties and case.width < 64}
    )


@pytest.mark.usefixtures("interpreter")
def test_units_and_mixtures_equal_those_in_float64() -> None:
    in_new_child(compare_rows)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("compare_all", [compare_signals, compare_matrices])
def test_signals_and_matrices_and_their_gradients_equal_those_in_float64(compare_all: Any) -> None:
    in_new_child(compare_all)


UPDATES = [  # widths of the layers, rows of a chunk
    ([(20, 24), (24, 20)], 20),
    ([(9, 17), (17, 17), (17, 9)], 7),
]


def drawn_updates(widths: list[tuple[int, int]], *, num_rows: int, is_back: bool) -> list[LayerUpdate]:
    """Return updates of layers: one pair of rows and columns on; two pairs back, three after the first layer."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(3, *shape, generator=generator)

    updates = []
    for layer, (inputs, outputs) in enumerate(widths):
        further = is_back + (is_back and layer > 0)
        rows = [draw(num_rows, inputs) for _ in range(1 + further)]
        columns = [draw(num_rows, 2 * outputs), *(draw(num_rows, outputs) for _ in range(further))]
        state, old = draw(inputs, 2 * outputs), draw(inputs, 2 * outputs)
        updates.append(LayerUpdate(state, rows, columns, torch.full_like(state, torch.nan), old if is_back else None))
    return updates


def updated(updates: list[LayerUpdate], mix: Tensor) -> list[Tensor]:
    sums = [part.sum(1) for part in rank_update.rank_update(updates, mix)]
    return [*(one.out for one in updates), *([torch.stack(sums).sum(0)] if sums else [])]


def compare_updates() -> None:
    rank_update.LAUNCH = UpdateLaunch(width=16, rows=16)
    mix = torch.rand(3, 3, generator=torch.Generator().manual_seed(1))
    for (widths, num_rows), is_back in product(UPDATES, (False, True)):
        expected = updated(drawn_updates(widths, num_rows=num_rows, is_back=is_back), mix)
        with torch.library._scoped_library("dist_mem", "IMPL") as operators:
            operators.impl("rank_update", rank_update.launch_kernel, "CPU", allow_override=True)
            found = updated(drawn_updates(widths, num_rows=num_rows, is_back=is_back), mix)
        for one, wanted in zip(found, expected, strict=True):
            assert (one - wanted).abs().max() <= 2e-6 * wanted.abs().max(), (widths, num_rows, is_back)


@pytest.mark.usefixtures("interpreter")
def test_next_states_and_gradients_are_those_of_torchs_operations() -> None:
    in_new_child(compare_updates)


def compute_with_both(kind: str) -> None:
    """Compare losses, states and gradients of a small model with those of torch's operators."""
    for name in ("fused_rows", "fused_signal", "fused_matrix"):
        with_small_tiles(name)
    found = []
    for back_end in ("torch", "triton"):
        checked = subject(kind, attention="simple")
        model = checked.model()
        for part in model.modules():
            if isinstance(part, UsesKernels):
                part.__dict__["choose_kernels"] = lambda *_, chosen=back_end: BackEndChoice(chosen, "")
        found.append(computed(model, checked.read(model)))
    assert_near(found[1], found[0], 2e-3, kind)


def has_kernels(kind: str) -> bool:
    return any(isinstance(part, UsesKernels) for part in subject(kind).model().modules())


KINDS = [kind for kind in memory_kinds() if has_kernels(kind)]


def test_memories_with_kernels_are_found() -> None:
    assert {"memorizing", "infini", "infinite", "titans"} <= set(KINDS)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_every_memory_with_kernels_has_the_results_of_torch(kind: str) -> None:
    in_new_child(compute_with_both, kind)


def test_a_message_on_gpus_says_what_computes() -> None:
    model = subject("memorizing").model()
    assert describe_kernels(model, "cpu", 512) == []
    (line,) = describe_kernels(model, "cuda", 512)
    assert line.startswith("stored rows of ") and "triton" in line
    (line,) = describe_kernels(subject("memorizing", attention="simple").model(), "cuda", 512)
    assert "torch (model.attention)" in line


def compile_all(cases: str, kernels_of: str, *width: int) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    found = list(getattr(importlib.import_module(f"lib.{cases}"), kernels_of)(*width))
    assert found
    for kernel in found:
        assert not kernel.error and kernel.registers, kernel
        assert kernel.spilled <= 64 and kernel.shared <= 113 * 1024, kernel


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cases",
    [
        *(("memory_kernel_cases", "memory_kernels_of", width) for width in (64, 128)),
        *(("distance_cases", "distance_kernels_of", width) for width in (64, 128)),
        ("update_cases", "update_kernels_of"),
    ],
    ids=str,
)
def test_kernels_for_hopper_spill_little_and_two_blocks_fit(cases: tuple[Any, ...]) -> None:
    in_child(partial(compile_all, *cases))
