"""Position scores: the written backward returns the bits of autograd's, for one table and for several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_mem.nn.position_scores import add_by_distance, align_to_keys

KEYS = 7
# (queries, columns, offset) of each table: as in attention, and as in look-ahead attention with blocks
TABLES = {
    "attention": [(5, KEYS + 1, 4)],
    "blocks": [(2, KEYS + 2, 1), (4, KEYS + 4, 3), (4, KEYS + 1, 0)],
}


@pytest.mark.parametrize("sizes", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradients_have_the_bits_of_plain_operations(
    sizes: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=generator).to(dtype).requires_grad_()

    tables, offsets = [draw(rows, columns) for rows, columns, _ in sizes], [offset for _, _, offset in sizes]
    content = draw(sum(rows for rows, _, _ in sizes), KEYS)
    parts = [align_to_keys(table, offset=offset, num_keys=KEYS) for table, offset in zip(tables, offsets, strict=True)]
    plain = content.to(torch.promote_types(dtype, torch.float32)) + torch.cat(parts, dim=-2)
    upstream = torch.randn(plain.shape, generator=generator, dtype=plain.dtype)

    written = add_by_distance(content, tables, offsets)
    assert torch.equal(written, plain) and written.dtype == plain.dtype
    inputs = [content, *tables]
    expected = torch.autograd.grad(plain, inputs, upstream)
    found = torch.autograd.grad(written, inputs, upstream)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
