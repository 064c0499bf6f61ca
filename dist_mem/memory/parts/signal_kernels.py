"""Triton kernels of a continuous signal read under normal densities: forward and backward.

A query reads the sum over basis functions of E[psi_j] v_j, where E[psi_j] is a normal density at c_j - mu with variance
v + s_j^2 (`basis.ExpectedBasis`). A tile of expectations is made in registers and multiplied at once, and made again in
the backward, so that no expectation stands in memory. Each address has one writer: the bits of a repeated step are
equal. As in distance_kernels.py, no accumulator is transposed.

Shape letters: B lanes, H heads, T queries, N basis functions, W widths, C = N / W centres, K head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dist_mem.nn.distance_kernels import columns_of, head_of, rows_of


@triton.jit
def expectations(distance, total):
    """Return the normal density of a variance, `total`, at a distance, of tensors that broadcast."""
    return tl.exp(-0.5 * (distance * distance / total + (tl.log(total) + 1.8378770664093453)))  # log of 2 pi


@triton.jit
def read_signal(
    mean, variance, v, centres, squares, rows, v_head, v_lane, v_row, o_head, o_lane, o_row,
    num_lanes, num_queries, num_centres, num_widths,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a block of queries reads."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_query = query < num_queries
    place = tl.program_id(1).to(tl.int64) * num_queries + query
    mu = tl.load(mean + place, mask=is_query, other=0.0)[:, None]
    own = tl.load(variance + place, mask=is_query, other=1.0)[:, None]
    v = head_of(v, head, lane, v_head, v_lane)
    found = tl.zeros([SIZE, PADDED], tl.float32)
    for index in range(0, num_widths):
        total = own + tl.load(squares + index)
        for begin in range(0, num_centres, SIZE):
            centre = begin + tl.arange(0, SIZE)
            at = tl.load(centres + centre, mask=centre < num_centres, other=0.0)
            expected = expectations(at[None, :] - mu, total)
            row = tl.where(centre < num_centres, index * num_centres + centre, -1)
            values = rows_of(v, row, v_row, num_widths * num_centres, WIDTH, PADDED)
            found += tl.dot(expected.to(values.dtype), values, input_precision=PRECISION)
    width = tl.arange(0, PADDED)
    rows = head_of(rows, head, lane, o_head, o_lane) + query[:, None] * o_row + width[None, :]
    tl.store(rows, found.to(rows.dtype.element_ty), mask=is_query[:, None] & (width < WIDTH)[None, :])


@triton.jit
def backward_densities(
    mean, variance, v, centres, squares, given, to_mean, to_variance,
    v_head, v_lane, v_row, g_head, g_lane, g_row, num_lanes, num_queries, num_centres, num_widths,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of mean and variance of a block of queries."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_query = query < num_queries
    place = tl.program_id(1).to(tl.int64) * num_queries + query
    mu = tl.load(mean + place, mask=is_query, other=0.0)
    own = tl.load(variance + place, mask=is_query, other=1.0)
    v = head_of(v, head, lane, v_head, v_lane)
    of_rows = rows_of(head_of(given, head, lane, g_head, g_lane), query, g_row, num_queries, WIDTH, PADDED)
    of_mean = tl.zeros([SIZE], tl.float32)
    of_variance = tl.zeros([SIZE], tl.float32)
    for index in range(0, num_widths):
        total = own + tl.load(squares + index)
        mass = tl.zeros([SIZE], tl.float32)
        first = tl.zeros([SIZE], tl.float32)
        second = tl.zeros([SIZE], tl.float32)
        for begin in range(0, num_centres, SIZE):
            centre = begin + tl.arange(0, SIZE)
            at = tl.load(centres + centre, mask=centre < num_centres, other=0.0)
            distance = at[None, :] - mu[:, None]
            row = tl.where(centre < num_centres, index * num_centres + centre, -1)
            values = columns_of(v, row, v_row, num_widths * num_centres, WIDTH, PADDED)
            product = tl.dot(of_rows, values.to(of_rows.dtype), input_precision=PRECISION)
            product *= expectations(distance, total[:, None])
            mass += tl.sum(product, 1)
            product *= distance
            first += tl.sum(product, 1)
            second += tl.sum(product * distance, 1)
        of_mean += first / total
        of_variance += (second / total - mass) / (2.0 * total)
    tl.store(to_mean + place, of_mean, mask=is_query)
    tl.store(to_variance + place, of_variance, mask=is_query)


@triton.jit
def backward_values(
    mean, variance, centres, squares, given, to_v, g_head, g_lane, g_row, dv_head, dv_lane, dv_row,
    num_lanes, num_queries, num_centres, num_widths,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of values, those of one width of the basis functions."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    centre = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_centre = centre < num_centres
    at = tl.load(centres + centre, mask=is_centre, other=0.0)
    square = tl.load(squares + tl.program_id(2))
    given = head_of(given, head, lane, g_head, g_lane)
    of_values = tl.zeros([SIZE, PADDED], tl.float32)
    for begin in range(0, num_queries, SIZE):
        query = begin + tl.arange(0, SIZE)
        place = tl.program_id(1).to(tl.int64) * num_queries + query
        mu = tl.load(mean + place, mask=query < num_queries, other=0.0)
        total = tl.load(variance + place, mask=query < num_queries, other=1.0) + square
        expected = expectations(at[:, None] - mu[None, :], total[None, :])
        of_rows = rows_of(given, query, g_row, num_queries, WIDTH, PADDED)
        of_values += tl.dot(expected.to(of_rows.dtype), of_rows, input_precision=PRECISION)
    width, row = tl.arange(0, PADDED), tl.program_id(2) * num_centres + centre
    to_v = head_of(to_v, head, lane, dv_head, dv_lane) + row[:, None] * dv_row + width[None, :]
    inside = is_centre[:, None] & (width < WIDTH)[None, :]
    tl.store(to_v, of_values.to(to_v.dtype.element_ty), mask=inside)


@triton.jit
def summed_product(
    left, right, row, column, row_stride, inner_stride, num_rows, num_inner, num_columns, found,
    SIZE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `found` a product of a matrix, of any order, and rows (inner, columns), in float32."""
    for begin in range(0, num_inner, STEP):
        inner = begin + tl.arange(0, STEP)
        is_left = (row < num_rows)[:, None] & (inner < num_inner)[None, :]
        one = tl.load(left + row[:, None] * row_stride + inner[None, :] * inner_stride, mask=is_left, other=0.0)
        is_right = (inner < num_inner)[:, None] & (column < num_columns)[None, :]
        other = tl.load(right + inner[:, None] * num_columns + column[None, :], mask=is_right, other=0.0)
        found = tl.dot(one, other.to(tl.float32), found, input_precision=PRECISION)
    return found


@triton.jit
def append_rows(
    first, new, linear, rows, old, mode, signal, num_basis, num_rows, num_columns,
    SIZE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of a lane's coefficients after its new rows, by the lane's mode, see fused_signal.py."""
    lane, basis = tl.program_id(2).to(tl.int64), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column, how = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.load(mode + lane)
    inside = (basis < num_basis)[:, None] & (column < num_columns)[None, :]
    at = basis[:, None] * num_columns + column[None, :]
    old, signal = old + lane * num_basis * num_columns, signal + lane * num_basis * num_columns
    rows += lane * num_rows * num_columns
    if how == 0:
        tl.store(signal + at, tl.load(old + at, mask=inside, other=0.0), mask=inside)
    else:
        found = tl.zeros([SIZE, SIZE], tl.float32)
        if how == 1:
            found = summed_product(
                first, rows, basis, column, num_rows, 1, num_basis, num_rows, num_columns, found, SIZE, STEP, PRECISION
            )
        else:
            found = summed_product(
                new, rows, basis, column, num_rows, 1, num_basis, num_rows, num_columns, found, SIZE, STEP, PRECISION
            )
            found = summed_product(
                linear, old, basis, column, num_basis, 1, num_basis, num_basis, num_columns, found,
                SIZE, STEP, PRECISION,
            )  # fmt: skip
        tl.store(signal + at, found, mask=inside)


@triton.jit
def append_backward(
    first, new, given, mode, to_rows, num_basis, num_rows, num_columns,
    SIZE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile of a lane's new rows."""
    lane, row = tl.program_id(2).to(tl.int64), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column, how = tl.program_id(1) * SIZE + tl.arange(0, SIZE), tl.load(mode + lane)
    given, to_rows = given + lane * num_basis * num_columns, to_rows + lane * num_rows * num_columns
    found = tl.zeros([SIZE, SIZE], tl.float32)
    if how == 1:
        found = summed_product(
            first, given, row, column, 1, num_rows, num_rows, num_basis, num_columns, found, SIZE, STEP, PRECISION
        )
    if how == 2:
        found = summed_product(
            new, given, row, column, 1, num_rows, num_rows, num_basis, num_columns, found, SIZE, STEP, PRECISION
        )
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    to_rows += row[:, None] * num_columns + column[None, :]
    tl.store(to_rows, found.to(to_rows.dtype.element_ty), mask=inside)


@triton.jit
def sampled_scores(asking, keys, sample, scale, num_samples, PRECISION: tl.constexpr):
    """Return scores (SIZE, SIZE) of queries and samples, of which those beyond the last are -inf."""
    scores = tl.dot(asking, keys, input_precision=PRECISION) * scale
    return tl.where((sample < num_samples)[None, :], scores, -float("inf"))


@triton.jit
def moments(
    q, k, mean, variance, log_sum, q_head, q_lane, q_row, k_head, k_lane, k_row,
    num_lanes, num_queries, num_samples, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write mean and variance of the place that a block of queries reads by a softmax, and the log of its sum."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    asking = rows_of(head_of(q, head, lane, q_head, q_lane), query, q_row, num_queries, WIDTH, PADDED)
    k = head_of(k, head, lane, k_head, k_lane)
    largest = tl.full([SIZE], -float("inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    first = tl.zeros([SIZE], tl.float32)
    for tile in range(0, num_samples, SIZE):
        sample = tile + tl.arange(0, SIZE)
        keys = columns_of(k, sample, k_row, num_samples, WIDTH, PADDED)
        scores = sampled_scores(asking, keys, sample, scale, num_samples, PRECISION)
        larger = tl.maximum(largest, tl.max(scores, 1))
        kept, weights = tl.exp(largest - larger), tl.exp(scores - larger[:, None])
        place = (sample.to(tl.float32) + 0.5) / num_samples
        total = total * kept + tl.sum(weights, 1)
        first = first * kept + tl.sum(weights * place[None, :], 1)
        largest = larger
    mu, sums = first / total, largest + tl.log(total)
    second = tl.zeros([SIZE], tl.float32)  # about the mean: E[t^2] - mu^2 would cancel
    for tile in range(0, num_samples, SIZE):
        sample = tile + tl.arange(0, SIZE)
        keys = columns_of(k, sample, k_row, num_samples, WIDTH, PADDED)
        scores = sampled_scores(asking, keys, sample, scale, num_samples, PRECISION)
        distance = ((sample.to(tl.float32) + 0.5) / num_samples)[None, :] - mu[:, None]
        second += tl.sum(tl.exp(scores - sums[:, None]) * distance * distance, 1)
    at = tl.program_id(1).to(tl.int64) * num_queries + query
    tl.store(mean + at, mu, mask=query < num_queries)
    tl.store(variance + at, second, mask=query < num_queries)
    tl.store(log_sum + at, sums, mask=query < num_queries)


@triton.jit
def of_score(weights, distance, variance, of_mean, of_variance):
    """Return the gradients of scores."""
    return weights * (of_mean * distance + of_variance * (distance * distance - variance))


@triton.jit
def backward_asking(
    q, k, mean, variance, log_sum, of_mean, of_variance, to_q,
    q_head, q_lane, q_row, k_head, k_lane, k_row, dq_head, dq_lane, dq_row,
    num_lanes, num_queries, num_samples, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    query = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_query, at = query < num_queries, tl.program_id(1).to(tl.int64) * num_queries + query
    asking = rows_of(head_of(q, head, lane, q_head, q_lane), query, q_row, num_queries, WIDTH, PADDED)
    k = head_of(k, head, lane, k_head, k_lane)
    mu, own = tl.load(mean + at, mask=is_query, other=0.0), tl.load(variance + at, mask=is_query, other=0.0)
    sums = tl.load(log_sum + at, mask=is_query, other=float("inf"))
    by_mean = tl.load(of_mean + at, mask=is_query, other=0.0)
    by_variance = tl.load(of_variance + at, mask=is_query, other=0.0)
    found = tl.zeros([SIZE, PADDED], tl.float32)
    for tile in range(0, num_samples, SIZE):
        sample = tile + tl.arange(0, SIZE)
        keys = columns_of(k, sample, k_row, num_samples, WIDTH, PADDED)
        weights = tl.exp(sampled_scores(asking, keys, sample, scale, num_samples, PRECISION) - sums[:, None])
        distance = ((sample.to(tl.float32) + 0.5) / num_samples)[None, :] - mu[:, None]
        gradient = of_score(weights, distance, own[:, None], by_mean[:, None], by_variance[:, None])
        keys = rows_of(k, sample, k_row, num_samples, WIDTH, PADDED)
        found += tl.dot(gradient.to(keys.dtype), keys, input_precision=PRECISION)
    width = tl.arange(0, PADDED)
    to_q = head_of(to_q, head, lane, dq_head, dq_lane) + query[:, None] * dq_row + width[None, :]
    tl.store(to_q, (found * scale).to(to_q.dtype.element_ty), mask=is_query[:, None] & (width < WIDTH)[None, :])


@triton.jit
def backward_samples(
    q, k, mean, variance, log_sum, of_mean, of_variance, to_k,
    q_head, q_lane, q_row, k_head, k_lane, k_row, dk_head, dk_lane, dk_row,
    num_lanes, num_queries, num_samples, scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of samples' keys; tiles are (samples, queries)."""
    head, lane = tl.program_id(1) // num_lanes, tl.program_id(1) % num_lanes
    sample = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    q = head_of(q, head, lane, q_head, q_lane)
    keys = rows_of(head_of(k, head, lane, k_head, k_lane), sample, k_row, num_samples, WIDTH, PADDED)
    place = ((sample.to(tl.float32) + 0.5) / num_samples)[:, None]
    found = tl.zeros([SIZE, PADDED], tl.float32)
    for begin in range(0, num_queries, SIZE):
        query = begin + tl.arange(0, SIZE)
        is_query, at = query < num_queries, tl.program_id(1).to(tl.int64) * num_queries + query
        mu, own = tl.load(mean + at, mask=is_query, other=0.0), tl.load(variance + at, mask=is_query, other=0.0)
        sums = tl.load(log_sum + at, mask=is_query, other=float("inf"))
        by_mean = tl.load(of_mean + at, mask=is_query, other=0.0)
        by_variance = tl.load(of_variance + at, mask=is_query, other=0.0)
        asking = columns_of(q, query, q_row, num_queries, WIDTH, PADDED)
        weights = tl.exp(tl.dot(keys, asking, input_precision=PRECISION) * scale - sums[None, :])
        gradient = of_score(weights, place - mu[None, :], own[None, :], by_mean[None, :], by_variance[None, :])
        rows = rows_of(q, query, q_row, num_queries, WIDTH, PADDED)
        found += tl.dot(gradient.to(rows.dtype), rows, input_precision=PRECISION)
    width = tl.arange(0, PADDED)
    to_k = head_of(to_k, head, lane, dk_head, dk_lane) + sample[:, None] * dk_row + width[None, :]
    inside = (sample < num_samples)[:, None] & (width < WIDTH)[None, :]
    tl.store(to_k, (found * scale).to(to_k.dtype.element_ty), mask=inside)
