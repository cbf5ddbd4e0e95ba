"""What the backward needs of every row of the scores, and the gradient of the sinks."""

import triton
import triton.language as tl

from limelight.kernels.scores import LOG2E
from limelight.kernels.tiles import head_of, is_given, load_or, load_rows


@triton.jit
def delta(
    out, d_out, lse, d_lse, sinks,
    shifts, deltas, sink_sums,
    strides, sizes,
    VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Of every row, its shift and its delta, [B, H, M] float32 each. Grid: tiles * H * B.

    shift: the log-sum-exp as an exponent of two; +inf in a row that sees nothing, whose weights are
    then zero. delta: what the softmax's derivative takes from each weight's gradient, the sum of
    out * d_out less d_lse. sink_sums [B, H, tiles]: this tile's part of the sinks' gradient.
    d_lse, sinks and sink_sums may be null.
    """
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    tile = tl.program_id(0) % tiles
    matrix = tl.program_id(0) // tiles
    head = matrix % sizes.q_heads
    batch = matrix // sizes.q_heads
    first_row = tile * TILE_M
    out_head = head_of(out, strides.out, batch, head)
    out_tile = load_rows(
        out_head, strides.out.row, first_row, 0, sizes.q_len, VALUE_DIM, TILE_M, BOUNDED=True
    ).to(tl.float32)
    d_out_head = head_of(d_out, strides.d_out, batch, head)
    d_out_tile = load_rows(
        d_out_head, strides.d_out.row, first_row, 0, sizes.q_len, VALUE_DIM, TILE_M, BOUNDED=True
    ).to(tl.float32)
    row = first_row + tl.arange(0, TILE_M)
    inside = row < sizes.q_len
    place = matrix.to(tl.int64) * sizes.q_len + row
    log_sum_exp = tl.load(lse + place, mask=inside, other=float("-inf"))
    d_log_sum_exp = tl.load(d_lse + place, mask=inside & is_given(d_lse), other=0.0)
    nothing = log_sum_exp == float("-inf")
    shift = tl.where(nothing, float("inf"), log_sum_exp * LOG2E)
    row_delta = tl.where(nothing, 0.0, tl.sum(out_tile * d_out_tile, 1) - d_log_sum_exp)
    tl.store(shifts + place, shift, mask=inside)
    tl.store(deltas + place, row_delta, mask=inside)
    sink = load_or(sinks, head, float("-inf")).to(tl.float32)
    weight = tl.exp2(sink * LOG2E - shift)
    sink_sum = -tl.sum(weight * row_delta, 0)
    tl.store(sink_sums + matrix * tiles + tile, sink_sum, mask=is_given(sink_sums))
