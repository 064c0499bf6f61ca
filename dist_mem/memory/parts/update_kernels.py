"""The Triton kernel of rank_update.py: each program writes a tile of a layer's weights and that of its momentum.

No address is written twice, so the bits of a repeated step are equal. Shape letters: B lanes, C rows of a chunk, I and
O widths before and after a layer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    rows, columns, row_width, column_width, first_column, place, column, num_inputs, num_outputs, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of rows^T columns, (WIDTH, WIDTH) float32."""
    total = tl.zeros([WIDTH, WIDTH], tl.float32)
    for begin in range(0, num_rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = row < num_rows
        left = tl.load(
            rows + row[None, :] * row_width + place[:, None],
            mask=(place < num_inputs)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            columns + row[:, None] * column_width + first_column + column[None, :],
            mask=inside[:, None] & (column < num_outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def update_tile(
    mix, sums, state, rows_0, rows_1, rows_2, columns_0, columns_1, columns_2, before, out,
    num_inputs, num_outputs, num_rows, lane, part,
    COUNT: tl.constexpr, BACK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of a layer's next state, or of the gradient of the state before; see `rank_update`."""
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    of_rows, of_columns = lane * num_rows * num_inputs, lane * num_rows * num_outputs
    of_weights = product(
        rows_0 + of_rows, columns_0 + 2 * of_columns, num_inputs, 2 * num_outputs, 0, place, column,
        num_inputs, num_outputs, num_rows, WIDTH, ROWS, PRECISION,
    )  # fmt: skip
    of_momentum = product(
        rows_0 + of_rows, columns_0 + 2 * of_columns, num_inputs, 2 * num_outputs, num_outputs, place, column,
        num_inputs, num_outputs, num_rows, WIDTH, ROWS, PRECISION,
    )  # fmt: skip
    if COUNT > 1:
        of_weights += product(
            rows_1 + of_rows, columns_1 + of_columns, num_inputs, num_outputs, 0, place, column,
            num_inputs, num_outputs, num_rows, WIDTH, ROWS, PRECISION,
        )  # fmt: skip
    if COUNT > 2:
        of_weights += product(
            rows_2 + of_rows, columns_2 + of_columns, num_inputs, num_outputs, 0, place, column,
            num_inputs, num_outputs, num_rows, WIDTH, ROWS, PRECISION,
        )  # fmt: skip
    a, b, c = tl.load(mix + 3 * lane), tl.load(mix + 3 * lane + 1), tl.load(mix + 3 * lane + 2)
    inside = (place < num_inputs)[:, None] & (column < num_outputs)[None, :]
    tile = lane * num_inputs * 2 * num_outputs + place[:, None] * 2 * num_outputs + column[None, :]
    weights = tl.load(state + tile, mask=inside, other=0.0)
    momentum = tl.load(state + tile + num_outputs, mask=inside, other=0.0)
    if BACK:
        of_weights += a * weights
        of_momentum += b * weights + c * momentum
        old_weights = tl.load(before + tile, mask=inside, other=0.0)
        old_momentum = tl.load(before + tile + num_outputs, mask=inside, other=0.0)
        tl.store(sums + 3 * part, tl.sum(weights * old_weights))
        tl.store(sums + 3 * part + 1, tl.sum(weights * old_momentum))
        tl.store(sums + 3 * part + 2, tl.sum(momentum * old_momentum))
    else:
        of_weights += a * weights + b * momentum
        of_momentum += c * momentum
    tl.store(out + tile, of_weights, mask=inside)
    tl.store(out + tile + num_outputs, of_momentum, mask=inside)


@triton.jit
def update(
    mix, sums,
    state_a, rows_0a, rows_1a, rows_2a, columns_0a, columns_1a, columns_2a, before_a, out_a, inputs_a, outputs_a,
    state_b, rows_0b, rows_1b, rows_2b, columns_0b, columns_1b, columns_2b, before_b, out_b, inputs_b, outputs_b,
    num_rows, num_lanes,
    COUNTS: tl.constexpr, BACK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the tiles of one layer or two; COUNTS has how many pairs of rows and columns each has, 0: no layer."""
    lane = (tl.program_id(2) % num_lanes).to(tl.int64)  # 64 bits, as states may have over 2^31 elements
    is_second = tl.program_id(2) >= num_lanes
    layer = tl.program_id(2) // num_lanes
    parts = tl.num_programs(0) * tl.num_programs(1)
    part = (lane * (tl.num_programs(2) // num_lanes) + layer) * parts
    part += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if is_second:
        if COUNTS[1] > 0:
            update_tile(
                mix, sums, state_b, rows_0b, rows_1b, rows_2b, columns_0b, columns_1b, columns_2b, before_b, out_b,
                inputs_b, outputs_b, num_rows, lane, part, COUNTS[1], BACK, WIDTH, ROWS, PRECISION,
            )  # fmt: skip
    else:
        update_tile(
            mix, sums, state_a, rows_0a, rows_1a, rows_2a, columns_0a, columns_1a, columns_2a, before_a, out_a,
            inputs_a, outputs_a, num_rows, lane, part, COUNTS[0], BACK, WIDTH, ROWS, PRECISION,
        )  # fmt: skip
