"""The gradient of a dense bias, without a matrix of scores in memory.

A bias that is broadcast has entries that many scores share: the same tile of every batch element,
of every head, or of a whole row or column of tiles. A program takes a tile of the bias, walks the
tiles of scores that share it (its orbit), adds their gradients in registers and writes once.
"""

import triton
import triton.language as tl

from limelight.kernels import dropout, ranges
from limelight.kernels.backward import rows_of
from limelight.kernels.products import Units, dot, load, operand, transposed
from limelight.kernels.row_numbers import load_row_numbers
from limelight.kernels.scores import (
    d_scores_of,
    hide_past_end,
    matrix_of,
    place,
    scores_of,
    weights_of,
)
from limelight.kernels.tiles import head_of


@triton.jit
def dense_gradient(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers,
    gradient,
    strides, gradient_strides, sizes, numbers, options, own, orbit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """gradient: of the bias's shape. Grid: the bias's own batches * heads * row tiles * key tiles.

    own and orbit count, of each dimension, the bias's entries (or tiles of them) and the scores'
    that share one; orbit also says whether rows and keys are shared.
    """
    program = tl.program_id(0)
    own_key = program % own.key_tiles
    own_row = program // own.key_tiles % own.row_tiles
    own_head = program // own.key_tiles // own.row_tiles % own.heads
    own_batch = program // own.key_tiles // own.row_tiles // own.heads
    steps = orbit.batches * orbit.heads * orbit.row_tiles * orbit.key_tiles
    if not (orbit.shares_rows or orbit.shares_keys):
        visible = _is_visible(
            own_row * TILE_M, own_key * TILE_N, own_batch, own_head, orbit.batches, query_starts,
            masks, sizes, numbers, TILE_M, TILE_N,
        )  # fmt: skip
        steps = tl.where(visible, steps, 0)
    seed = dropout.seed_of(seeds, numbers)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in tl.range(0, steps):
        first_key = (own_key + step % orbit.key_tiles) * TILE_N
        first_row = (own_row + step // orbit.key_tiles % orbit.row_tiles) * TILE_M
        step = step // orbit.key_tiles // orbit.row_tiles
        matrix = matrix_of(
            own_batch + step // orbit.heads,
            own_head + step % orbit.heads,
            query_starts,
            sizes,
            numbers,
        )
        acc += _d_scores(
            query, key, value, d_out, row_numbers, masks, biases, first_row, first_key, matrix,
            seed, strides, sizes, numbers, options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
        )  # fmt: skip
    row = own_row * TILE_M + tl.arange(0, TILE_M)[:, None]
    key_place = own_key * TILE_N + tl.arange(0, TILE_N)[None, :]
    if orbit.shares_rows:
        acc = tl.sum(acc, 0, keep_dims=True)
        row = tl.zeros([1, 1], tl.int32)
    if orbit.shares_keys:
        acc = tl.sum(acc, 1, keep_dims=True)
        key_place = tl.zeros([1, 1], tl.int32)
    first = head_of(gradient, gradient_strides, own_batch, own_head)
    places = first + row.to(tl.int64) * gradient_strides.row
    places = places + key_place.to(tl.int64) * gradient_strides.key
    inside = (row < sizes.q_len) & (key_place < sizes.kv_len)
    tl.store(places, acc.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _is_visible(
    first_row, first_key, first_batch, head, batches, query_starts, masks, sizes, numbers,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Whether any of these batch elements may see some of the tile. No range asks the head."""
    stop_row = min(first_row + TILE_M, sizes.q_len)
    visible = first_row < 0
    for batch in range(first_batch, first_batch + batches):
        matrix = matrix_of(batch, head, query_starts, sizes, numbers)
        walk = ranges.keys_of(
            matrix.query_start + first_row,
            matrix.query_start + stop_row,
            masks,
            matrix,
            TILE_N,
            True,
        )
        visible = visible | ((first_key < walk.high) & (first_key + TILE_N > walk.low))
    return visible


@triton.jit
def _d_scores(
    query, key, value, d_out, row_numbers, masks, biases, first_row, first_key, matrix,
    seed, strides, sizes, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of scores, [M, N]; zero outside the matrix."""
    unit = Units(0.0, 0.0, 0.0, 0.0)
    rows = rows_of(query, d_out, row_numbers, unit, strides, matrix, sizes)
    row = first_row + tl.arange(0, TILE_M)
    kv_head = matrix.head // sizes.group
    q_tile = load(rows.query, first_row, 0, sizes.q_len, HEAD_DIM, TILE_M, True, options)  # [M, D]
    k_tile = load(
        operand(key, strides.key, matrix.batch, kv_head, 0.0), first_key, 0, sizes.kv_len,
        HEAD_DIM, TILE_N, True, options,
    )  # [N, D]  # fmt: skip
    d_out_tile = load(
        rows.d_out, first_row, 0, sizes.q_len, VALUE_DIM, TILE_M, True, options
    )  # [M, E]
    v_tile = load(
        operand(value, strides.value, matrix.batch, kv_head, 0.0), first_key, 0, sizes.kv_len,
        VALUE_DIM, TILE_N, True, options,
    )  # [N, E]  # fmt: skip
    shift, delta = load_row_numbers(rows.numbers, first_row, sizes.q_len, TILE_M, BOUNDED=True)
    products = dot(q_tile, transposed(k_tile, options), options)  # [M, N]
    d_weights = dot(d_out_tile, transposed(v_tile, options), options)  # [M, N]
    at = place(matrix, first_row, first_key, TILE_M, TILE_N)
    scores, _ = scores_of(products, at, masks, biases, numbers, options, PARTIAL=True)
    scores = hide_past_end(scores, at.k_pos, matrix.kv_len)
    scores = hide_past_end(scores, row[:, None], matrix.q_len)
    weights = weights_of(scores, shift[:, None], numbers, options)
    if options.dropout:
        d_weights = dropout.apply(d_weights, seed, matrix, first_row, first_key, numbers)
    return d_scores_of(weights, d_weights, delta[:, None], PARTIAL=True)
