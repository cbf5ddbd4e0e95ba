"""The gradient of relative keys: of a table of vectors, one for each offset of a key from a query.

A diagonal of tiles takes the same two halves of a band from the table, N offsets each. A program
walks a diagonal and adds up, for every offset, the queries times the gradients of their products
with its vector. Neighbouring diagonals share a half; they are added in a fixed order at the end, so
that the gradient repeats bit for bit. Nothing is as large as a matrix of scores.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels import dropout, ranges
from limelight.kernels.bias_gradient import along, gradient_of_scores, outwards
from limelight.kernels.scores import matrix_of
from limelight.kernels.tiles import head_of, load_or, load_rows, padded


class BandSums(NamedTuple):
    """Of both halves of a band: the sums of queries [N, D] and of numbers, [N, SAME] alike."""

    near: Any
    far: Any
    near_numbers: Any
    far_numbers: Any


SAME = tl.constexpr(16)  # the least that a product takes


@triton.jit
def band_gradients(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, bias, seen,
    bands, numbers_bands,
    strides, sizes, numbers, options, diagonals,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """What each diagonal adds to its offsets. Grid: parts * H * diagonals, the longest first.

    bands [parts, H, diagonals, 2 N + 2, D] float32: the vectors of both halves, then what lies
    before the table's first entry and after its last, added up. numbers_bands [parts, H, diagonals,
    2 N + 2]: the same of the numbers beside the vectors. bias: a tuple of the one. A part is of
    diagonals.batches batch elements. M is N. seen: from `key_ranges`.
    """
    part = tl.program_id(0) % diagonals.parts
    head = tl.program_id(0) // diagonals.parts % sizes.q_heads
    diagonal = outwards(tl.program_id(0) // diagonals.parts // sizes.q_heads, diagonals.count)
    offset = (diagonals.first + diagonal) * TILE_N
    seed = dropout.seed_of(seeds, numbers)
    sums = BandSums(
        tl.zeros([TILE_N, padded(HEAD_DIM)], tl.float32),
        tl.zeros([TILE_N, padded(HEAD_DIM)], tl.float32),
        tl.zeros([TILE_N, SAME], tl.float32),
        tl.zeros([TILE_N, SAME], tl.float32),
    )
    first_batch = part * diagonals.batches
    for batch in tl.range(first_batch, min(first_batch + diagonals.batches, diagonals.all_batches)):
        matrix = matrix_of(batch, head, query_starts, sizes, numbers)
        walk = along(offset, seen, matrix, TILE_M, TILE_N)
        for tile in tl.range(walk.full_first, walk.full_last):
            sums = _add_tile(
                sums, query, key, value, d_out, row_numbers, masks, biases, bias, tile * TILE_M,
                offset, matrix, seed, strides, sizes, numbers, options, HEAD_DIM, VALUE_DIM, TILE_M,
                TILE_N, PARTIAL=False,
            )  # fmt: skip
        for i in tl.range(0, walk.partial_count):
            sums = _add_tile(
                sums, query, key, value, d_out, row_numbers, masks, biases, bias,
                ranges.partial_tile(walk, i) * TILE_M, offset, matrix, seed, strides, sizes,
                numbers, options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, PARTIAL=True,
            )  # fmt: skip
    near, far = sums.near, sums.far
    near_numbers, far_numbers = tl.max(sums.near_numbers, 1), tl.max(sums.far_numbers, 1)
    start = load_or(query_starts, first_batch, numbers.query_start).to(tl.int32)
    near_place = bias[0].places(offset - start, 0, TILE_M, TILE_N, bias[0])
    far_place = bias[0].places(offset - start, TILE_N, TILE_M, TILE_N, bias[0])
    band = (part * sizes.q_heads + head) * diagonals.count + diagonal
    band = band.to(tl.int64) * (2 * TILE_N + 2)
    row = tl.arange(0, TILE_N)
    dim = tl.arange(0, padded(HEAD_DIM))
    inside = (dim < HEAD_DIM)[None, :]
    places = bands + (band + row[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(places, near, mask=inside)
    tl.store(places + TILE_N * HEAD_DIM, far, mask=inside)
    numbers_band = numbers_bands + band
    tl.store(numbers_band + row, near_numbers)
    tl.store(numbers_band + TILE_N + row, far_numbers)
    for end in tl.static_range(2):
        if end == 0:
            near_end, far_end = near_place < 0, far_place < 0
        else:
            near_end, far_end = near_place >= bias[0].entries, far_place >= bias[0].entries
        vectors = tl.where(near_end[:, None], near, 0.0) + tl.where(far_end[:, None], far, 0.0)
        place = bands + (band + 2 * TILE_N + end) * HEAD_DIM + dim
        tl.store(place, tl.sum(vectors, 0), mask=dim < HEAD_DIM)
        ends = tl.where(near_end, near_numbers, 0.0) + tl.where(far_end, far_numbers, 0.0)
        tl.store(numbers_band + 2 * TILE_N + end, tl.sum(ends, 0))


@triton.jit
def _add_tile(
    sums, query, key, value, d_out, row_numbers, masks, biases, bias, first_row, offset, matrix,
    seed, strides, sizes, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """The sums after one more tile of a diagonal."""
    d_scores = gradient_of_scores(
        query, key, value, d_out, row_numbers, masks, biases, first_row, first_row + offset, offset,
        matrix, seed, strides, sizes, numbers, options, 0.0, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
        PARTIAL, ANYWHERE=False,
    )  # [M, N]  # fmt: skip
    q_tile = load_rows(
        head_of(query, strides.query, matrix.batch, matrix.head), strides.query.row, first_row, 0,
        sizes.q_len, HEAD_DIM, TILE_M, PARTIAL,
    )  # [M, D]  # fmt: skip
    d_near, d_far = bias[0].unskewed(d_scores, sizes.kv_len)  # [M, N]
    d_near, d_far = tl.trans(d_near.to(q_tile.dtype)), tl.trans(d_far.to(q_tile.dtype))
    near = tl.dot(d_near, q_tile, sums.near, input_precision=options.precision)
    far = tl.dot(d_far, q_tile, sums.far, input_precision=options.precision)
    near_numbers, far_numbers = sums.near_numbers, sums.far_numbers
    if bias[0].HAS_SCORES:
        ones = tl.full([TILE_M, SAME], 1.0, q_tile.dtype)
        near_numbers = tl.dot(d_near, ones, near_numbers, input_precision=options.precision)
        far_numbers = tl.dot(d_far, ones, far_numbers, input_precision=options.precision)
    return BandSums(near, far, near_numbers, far_numbers)


@triton.jit
def fold_bands(
    bands, query_starts, bias,
    gradient,
    strides, sizes, numbers, diagonals, shared,
    DIM: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gradient [heads, entries, DIM], from what `band_gradients` left. Grid: entries * heads.

    shared: how many query heads share a head of the table.
    """
    entry = tl.program_id(0) % bias[0].entries
    own_head = tl.program_id(0) // bias[0].entries
    dim = tl.arange(0, padded(DIM))
    row = tl.arange(0, BLOCK)
    height = 2 * TILE_N + 2
    acc = tl.zeros([BLOCK, padded(DIM)], tl.float32)
    for step in tl.range(0, diagonals.parts * shared):
        part = step // shared
        matrix = part * sizes.q_heads + own_head * shared + step % shared
        first = tl.cast(matrix, tl.int64) * diagonals.count * height
        start = load_or(query_starts, part * diagonals.batches, numbers.query_start).to(tl.int32)
        # The first half of one diagonal's band is the second of the one before.
        place = entry + bias[0].first + start + (TILE_N - 1) - diagonals.first * TILE_N
        diagonal = place // TILE_N
        near = diagonal * height + place % TILE_N
        far = near - height + TILE_N
        for half in tl.static_range(2):
            if half == 0:
                at, inside = near, (place >= 0) & (diagonal < diagonals.count)
            else:
                at, inside = far, (diagonal > 0) & (diagonal <= diagonals.count)
            places = bands + (first + at + row[:, None]) * DIM + dim[None, :]
            mask = (row == 0)[:, None] & (dim < DIM)[None, :] & inside
            acc += tl.load(places, mask=mask, other=0.0)
        for end in tl.static_range(2):
            count = tl.where(entry == end * (bias[0].entries - 1), diagonals.count, 0)
            for block in tl.range(0, count, BLOCK):
                ends = first + (block + row) * height + 2 * TILE_N + end
                places = bands + ends[:, None] * DIM + dim[None, :]
                mask = (block + row < count)[:, None] & (dim < DIM)[None, :]
                acc += tl.load(places, mask=mask, other=0.0)
    total = tl.sum(acc, 0) * numbers.scale
    places = gradient + own_head * strides.head + entry * strides.entry + dim * strides.dim
    tl.store(places, total.to(gradient.dtype.element_ty), mask=dim < DIM)
