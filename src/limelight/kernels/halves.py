"""Splits tensors of float32 into halves (see products.py), with one unit for each head of keys.

`measure_peaks` finds the largest number of every block of rows, and the least of the largest
numbers of its rows and columns. `split_into_halves` puts blocks together. Where a row or column is
too small for its head's unit (under 2**-24 of the largest, but not zero), where a number is not
finite, or where all are beyond 2**50 or 2**-50, so that products of units might leave float32, the
units of the head are 0: TF32 kernels take it as it is.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels import products
from limelight.kernels.tiles import head_of, load_rows, store_rows

LEAST = tl.constexpr(2.0**-24)
GREATEST = tl.constexpr(2.0**50)


class Whole(NamedTuple):
    """A tensor to split."""

    tensor: Any  # float32
    strides: Any
    halves: Any  # float16, a row holds the high halves, then the low ones
    halves_strides: Any
    peaks: Any  # [B, G, blocks of a head's rows, 2] float32, of `measure_peaks`
    group: Any  # heads that share a unit
    length: Any


class Block(NamedTuple):
    """Some rows of a tensor. first_peak, count: of all blocks that share its unit."""

    is_inside: Any
    batch: Any
    head: Any
    first_row: Any
    peak: Any
    first_peak: Any
    count: Any


@triton.jit
def measure_peaks(
    wholes, blocks, kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fills the peaks of query, key, value and perhaps d_out, in this order.

    Grid: blocks * G * B, blocks being those of the tensor that has the most.
    """
    for i in tl.static_range(len(wholes)):
        block = _block_of(wholes[i], blocks, kv_heads, TILE)
        if block.is_inside:
            size = tl.abs(_load(wholes[i], block, HEAD_DIM if i < 2 else VALUE_DIM, TILE))
            size = tl.where(size < float("inf"), size, float("inf"))  # NaN is not
            in_rows, in_columns = tl.max(size, 1), tl.max(size, 0)
            tl.store(block.peak, tl.max(in_rows, 0))
            tl.store(block.peak + 1, tl.minimum(_least(in_rows), _least(in_columns)))


@triton.jit
def _least(sizes):
    """The least that is not zero."""
    return tl.min(tl.where(sizes == 0, float("inf"), sizes), 0)


@triton.jit
def split_into_halves(
    wholes, units, blocks, kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes halves, and units [B, G, 4] float32, one for each tensor. Grid: as `measure_peaks`."""
    fits = True
    for i in tl.static_range(len(wholes)):
        block = _block_of(wholes[i], blocks, kv_heads, TILE)
        largest, least = _peaks_of(block)
        fits = fits & (largest < GREATEST) & ((largest > 1 / GREATEST) | (largest == 0))
        fits = fits & (least >= largest * LEAST)
        if block.is_inside:
            _split(wholes[i], block, largest, HEAD_DIM if i < 2 else VALUE_DIM, TILE)
    if tl.program_id(0) % blocks == 0:
        for i in tl.static_range(len(wholes)):
            largest, _ = _peaks_of(_block_of(wholes[i], blocks, kv_heads, TILE))
            unit = tl.where(fits, products.unit_of(largest), 0.0)
            tl.store(units + tl.program_id(0) // blocks * 4 + i, unit)


@triton.jit
def _split(whole, block, largest, DIM: tl.constexpr, TILE: tl.constexpr):
    rows = products.split(_load(whole, block, DIM, TILE), largest)
    high = head_of(whole.halves, whole.halves_strides, block.batch, block.head)
    stride = whole.halves_strides.row
    store_rows(high, stride, block.first_row, whole.length, rows.high, DIM, TILE)
    store_rows(high + DIM, stride, block.first_row, whole.length, rows.low, DIM, TILE)


@triton.jit
def _peaks_of(block):
    """The largest and the least of a head of keys' blocks."""
    largest = tl.zeros([128], tl.float32)
    least = tl.full([128], float("inf"), tl.float32)
    for start in range(0, block.count, 128):
        place = start + tl.arange(0, 128)
        inside = place < block.count
        peaks = block.first_peak + place * 2
        largest = tl.maximum(largest, tl.load(peaks, mask=inside, other=0.0))
        least = tl.minimum(least, tl.load(peaks + 1, mask=inside, other=float("inf")))
    return tl.max(largest, 0), tl.min(least, 0)


@triton.jit
def _block_of(whole, blocks, kv_heads, TILE: tl.constexpr):
    """This program's block of a tensor."""
    tiles = tl.cdiv(whole.length, TILE)
    count = whole.group * tiles
    number = tl.program_id(0) % blocks
    matrix = tl.program_id(0) // blocks
    first_peak = whole.peaks + matrix.to(tl.int64) * count * 2
    return Block(
        number < count,
        matrix // kv_heads,
        matrix % kv_heads * whole.group + number // tiles,
        number % tiles * TILE,
        first_peak + number * 2,
        first_peak,
        count,
    )


@triton.jit
def _load(whole, block, DIM: tl.constexpr, TILE: tl.constexpr):
    return load_rows(
        head_of(whole.tensor, whole.strides, block.batch, block.head), whole.strides.row,
        block.first_row, 0, whole.length, DIM, TILE, BOUNDED=True,
    )  # fmt: skip
