"""The kernel of a network's state: equal to torch's operations in Triton's interpreter, and small enough for sm_90.

Whether kernels are interpreted is decided when they are imported, so each test runs in a process of its own.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch import Tensor

from dist_mem.memory.parts import rank_update as module
from dist_mem.memory.parts.rank_update import LayerUpdate, UpdateLaunch, rank_update
from tests.support.own_process import in_child, in_new_child
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it has no macOS wheels")
SIZES = [  # widths of the layers, rows of a chunk
    ([(20, 24), (24, 20)], 20),
    ([(9, 17), (17, 17), (17, 9)], 7),
]


def drawn(widths: list[tuple[int, int]], *, num_rows: int, is_back: bool) -> list[LayerUpdate]:
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


def results(updates: list[LayerUpdate], mix: Tensor) -> list[Tensor]:
    sums = [part.sum(1) for part in rank_update(updates, mix)]
    return [*(one.out for one in updates), *([torch.stack(sums).sum(0)] if sums else [])]


def compare_with_torch() -> None:
    module.LAUNCH = UpdateLaunch(width=16, rows=16)
    mix = torch.rand(3, 3, generator=torch.Generator().manual_seed(1))
    for (widths, num_rows), is_back in product(SIZES, (False, True)):
        expected = results(drawn(widths, num_rows=num_rows, is_back=is_back), mix)
        with torch.library._scoped_library("dist_mem", "IMPL") as operators:
            operators.impl("rank_update", module.launch_kernel, "CPU", allow_override=True)
            found = results(drawn(widths, num_rows=num_rows, is_back=is_back), mix)
        for one, wanted in zip(found, expected, strict=True):
            assert (one - wanted).abs().max() <= 2e-6 * wanted.abs().max(), (widths, num_rows, is_back)


@pytest.mark.usefixtures("interpreter")
def test_next_states_and_gradients_are_those_of_torchs_operations() -> None:
    in_new_child(compare_with_torch)


def compile_all() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    for kernel in importlib.import_module("lib.update_cases").update_kernels_of():
        assert not kernel.error and kernel.registers, kernel
        assert kernel.spilled <= 64 and kernel.shared <= 113 * 1024, kernel


@pytest.mark.timeout(600)
def test_the_kernel_for_hopper_spills_little_and_two_blocks_fit() -> None:
    in_child(compile_all)
