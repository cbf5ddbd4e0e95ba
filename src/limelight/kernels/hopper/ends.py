"""What runs before and after the backward's main kernel, on every row of the queries."""

import triton
import triton.language as tl

from limelight.kernels.row_numbers import add_sinks, shift_and_delta
from limelight.kernels.tiles import head_of, store_rows


@triton.jit
def prepare(
    out, d_out, lse, d_lse, sinks,
    numbers, sink_sums, d_query_sums,
    strides, sizes,
    VALUE_DIM: tl.constexpr, SUMS_DIM: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """numbers [B, H, 2, tiles * M] float32: shift and delta of every row; see row_numbers.py.

    Rows past the end have a shift of +inf. d_query_sums [B, H, M, SUMS_DIM] float32 becomes zero.
    sink_sums [B, H, tiles]: as row_numbers.py's. Grid: tiles * H * B.
    """
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    tile = tl.program_id(0) % tiles
    matrix = tl.program_id(0) // tiles
    first_row = tile * TILE_M
    shift, delta = shift_and_delta(
        out, d_out, lse, d_lse, matrix, first_row, strides, sizes, VALUE_DIM, TILE_M
    )
    place = numbers + matrix.to(tl.int64) * 2 * tiles * TILE_M + first_row + tl.arange(0, TILE_M)
    tl.store(place, shift)
    tl.store(place + tiles * TILE_M, delta)
    add_sinks(sinks, sink_sums, shift, delta, matrix % sizes.q_heads, matrix * tiles + tile)
    sums = d_query_sums + matrix.to(tl.int64) * sizes.q_len * SUMS_DIM
    zeros = tl.zeros([TILE_M, SUMS_DIM], tl.float32)
    store_rows(sums, SUMS_DIM, first_row, sizes.q_len, zeros, SUMS_DIM, TILE_M)


@triton.jit
def finish(
    d_query_sums, d_query, strides, sizes, numbers,
    HEAD_DIM: tl.constexpr, SUMS_DIM: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """d_query [B, H, M, D] from its float32 sums: scaled and rounded. Grid: tiles * H * B."""
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    first_row = tl.program_id(0) % tiles * TILE_M
    matrix = tl.program_id(0) // tiles
    row = first_row + tl.arange(0, TILE_M)[:, None]
    column = tl.arange(0, SUMS_DIM)[None, :]
    sums = d_query_sums + matrix.to(tl.int64) * sizes.q_len * SUMS_DIM
    tile = tl.load(sums + row * SUMS_DIM + column, mask=row < sizes.q_len, other=0.0)
    d_query_head = head_of(
        d_query, strides.d_query, matrix // sizes.q_heads, matrix % sizes.q_heads
    )
    # Of SUMS_DIM columns, HEAD_DIM are stored.
    places = d_query_head + row.to(tl.int64) * strides.d_query.row + column
    inside = (row < sizes.q_len) & (column < HEAD_DIM)
    tl.store(places, (tile * numbers.scale).to(d_query.dtype.element_ty), mask=inside)
