"""The two numbers that the backward needs of every row of scores, and the gradient of the sinks.

shift: the log-sum-exp as an exponent of two; +inf in a row that sees nothing, whose weights are
then zero. delta: what the softmax's derivative takes from each weight's gradient, the sum of
out * d_out less d_lse.

They lie in a row of four, the other two unused, so that a tile of 64 rows has as many elements as a
program of 8 warps has threads. Triton repeats a smaller load in every thread that wants its values:
32 copies a thread and tile, and registers to address them (sm_90 then spills 96 bytes).
"""

import triton
import triton.language as tl

from limelight.kernels.scores import LOG2E
from limelight.kernels.tiles import head_of, is_given, load_or, load_rows

ROW_NUMBERS = tl.constexpr(4)


@triton.jit
def row_numbers(
    out, d_out, lse, d_lse, sinks,
    numbers, sink_sums,
    strides, sizes,
    VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """numbers [B, H, M, 4] float32: shift, delta, 0, 0 of every row. Grid: tiles * H * B.

    sink_sums [B, H, tiles]: this tile's part of the sinks' gradient. d_lse, sinks and sink_sums may
    be null.
    """
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    tile = tl.program_id(0) % tiles
    matrix = tl.program_id(0) // tiles
    shift, delta = shift_and_delta(
        out, d_out, lse, d_lse, matrix, tile * TILE_M, strides, sizes, VALUE_DIM, TILE_M
    )
    row = tile * TILE_M + tl.arange(0, TILE_M)
    inside = row < sizes.q_len
    place = matrix.to(tl.int64) * sizes.q_len + row
    column = tl.arange(0, ROW_NUMBERS)[None, :]
    both = tl.where(column == 0, shift[:, None], tl.where(column == 1, delta[:, None], 0.0))
    tl.store(numbers + place[:, None] * ROW_NUMBERS + column, both, mask=inside[:, None])
    add_sinks(sinks, sink_sums, shift, delta, matrix % sizes.q_heads, matrix * tiles + tile)


@triton.jit
def shift_and_delta(
    out, d_out, lse, d_lse, matrix, first_row, strides, sizes,
    VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """The two numbers of the rows of a tile. matrix: counts query heads of all batch elements."""
    head = matrix % sizes.q_heads
    batch = matrix // sizes.q_heads
    out_tile = load_rows(
        head_of(out, strides.out, batch, head), strides.out.row, first_row, 0, sizes.q_len,
        VALUE_DIM, TILE_M, BOUNDED=True,
    ).to(tl.float32)  # fmt: skip
    d_out_tile = load_rows(
        head_of(d_out, strides.d_out, batch, head), strides.d_out.row, first_row, 0, sizes.q_len,
        VALUE_DIM, TILE_M, BOUNDED=True,
    ).to(tl.float32)  # fmt: skip
    row = first_row + tl.arange(0, TILE_M)
    inside = row < sizes.q_len
    place = matrix.to(tl.int64) * sizes.q_len + row
    log_sum_exp = tl.load(lse + place, mask=inside, other=float("-inf"))
    d_log_sum_exp = tl.load(d_lse + place, mask=inside & is_given(d_lse), other=0.0)
    nothing = log_sum_exp == float("-inf")
    shift = tl.where(nothing, float("inf"), log_sum_exp * LOG2E)
    delta = tl.where(nothing, 0.0, tl.sum(out_tile * d_out_tile, 1) - d_log_sum_exp)
    return shift, delta


@triton.jit
def add_sinks(sinks, sink_sums, shift, delta, head, place):
    """Stores these rows' part of the sinks' gradient, if that is wanted."""
    sink = load_or(sinks, head, float("-inf")).to(tl.float32)
    sink_sum = -tl.sum(tl.exp2(sink * LOG2E - shift) * delta, 0)
    tl.store(sink_sums + place, sink_sum, mask=is_given(sink_sums))


@triton.jit
def load_row_numbers(numbers, start, stop, TILE: tl.constexpr, BOUNDED: tl.constexpr):
    """shift and delta of the rows from `start` on; +inf and 0 from `stop` on."""
    row = start + tl.arange(0, TILE)
    column = tl.arange(0, ROW_NUMBERS)[None, :]
    places = numbers + row[:, None] * ROW_NUMBERS + column
    if BOUNDED:
        both = tl.load(places, mask=(row < stop)[:, None], other=0.0)
    else:
        both = tl.load(places)
    shift = tl.sum(tl.where(column == 0, both, 0.0), 1)
    delta = tl.sum(tl.where(column == 1, both, 0.0), 1)
    if BOUNDED:
        shift = tl.where(row < stop, shift, float("inf"))
    return shift, delta
