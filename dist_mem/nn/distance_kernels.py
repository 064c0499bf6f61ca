"""Triton kernels of attention with scores by distance: forward and backward, without a table and without atomics.

score(i, j) = q_i . k_j + p_i . r_(first - i + j), over the visible keys; the inputs are those of distance_attention.py.
A tile of SIZE queries and SIZE keys meets 2 SIZE - 1 distances: two blocks of columns of r, of which the second is the
first of the next tile, so that each tile needs one product with r. Its entry for a pair stands at column SIZE - 1 - a +
b of the two blocks, a cyclic shift by the row.

The gradient of each score by distance is stored once, by the only program that computes it; what sums over pairs reads
that store. So no address is written twice, and the bits of a repeated step are equal. Scores are in units of log 2, for
exp2. No kernel transposes an accumulator: Triton 3.4 to 3.7.0 compile that wrongly for Hopper (flash-linear-attention
issue 640). Source: Dai et al. 2019, appendix B (the shift); Dao et al. 2022, "FlashAttention", algorithms 1 and 4.

Shape letters: B lanes, T queries, J keys, H heads, K head width, C columns of r; R their width, K or 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def rows_of(pointer, row, row_stride, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows (SIZE, PADDED) of a matrix; what lies outside is 0."""
    column = tl.arange(0, PADDED)
    inside = ((row >= 0) & (row < num_rows))[:, None] & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def columns_of(pointer, row, row_stride, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load the same transposed, (PADDED, SIZE)."""
    column = tl.arange(0, PADDED)
    inside = (column < WIDTH)[:, None] & ((row >= 0) & (row < num_rows))[None, :]
    return tl.load(pointer + row[None, :] * row_stride + column[:, None], mask=inside, other=0.0)


@triton.jit
def table_rows(table, column, column_stride, width_stride, num_columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load columns of r as rows (SIZE, PADDED)."""
    place = tl.arange(0, PADDED)
    inside = ((column >= 0) & (column < num_columns))[:, None] & (place < WIDTH)[None, :]
    pointers = table + column[:, None] * column_stride + place[None, :] * width_stride
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def table_columns(table, column, column_stride, width_stride, num_columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load columns of r as they are, (PADDED, SIZE)."""
    place = tl.arange(0, PADDED)
    inside = (place < WIDTH)[:, None] & ((column >= 0) & (column < num_columns))[None, :]
    pointers = table + column[None, :] * column_stride + place[:, None] * width_stride
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def visible_pairs(query, key, is_valid, above, upto, num_keys):
    """Return which pairs are visible, of indices and marks that broadcast against each other."""
    return (key > query + above) & (key <= query + upto) & (key < num_keys) & is_valid


@triton.jit
def head_of(pointer, head, lane, head_stride, lane_stride):
    """Return where the rows of one head and lane begin; 64 bits, as tensors may have over 2^31 elements."""
    return pointer + head.to(tl.int64) * head_stride + lane.to(tl.int64) * lane_stride


@triton.jit
def forward(
    q, k, v, p, r, valid, sees, first_key, rows, log_sum,
    q_head, q_lane, q_row, k_head, k_lane, k_row, v_head, v_lane, v_row, p_head, p_lane, p_row,
    r_head, r_width, r_column, o_head, o_lane, o_row,
    num_lanes, num_queries, num_keys, num_columns, first, above, upto,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, SEES: tl.constexpr, SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the attended rows and the log of the sum of exponentials of a block of queries."""
    begin = tl.program_id(0) * SIZE
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = begin + tl.arange(0, SIZE)
    a, b = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    shift = (SIZE - 1 - a + b) % SIZE
    asking = rows_of(head_of(q, head, lane, q_head, q_lane), query, q_row, num_queries, WIDTH, PADDED)
    k, v = head_of(k, head, lane, k_head, k_lane), head_of(v, head, lane, v_head, v_lane)
    p, r = head_of(p, head, lane, p_head, p_lane), r + head.to(tl.int64) * r_head
    seen = query < num_queries
    if SEES:
        seen = seen & (tl.load(sees + lane * num_queries + query, mask=seen, other=0) != 0)
    start = tl.maximum(tl.load(first_key + lane), begin + above + 1)
    start = tl.maximum(start, 0) // SIZE * SIZE
    end = tl.minimum(begin + SIZE + upto, num_keys)
    if SCALAR:
        by_distance = tl.load(p + query * p_row, mask=query < num_queries, other=0.0)[:, None].to(tl.float32)
        low = tl.zeros([SIZE, SIZE], tl.float32)
    else:
        by_distance = rows_of(p, query, p_row, num_queries, WIDTH, PADDED)
        column = first - begin + start - (SIZE - 1) + tl.arange(0, SIZE)
        block = table_columns(r, column, r_column, r_width, num_columns, WIDTH, PADDED)
        low = tl.gather(tl.dot(by_distance, block, input_precision=PRECISION), shift, 1)
    largest = tl.full([SIZE], -float("inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    found = tl.zeros([SIZE, PADDED], tl.float32)
    for tile in range(start, end, SIZE):
        key = tile + tl.arange(0, SIZE)
        if SCALAR:
            column = first - query[:, None] + key[None, :]
            inside = (column >= 0) & (column < num_columns)
            relative = by_distance * tl.load(r + column * r_column, mask=inside, other=0.0).to(tl.float32)
        else:
            column = first - begin + tile + 1 + tl.arange(0, SIZE)
            block = table_columns(r, column, r_column, r_width, num_columns, WIDTH, PADDED)
            high = tl.gather(tl.dot(by_distance, block, input_precision=PRECISION), shift, 1)
            relative = tl.where(b <= a, low, high)
            low = high
        scores = tl.dot(asking, columns_of(k, key, k_row, num_keys, WIDTH, PADDED), input_precision=PRECISION)
        scores = (scores + relative) * LOG2_E
        is_valid = tl.load(valid + lane * num_keys + key, mask=key < num_keys, other=0) != 0
        shown = visible_pairs(query[:, None], key[None, :], is_valid[None, :], above, upto, num_keys) & seen[:, None]
        scores = tl.where(shown, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(largest - finite)
        values = rows_of(v, key, v_row, num_keys, WIDTH, PADDED)
        found = found * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        total = total * kept + tl.sum(weights, 1)
        largest = larger
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    found = found / total[:, None]
    width = tl.arange(0, PADDED)
    rows = head_of(rows, head, lane, o_head, o_lane)
    is_row = (query < num_queries)[:, None] & (width < WIDTH)[None, :]
    tl.store(rows + query[:, None] * o_row + width[None, :], found.to(rows.dtype.element_ty), mask=is_row)
    sums = tl.where(is_empty, -float("inf"), (largest + tl.log2(total)) / LOG2_E)
    tl.store(log_sum + tl.program_id(1).to(tl.int64) * num_queries + query, sums, mask=query < num_queries)


@triton.jit
def backward_keys(
    q, k, v, p, r, valid, first_key, given, log_sum, delta, to_k, to_v, to_pairs,
    q_head, q_lane, q_row, k_head, k_lane, k_row, v_head, v_lane, v_row, p_head, p_lane, p_row,
    r_head, r_width, r_column, g_head, g_lane, g_row, dk_head, dk_lane, dk_row,
    num_lanes, num_queries, num_keys, num_columns, store_columns, first, above, upto,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, and store that of each of their scores by distance once.

    Tiles are (keys, queries), so that no accumulator is transposed. `log_sum` is infinite where a query sees no key.
    """
    tile = tl.program_id(0) * SIZE
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    key = tile + tl.arange(0, SIZE)
    b, a = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    shift = (SIZE - 1 - a + b) % SIZE
    keys = rows_of(head_of(k, head, lane, k_head, k_lane), key, k_row, num_keys, WIDTH, PADDED)
    values = rows_of(head_of(v, head, lane, v_head, v_lane), key, v_row, num_keys, WIDTH, PADDED)
    q, given = head_of(q, head, lane, q_head, q_lane), head_of(given, head, lane, g_head, g_lane)
    p, r = head_of(p, head, lane, p_head, p_lane), r + head.to(tl.int64) * r_head
    is_valid = tl.load(valid + lane * num_keys + key, mask=key < num_keys, other=0) != 0
    of_k = tl.zeros([SIZE, PADDED], tl.float32)
    of_v = tl.zeros([SIZE, PADDED], tl.float32)
    start = tl.maximum(tile - upto, 0) // SIZE * SIZE
    end = tl.minimum(tile + SIZE - 1 - above, num_queries)
    if tile + SIZE <= tl.load(first_key + lane):
        end = start
    for begin in range(start, end, SIZE):
        query = begin + tl.arange(0, SIZE)
        asking = columns_of(q, query, q_row, num_queries, WIDTH, PADDED)
        column = first - query[None, :] + key[:, None]
        if SCALAR:
            by_distance = tl.load(p + query * p_row, mask=query < num_queries, other=0.0)[None, :].to(tl.float32)
            inside = (column >= 0) & (column < num_columns)
            relative = by_distance * tl.load(r + column * r_column, mask=inside, other=0.0).to(tl.float32)
        else:
            by_distance = columns_of(p, query, p_row, num_queries, WIDTH, PADDED)
            place = first - begin + tile - (SIZE - 1) + tl.arange(0, SIZE)
            low = table_rows(r, place, r_column, r_width, num_columns, WIDTH, PADDED)
            high = table_rows(r, place + SIZE, r_column, r_width, num_columns, WIDTH, PADDED)
            low = tl.gather(tl.dot(low, by_distance, input_precision=PRECISION), shift, 0)
            high = tl.gather(tl.dot(high, by_distance, input_precision=PRECISION), shift, 0)
            relative = tl.where(b <= a, low, high)
        shown = visible_pairs(query[None, :], key[:, None], is_valid[:, None], above, upto, num_keys)
        shown = shown & (query < num_queries)[None, :]
        place = tl.program_id(1).to(tl.int64) * num_queries + query
        sums = tl.load(log_sum + place, mask=query < num_queries, other=0.0)
        scores = tl.dot(keys, asking, input_precision=PRECISION) + relative
        weights = tl.where(shown, tl.exp2((scores - sums[None, :]) * LOG2_E), 0.0)
        of_rows = rows_of(given, query, g_row, num_queries, WIDTH, PADDED)
        of_v += tl.dot(weights.to(of_rows.dtype), of_rows, input_precision=PRECISION)
        by_value = tl.dot(
            values, columns_of(given, query, g_row, num_queries, WIDTH, PADDED), input_precision=PRECISION
        )
        mean = tl.load(delta + place, mask=query < num_queries, other=0.0)
        of_scores = (weights * (by_value - mean[None, :])).to(keys.dtype)
        of_k += tl.dot(of_scores, rows_of(q, query, q_row, num_queries, WIDTH, PADDED), input_precision=PRECISION)
        tl.store(to_pairs + place[None, :] * store_columns + column, of_scores, mask=shown)
    width = tl.arange(0, PADDED)
    is_row = (key < num_keys)[:, None] & (width < WIDTH)[None, :]
    at = key[:, None] * dk_row + width[None, :]
    to_k, to_v = head_of(to_k, head, lane, dk_head, dk_lane), head_of(to_v, head, lane, dk_head, dk_lane)
    tl.store(to_k + at, of_k.to(to_k.dtype.element_ty), mask=is_row)
    tl.store(to_v + at, of_v.to(to_v.dtype.element_ty), mask=is_row)


@triton.jit
def backward_queries(
    k, r, first_key, to_pairs, to_q, to_p,
    k_head, k_lane, k_row, r_head, r_width, r_column, dq_head, dq_lane, dq_row, dp_head, dp_lane, dp_row,
    num_lanes, num_queries, num_keys, num_columns, store_columns, first, above, upto,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries: the stored gradients of scores times keys, and times r."""
    begin = tl.program_id(0) * SIZE
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = begin + tl.arange(0, SIZE)
    k, r = head_of(k, head, lane, k_head, k_lane), r + head.to(tl.int64) * r_head
    pairs = to_pairs + (tl.program_id(1).to(tl.int64) * num_queries + query[:, None]) * store_columns
    start = tl.maximum(tl.load(first_key + lane), begin + above + 1)
    start = tl.maximum(start, 0) // SIZE * SIZE
    end = tl.minimum(begin + SIZE + upto, num_keys)
    is_query = (query < num_queries)[:, None]
    of_q = tl.zeros([SIZE, PADDED], tl.float32)
    for tile in range(start, end, SIZE):
        key = tile + tl.arange(0, SIZE)
        column = first - query[:, None] + key[None, :]
        inside = is_query & (key < num_keys)[None, :] & (column >= 0) & (column < num_columns)
        gradient = tl.load(pairs + column, mask=inside, other=0.0)
        of_q += tl.dot(gradient, rows_of(k, key, k_row, num_keys, WIDTH, PADDED), input_precision=PRECISION)
    width = tl.arange(0, PADDED)
    is_row = is_query & (width < WIDTH)[None, :]
    to_q = head_of(to_q, head, lane, dq_head, dq_lane)
    tl.store(to_q + query[:, None] * dq_row + width[None, :], of_q.to(to_q.dtype.element_ty), mask=is_row)
    to_p = head_of(to_p, head, lane, dp_head, dp_lane)
    # Columns before these, and after them, have only pairs that are not visible, whose store is 0.
    start = tl.maximum(first - begin - (SIZE - 1) + start, 0) // SIZE * SIZE
    end = tl.minimum(first - begin + end, num_columns)
    if SCALAR:
        of_p = tl.zeros([SIZE], tl.float32)
        for tile in range(start, end, SIZE):
            column = tile + tl.arange(0, SIZE)
            inside = column < num_columns
            gradient = tl.load(pairs + column[None, :], mask=is_query & inside[None, :], other=0.0).to(tl.float32)
            entry = tl.load(r + column * r_column, mask=inside, other=0.0).to(tl.float32)
            of_p += tl.sum(gradient * entry[None, :], 1)
        tl.store(to_p + query * dp_row, of_p.to(to_p.dtype.element_ty), mask=query < num_queries)
    else:
        of_rows = tl.zeros([SIZE, PADDED], tl.float32)
        for tile in range(start, end, SIZE):
            column = tile + tl.arange(0, SIZE)
            inside = is_query & (column < num_columns)[None, :]
            gradient = tl.load(pairs + column[None, :], mask=inside, other=0.0)
            block = table_rows(r, column, r_column, r_width, num_columns, WIDTH, PADDED)
            of_rows += tl.dot(gradient, block, input_precision=PRECISION)
        tl.store(to_p + query[:, None] * dp_row + width[None, :], of_rows.to(to_p.dtype.element_ty), mask=is_row)


@triton.jit
def row_products(
    rows, given, of_log_sum, delta, o_head, o_lane, o_row, g_head, g_lane, g_row, num_lanes, num_queries,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the product of each attended row with its gradient, less the gradient of its log of the sum."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    one = rows_of(head_of(rows, head, lane, o_head, o_lane), query, o_row, num_queries, WIDTH, PADDED)
    other = rows_of(head_of(given, head, lane, g_head, g_lane), query, g_row, num_queries, WIDTH, PADDED)
    found = tl.sum(one.to(tl.float32) * other.to(tl.float32), 1)
    place = tl.program_id(1).to(tl.int64) * num_queries + query
    if SUMS:
        found -= tl.load(of_log_sum + place, mask=query < num_queries, other=0.0)
    tl.store(delta + place, found, mask=query < num_queries)
