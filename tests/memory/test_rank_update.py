"""The kernel of a network's state equals torch's operations in Triton's interpreter.

Whether kernels are interpreted is decided when they are imported, so the test runs in a process of its own. That it is
small enough for sm_90: test_memory_kernels.py.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import pytest
import torch
from torch import Tensor

from dist_mem.memory.parts import rank_update as module
from dist_mem.memory.parts.rank_update import LayerUpdate, UpdateLaunch, rank_update
from tests.support.own_process import in_new_child

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
