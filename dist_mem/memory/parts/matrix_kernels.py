"""Triton kernels of a memory that is one matrix per head: reading, writing, and turning rows; forward and backward.

A reading is sigma(q) S / (sigma(q) . z), sigma = ELU + 1 (memory/infini.py has the equations). Features, sums and
quotients stay in registers, in float32. Each address has one writer: the bits of a repeated step are equal. As in
nn/distance_kernels.py, no accumulator is transposed: what is needed transposed is loaded so.

Shape letters: B lanes, H heads, T tokens, K head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dist_mem.nn.distance_kernels import columns_of, head_of, rows_of

LEAST: tl.constexpr = tl.constexpr(1e-10)  # divisor of a reading


@triton.jit
def features(rows, real):
    """Return ELU + 1 of rows in float32; 0 where they are not real."""
    rows = rows.to(tl.float32)
    return tl.where(real, tl.where(rows > 0.0, rows + 1.0, tl.exp(rows)), 0.0)


@triton.jit
def feature_rows(rows, row, row_stride, num_real, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows and return their features, (SIZE, PADDED); its derivative is min(feature, 1)."""
    raw = rows_of(rows, row, row_stride, num_real, WIDTH, PADDED)
    return features(raw, (row < num_real)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :])


@triton.jit
def read_matrix(found, matrix, norm, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """Return what features read of the memory, and the sums that divide it."""
    width = tl.arange(0, PADDED)
    whole = rows_of(matrix, width, WIDTH, WIDTH, WIDTH, PADDED)
    sums = tl.sum(found * tl.load(norm + width, mask=width < WIDTH, other=0.0)[None, :], 1)
    return tl.dot(found, whole, input_precision=PRECISION) / tl.maximum(sums, LEAST)[:, None], sums


@triton.jit
def reading_backward(
    of_read, read, sums, matrix, norm, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the gradients of features, of their products with the matrix, and of the sums."""
    width = tl.arange(0, PADDED)
    divisor = tl.maximum(sums, LEAST)
    of_products = of_read / divisor[:, None]
    of_sums = tl.where(sums >= LEAST, -tl.sum(of_read * read, 1) / divisor, 0.0)
    turned = columns_of(matrix, width, WIDTH, WIDTH, WIDTH, PADDED)
    of_features = tl.dot(of_products, turned, input_precision=PRECISION)
    of_features += of_sums[:, None] * tl.load(norm + width, mask=width < WIDTH, other=0.0)[None, :]
    return of_features, of_products, of_sums


@triton.jit
def recall(
    q, matrix, norm, rows, q_head, q_lane, q_row, o_head, o_lane, o_row, num_lanes, num_heads, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a block of queries reads."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    state = lane.to(tl.int64) * num_heads + head
    found = feature_rows(head_of(q, head, lane, q_head, q_lane), row, q_row, num_rows, WIDTH, PADDED)
    read, _ = read_matrix(found, matrix + state * WIDTH * WIDTH, norm + state * WIDTH, WIDTH, PADDED, PRECISION)
    rows = head_of(rows, head, lane, o_head, o_lane) + row[:, None] * o_row + width[None, :]
    tl.store(rows, read.to(rows.dtype.element_ty), mask=(row < num_rows)[:, None] & (width < WIDTH)[None, :])


@triton.jit
def recall_backward(
    q, matrix, norm, given, to_q, to_products, to_sums,
    q_head, q_lane, q_row, g_head, g_lane, g_row, dq_head, dq_lane, dq_row, num_lanes, num_heads, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries, and for `of_state` those of products and sums."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    state = lane.to(tl.int64) * num_heads + head
    matrix, norm = matrix + state * WIDTH * WIDTH, norm + state * WIDTH
    found = feature_rows(head_of(q, head, lane, q_head, q_lane), row, q_row, num_rows, WIDTH, PADDED)
    read, sums = read_matrix(found, matrix, norm, WIDTH, PADDED, PRECISION)
    of_read = rows_of(head_of(given, head, lane, g_head, g_lane), row, g_row, num_rows, WIDTH, PADDED).to(tl.float32)
    of_features, of_products, of_sums = reading_backward(of_read, read, sums, matrix, norm, WIDTH, PADDED, PRECISION)
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    to_q = head_of(to_q, head, lane, dq_head, dq_lane) + row[:, None] * dq_row + width[None, :]
    tl.store(to_q, (of_features * tl.minimum(found, 1.0)).to(to_q.dtype.element_ty), mask=inside)
    if STATE:
        place = tl.program_id(1).to(tl.int64) * num_rows + row
        tl.store(to_products + place[:, None] * WIDTH + width[None, :], of_products, mask=inside)
        tl.store(to_sums + place, of_sums, mask=row < num_rows)


@triton.jit
def write(
    k, v, matrix, norm, num_real, new_matrix, new_norm, k_head, k_lane, k_row, v_head, v_lane, v_row,
    num_lanes, num_heads, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS columns of the memory of a head after a segment; the first program also writes its sums."""
    head, lane = tl.program_id(0) // num_lanes, tl.program_id(0) % num_lanes
    width, column = tl.arange(0, PADDED), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state = lane.to(tl.int64) * num_heads + head
    at = state * WIDTH * WIDTH + width[:, None] * WIDTH + column[None, :]
    inside = (width < WIDTH)[:, None] & (column < WIDTH)[None, :]
    k, v = head_of(k, head, lane, k_head, k_lane), head_of(v, head, lane, v_head, v_lane)
    count = tl.load(num_real + lane)
    before = tl.load(matrix + at, mask=inside, other=0.0)
    by = tl.load(norm + state * WIDTH + width, mask=width < WIDTH, other=0.0)
    added = tl.zeros([PADDED, COLUMNS], tl.float32)
    sums = tl.zeros([PADDED], tl.float32)
    for begin in range(0, num_rows, SIZE):
        row = begin + tl.arange(0, SIZE)
        is_value = (row < count)[:, None] & (column < WIDTH)[None, :]
        new = tl.load(v + row[:, None] * v_row + column[None, :], mask=is_value, other=0.0).to(tl.float32)
        if DELTA:
            found = feature_rows(k, row, k_row, count, WIDTH, PADDED)
            divisor = tl.maximum(tl.sum(found * by[None, :], 1), LEAST)
            new -= tl.dot(found, before, input_precision=PRECISION) / divisor[:, None]
        raw = columns_of(k, row, k_row, count, WIDTH, PADDED)
        turned = features(raw, (width < WIDTH)[:, None] & (row < count)[None, :])
        added += tl.dot(turned, new, input_precision=PRECISION)
        sums += tl.sum(turned, 1)
    tl.store(new_matrix + at, before + added, mask=inside)
    tl.store(new_norm + state * WIDTH + width, by + sums, mask=(width < WIDTH) & (tl.program_id(1) == 0))


@triton.jit
def write_backward(
    k, v, matrix, norm, num_real, of_matrix, of_norm, to_k, to_v, to_products, to_sums,
    k_head, k_lane, k_row, v_head, v_lane, v_row, dk_head, dk_lane, dk_row, num_lanes, num_heads, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, DELTA: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, and for `of_state` those of products and sums."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    state = lane.to(tl.int64) * num_heads + head
    matrix, norm = matrix + state * WIDTH * WIDTH, norm + state * WIDTH
    of_matrix, of_norm = of_matrix + state * WIDTH * WIDTH, of_norm + state * WIDTH
    count = tl.load(num_real + lane)
    found = feature_rows(head_of(k, head, lane, k_head, k_lane), row, k_row, count, WIDTH, PADDED)
    of_new = tl.dot(found, rows_of(of_matrix, width, WIDTH, WIDTH, WIDTH, PADDED), input_precision=PRECISION)
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    place = tl.program_id(1).to(tl.int64) * num_rows + row
    at = row[:, None] * dk_row + width[None, :]
    to_k, to_v = head_of(to_k, head, lane, dk_head, dk_lane), head_of(to_v, head, lane, dk_head, dk_lane)
    tl.store(to_v + at, of_new.to(to_v.dtype.element_ty), mask=inside)
    if DELTA:
        read, sums = read_matrix(found, matrix, norm, WIDTH, PADDED, PRECISION)
    new = rows_of(head_of(v, head, lane, v_head, v_lane), row, v_row, count, WIDTH, PADDED).to(tl.float32)
    if DELTA:
        new -= read
    turned = columns_of(of_matrix, width, WIDTH, WIDTH, WIDTH, PADDED)
    of_features = tl.dot(new, turned, input_precision=PRECISION)
    of_features += tl.load(of_norm + width, mask=width < WIDTH, other=0.0)[None, :]
    if DELTA:
        of_read, of_products, of_sums = reading_backward(-of_new, read, sums, matrix, norm, WIDTH, PADDED, PRECISION)
        of_features += of_read
        if STATE:
            tl.store(to_products + place[:, None] * WIDTH + width[None, :], of_products, mask=inside)
            tl.store(to_sums + place, of_sums, mask=row < num_rows)
    tl.store(to_k + at, (of_features * tl.minimum(found, 1.0)).to(to_k.dtype.element_ty), mask=inside)


@triton.jit
def of_state(
    rows, num_real, to_products, to_sums, to_matrix, to_norm, x_head, x_lane, x_row, num_lanes, num_heads, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of a head's memory that of what these rows read."""
    head, lane = tl.program_id(0) // num_lanes, tl.program_id(0) % num_lanes
    width = tl.arange(0, PADDED)
    state = lane.to(tl.int64) * num_heads + head
    rows, count = head_of(rows, head, lane, x_head, x_lane), tl.load(num_real + lane)
    to_matrix, to_norm = to_matrix + state * WIDTH * WIDTH, to_norm + state * WIDTH
    of_matrix = rows_of(to_matrix, width, WIDTH, WIDTH, WIDTH, PADDED)
    of_norm = tl.load(to_norm + width, mask=width < WIDTH, other=0.0)
    first = tl.program_id(0).to(tl.int64) * num_rows
    for begin in range(0, num_rows, SIZE):
        row = begin + tl.arange(0, SIZE)
        raw = columns_of(rows, row, x_row, count, WIDTH, PADDED)
        turned = features(raw, (width < WIDTH)[:, None] & (row < count)[None, :])
        of_products = rows_of(to_products + first * WIDTH, row, WIDTH, num_rows, WIDTH, PADDED)
        of_matrix += tl.dot(turned, of_products, input_precision=PRECISION)
        of_sums = tl.load(to_sums + first + row, mask=row < num_rows, other=0.0)
        of_norm += tl.sum(turned * of_sums[None, :], 1)
    inside = (width < WIDTH)[:, None] & (width < WIDTH)[None, :]
    tl.store(to_matrix + width[:, None] * WIDTH + width[None, :], of_matrix, mask=inside)
    tl.store(to_norm + width, of_norm, mask=width < WIDTH)


@triton.jit
def turn(
    rows, cosine, sine, made, x_head, x_lane, x_row, y_head, y_lane, y_row, num_lanes, num_rows, scale, sign,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write rows whose pairs (2 j, 2 j + 1) are turned by the angles of their place, or back, times a scale."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, pair = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED // 2)
    inside = (row < num_rows)[:, None] & (pair < WIDTH // 2)[None, :]
    at = row[:, None] * (WIDTH // 2) + pair[None, :]
    cos = tl.load(cosine + at, mask=inside, other=0.0) * scale
    sin = tl.load(sine + at, mask=inside, other=0.0) * (scale * sign)
    rows = head_of(rows, head, lane, x_head, x_lane) + row[:, None] * x_row
    made = head_of(made, head, lane, y_head, y_lane) + row[:, None] * y_row
    even = tl.load(rows + 2 * pair[None, :], mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(rows + 2 * pair[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(made + 2 * pair[None, :], (even * cos - odd * sin).to(made.dtype.element_ty), mask=inside)
    tl.store(made + 2 * pair[None, :] + 1, (even * sin + odd * cos).to(made.dtype.element_ty), mask=inside)
    if WIDTH % 2 == 1:
        last = (row < num_rows)[:, None] & (pair == 0)[None, :]
        rest = tl.load(rows + (WIDTH - 1) + pair[None, :], mask=last, other=0.0).to(tl.float32) * scale
        tl.store(made + (WIDTH - 1) + pair[None, :], rest.to(made.dtype.element_ty), mask=last)
