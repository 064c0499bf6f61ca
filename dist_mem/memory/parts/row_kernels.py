"""Triton kernels of stored rows: the search for the nearest, and what a query reads of them, forward and backward.

The search keeps the scores of a block of queries and CHUNK rows in registers, finds the k-th largest bit by bit, and
writes the rows from that threshold on: no score reaches memory. Of equal scores, the row of the lowest number is taken.
More rows than CHUNK are searched in parts, whose finds are searched again. A read query loads its k rows itself, so
that they never stand side by side in memory. Scores are compared as integers of the same order, which also have a place
for what is no row. Queries are those of the projection: these kernels divide by their length (`unit_attention.unit`).

Shape letters: B lanes, H heads, T queries, M rows, k rows that a query reads, K head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dist_mem.nn.distance_kernels import head_of, rows_of

LOWEST: tl.constexpr = tl.constexpr(-2147483648)  # below every score, also -inf
UNWRITTEN: tl.constexpr = tl.constexpr(-1e30)  # the score of a row that is not written yet


@triton.jit
def order_bits(scores):
    """Return int32 of the same order as float32."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def largest(order, number):
    """Return which `number` of the last axis are largest, the first of equal ones, and their places among them."""
    least = tl.where(tl.sum((order >= 0).to(tl.int32), 1) >= number, 0, LOWEST)
    for step in range(31):
        higher = least + (1 << (30 - step))
        count = tl.sum((order >= higher[:, None]).to(tl.int32), 1)
        least = tl.where(count >= number, higher, least)
    above, equal = order > least[:, None], order == least[:, None]
    # Both are counted at once; there are less than 2^15 of each.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 1)
    num_above, num_equal = counts & 0xFFFF, counts >> 16
    missing = (number - tl.sum(above.to(tl.int32), 1))[:, None]
    taken = above | (equal & (num_equal <= missing))
    return taken, num_above + tl.minimum(num_equal, missing) - 1


@triton.jit
def product(
    q, k, query, row, q_row, k_row, num_queries, num_rows,
    WIDTH: tl.constexpr, STEP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of queries and stored rows, (QUERIES, ROWS) float32, of STEP numbers at a time."""
    scores = tl.zeros([QUERIES, ROWS], tl.float32)
    for begin in range(0, WIDTH, STEP):
        width = begin + tl.arange(0, STEP)
        is_query = (query < num_queries)[:, None] & (width < WIDTH)[None, :]
        asking = tl.load(q + query[:, None] * q_row + width[None, :], mask=is_query, other=0.0)
        is_row = (width < WIDTH)[:, None] & (row < num_rows)[None, :]
        keys = tl.load(k + row[None, :] * k_row + width[:, None], mask=is_row, other=0.0)
        if asking.dtype != keys.dtype:
            asking, keys = asking.to(tl.float32), keys.to(tl.float32)
        scores = tl.dot(asking, keys, scores, input_precision=PRECISION)
    return scores


@triton.jit
def shown_scores(scores, marks, row, num_rows):
    """Return the scores as integers, in which hidden rows come last, and before them rows not written yet.

    Marks are 0 and 1 for them, as in fused_rows.py.
    """
    mark = tl.load(marks + row, mask=row < num_rows, other=0)
    scores = tl.where((mark == 1)[None, :], UNWRITTEN, scores)
    scores = tl.where((mark == 0)[None, :], -float("inf"), scores)
    return tl.where((row < num_rows)[None, :], order_bits(scores), LOWEST)


@triton.jit
def nearest(
    q, k, marks, found, orders, q_head, q_lane, q_row, k_head, k_lane, k_row,
    num_lanes, num_queries, num_rows, number, num_parts,
    WIDTH: tl.constexpr, STEP: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the rows with the largest scores of a part of all, for a block of queries, and their scores as integers."""
    part, head, lane = tl.program_id(2), tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    row = part * CHUNK + tl.arange(0, CHUNK)
    q, k = head_of(q, head, lane, q_head, q_lane), head_of(k, head, lane, k_head, k_lane)
    scores = product(q, k, query, row, q_row, k_row, num_queries, num_rows, WIDTH, STEP, QUERIES, CHUNK, PRECISION)
    order = shown_scores(scores, marks + lane.to(tl.int64) * num_rows, row, num_rows)
    taken, place = largest(order, number)
    at = (tl.program_id(1).to(tl.int64) * num_queries + query[:, None]) * (num_parts * number) + part * number
    taken = taken & (query < num_queries)[:, None]
    tl.store((found + at) + place, row[None, :] + tl.zeros_like(order), mask=taken)
    if num_parts > 1:
        tl.store((orders + at) + place, order, mask=taken)


@triton.jit
def nearest_of_parts(
    candidates, candidate_orders, found, orders, num_all, num_candidates, number, num_parts,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the candidates with the largest scores of a part of all, in their order."""
    part, query = tl.program_id(1), tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    place = part * CHUNK + tl.arange(0, CHUNK)
    inside = (query < num_all)[:, None] & (place < num_candidates)[None, :]
    at = query.to(tl.int64)[:, None] * num_candidates + place[None, :]
    order = tl.load(candidate_orders + at, mask=inside, other=LOWEST)
    row = tl.load(candidates + at, mask=inside, other=0)
    taken, rank = largest(order, number)
    at = query.to(tl.int64)[:, None] * (num_parts * number) + part * number
    taken = taken & (query < num_all)[:, None]
    tl.store((found + at) + rank, row, mask=taken)
    if num_parts > 1:
        tl.store((orders + at) + rank, order, mask=taken)


@triton.jit
def nearest_of_buckets(
    q, k, marks, found, q_head, q_lane, q_row, k_head, k_lane, k_row,
    num_lanes, num_queries, num_rows, number,
    WIDTH: tl.constexpr, STEP: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write, of CHUNK buckets, the row with the largest score of each, for a block of queries."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    bucket = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    q, k = head_of(q, head, lane, q_head, q_lane), head_of(k, head, lane, k_head, k_lane)
    marks += lane.to(tl.int64) * num_rows
    best = tl.full([QUERIES, CHUNK], LOWEST, tl.int32)
    place = tl.zeros([QUERIES, CHUNK], tl.int32)
    for begin in range(0, num_rows, number):
        row = tl.where(bucket < number, begin + bucket, num_rows)
        scores = product(q, k, query, row, q_row, k_row, num_queries, num_rows, WIDTH, STEP, QUERIES, CHUNK, PRECISION)
        order = shown_scores(scores, marks, row, num_rows)
        place = tl.where(order > best, row[None, :], place)
        best = tl.maximum(best, order)
    at = (tl.program_id(1).to(tl.int64) * num_queries + query[:, None]) * number + bucket[None, :]
    tl.store(found + at, place, mask=(query < num_queries)[:, None] & (bucket < number)[None, :])


@triton.jit
def unit_query(q, width, WIDTH: tl.constexpr):
    """Return a query of length 1, and by what it was multiplied."""
    raw = tl.load(q + width, mask=width < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(raw * raw, 0) + 1e-6)
    return raw * inverse, inverse


@triton.jit
def chosen_rows(rows, index, is_row, width, row_stride, WIDTH: tl.constexpr):
    """Load the stored rows of an index, (ROWS, PADDED) float32."""
    inside = is_row[:, None] & (width < WIDTH)[None, :]
    return tl.load(rows + index[:, None].to(tl.int64) * row_stride + width[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def read_rows(
    q, k, v, gain, marks, found, rows, log_sum, q_head, q_lane, q_row, k_head, k_lane, k_row, o_head, o_lane, o_row,
    num_lanes, num_queries, num_rows, number,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write what one query reads of its rows, those with a mark of at least LEAST, and the log of its sum."""
    query, head, lane = tl.program_id(0), tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    width = tl.arange(0, PADDED)
    asking, _ = unit_query(head_of(q, head, lane, q_head, q_lane) + query * q_row, width, WIDTH)
    asking = asking * tl.load(gain + head)
    k, v = head_of(k, head, lane, k_head, k_lane), head_of(v, head, lane, k_head, k_lane)
    marks += lane.to(tl.int64) * num_rows
    all_queries = tl.program_id(1).to(tl.int64) * num_queries + query
    highest = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    attended = tl.zeros([PADDED], tl.float32)
    for begin in range(0, number, ROWS):
        place = begin + tl.arange(0, ROWS)
        index = tl.load(found + all_queries * number + place, mask=place < number, other=0)
        mark = tl.load(marks + index, mask=place < number, other=0)
        is_row = (place < number) & (mark >= LEAST)
        scores = tl.sum(chosen_rows(k, index, is_row, width, k_row, WIDTH) * asking[None, :], 1)
        scores = tl.where(is_row, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        kept, weights = tl.exp(highest - finite), tl.exp(scores - finite)
        values = chosen_rows(v, index, is_row, width, k_row, WIDTH)
        attended = attended * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        highest = higher
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    rows = head_of(rows, head, lane, o_head, o_lane) + query * o_row
    tl.store(rows + width, (attended / total).to(rows.dtype.element_ty), mask=width < WIDTH)
    tl.store(log_sum + all_queries, tl.where(is_empty, float("inf"), highest + tl.log(total)))


@triton.jit
def read_backward(
    q, k, v, gain, marks, found, log_sum, given, to_q, to_gain,
    q_head, q_lane, q_row, k_head, k_lane, k_row, g_head, g_lane, g_row, dq_head, dq_lane, dq_row,
    num_lanes, num_queries, num_rows, number,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one query as projected, and its part of the gradient of its head's scale."""
    query, head, lane = tl.program_id(0), tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    width = tl.arange(0, PADDED)
    asking, inverse = unit_query(head_of(q, head, lane, q_head, q_lane) + query * q_row, width, WIDTH)
    scale = tl.load(gain + head)
    k, v = head_of(k, head, lane, k_head, k_lane), head_of(v, head, lane, k_head, k_lane)
    marks += lane.to(tl.int64) * num_rows
    all_queries = tl.program_id(1).to(tl.int64) * num_queries + query
    sums = tl.load(log_sum + all_queries)
    given = head_of(given, head, lane, g_head, g_lane) + query * g_row
    of_row = tl.load(given + width, mask=width < WIDTH, other=0.0).to(tl.float32)
    mean = tl.zeros([], tl.float32)
    by_value = tl.zeros([PADDED], tl.float32)
    keys_read = tl.zeros([PADDED], tl.float32)
    for begin in range(0, number, ROWS):
        place = begin + tl.arange(0, ROWS)
        index = tl.load(found + all_queries * number + place, mask=place < number, other=0)
        mark = tl.load(marks + index, mask=place < number, other=0)
        is_row = (place < number) & (mark >= LEAST)
        keys = chosen_rows(k, index, is_row, width, k_row, WIDTH)
        scores = tl.sum(keys * (asking * scale)[None, :], 1)
        weights = tl.where(is_row, tl.exp(scores - sums), 0.0)
        values = chosen_rows(v, index, is_row, width, k_row, WIDTH)
        of_weights = weights * tl.sum(values * of_row[None, :], 1)
        mean += tl.sum(of_weights, 0)
        by_value += tl.sum(keys * of_weights[:, None], 0)
        keys_read += tl.sum(keys * weights[:, None], 0)
    of_scaled = by_value - mean * keys_read
    along = tl.sum(of_scaled * asking, 0)
    of_query = (scale * inverse) * (of_scaled - asking * along)
    to_q = head_of(to_q, head, lane, dq_head, dq_lane) + query * dq_row
    tl.store(to_q + width, of_query.to(to_q.dtype.element_ty), mask=width < WIDTH)
    tl.store(to_gain + all_queries, along)


@triton.jit
def unit_rows(
    rows, gain, made, x_head, x_lane, x_row, y_head, y_lane, y_row, num_lanes, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Write rows of length 1, times the scale of their head."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    raw = rows_of(head_of(rows, head, lane, x_head, x_lane), row, x_row, num_rows, WIDTH, PADDED).to(tl.float32)
    factor = tl.rsqrt(tl.sum(raw * raw, 1) + 1e-6)
    if GAIN:
        factor *= tl.load(gain + head)
    made = head_of(made, head, lane, y_head, y_lane) + row[:, None] * y_row + width[None, :]
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    tl.store(made, (raw * factor[:, None]).to(made.dtype.element_ty), mask=inside)


@triton.jit
def unit_rows_backward(
    rows, gain, given, to_rows, to_gain,
    x_head, x_lane, x_row, g_head, g_lane, g_row, dx_head, dx_lane, dx_row, num_lanes, num_rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows, and of each row its part of the gradient of its head's scale."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    raw = rows_of(head_of(rows, head, lane, x_head, x_lane), row, x_row, num_rows, WIDTH, PADDED).to(tl.float32)
    of_made = rows_of(head_of(given, head, lane, g_head, g_lane), row, g_row, num_rows, WIDTH, PADDED).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(raw * raw, 1) + 1e-6)
    unit = raw * inverse[:, None]
    along = tl.sum(of_made * unit, 1)
    factor = inverse
    if GAIN:
        factor *= tl.load(gain + head)
        tl.store(to_gain + tl.program_id(1).to(tl.int64) * num_rows + row, along, mask=row < num_rows)
    of_rows = factor[:, None] * (of_made - unit * along[:, None])
    to_rows = head_of(to_rows, head, lane, dx_head, dx_lane) + row[:, None] * dx_row + width[None, :]
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    tl.store(to_rows, of_rows.to(to_rows.dtype.element_ty), mask=inside)


@triton.jit
def mix(
    one, other, share, mixed, a_head, a_lane, a_row, b_head, b_lane, b_row, y_head, y_lane, y_row,
    num_lanes, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write share times the rows of the first tensor, plus the rest times those of the other."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    first = rows_of(head_of(one, head, lane, a_head, a_lane), row, a_row, num_rows, WIDTH, PADDED).to(tl.float32)
    second = rows_of(head_of(other, head, lane, b_head, b_lane), row, b_row, num_rows, WIDTH, PADDED).to(tl.float32)
    part = tl.load(share + tl.program_id(1))
    mixed = head_of(mixed, head, lane, y_head, y_lane) + row[:, None] * y_row + width[None, :]
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    tl.store(mixed, (part * first + (1.0 - part) * second).to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def mix_backward(
    one, other, share, given, to_one, to_other, to_share,
    a_head, a_lane, a_row, b_head, b_lane, b_row, g_head, g_lane, g_row, y_head, y_lane, y_row,
    num_lanes, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both, and of each row its part of the gradient of its share."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    row, width = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, PADDED)
    first = rows_of(head_of(one, head, lane, a_head, a_lane), row, a_row, num_rows, WIDTH, PADDED).to(tl.float32)
    second = rows_of(head_of(other, head, lane, b_head, b_lane), row, b_row, num_rows, WIDTH, PADDED).to(tl.float32)
    of_mixed = rows_of(head_of(given, head, lane, g_head, g_lane), row, g_row, num_rows, WIDTH, PADDED).to(tl.float32)
    part = tl.load(share + tl.program_id(1))
    inside = (row < num_rows)[:, None] & (width < WIDTH)[None, :]
    place = row[:, None] * y_row + width[None, :]
    to_one, to_other = head_of(to_one, head, lane, y_head, y_lane), head_of(to_other, head, lane, y_head, y_lane)
    tl.store(to_one + place, (part * of_mixed).to(to_one.dtype.element_ty), mask=inside)
    tl.store(to_other + place, ((1.0 - part) * of_mixed).to(to_other.dtype.element_ty), mask=inside)
    along = tl.sum(of_mixed * (first - second), 1)
    tl.store(to_share + tl.program_id(1).to(tl.int64) * num_rows + row, along, mask=row < num_rows)
