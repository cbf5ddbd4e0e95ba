"""Products of tiles. float32 may come in two float16 halves, for Hopper's tensor cores.

x = (high + low / 2048) * unit, the unit a power of two, keeps x to 2**-23 of itself or 2**-51 of
the largest number with the same unit, whichever is more. high * high, high * low and low * high
make a product; low * low lies below float32's rounding. That takes half as long as three TF32
products, and float16 tiles can be read transposed, which TF32 ones cannot. halves.py splits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels import scores
from limelight.kernels.tiles import head_of, load_rows

LOW_STEP = tl.constexpr(2048.0)


class Operand(NamedTuple):
    """One head of a tensor that products read: of halves, a row holds the high, then the low."""

    first: Any  # pointer
    stride: Any  # of rows
    unit: Any


class Halves(NamedTuple):
    high: Any
    low: Any
    unit: Any


@triton.jit
def operand(tensor, strides, batch, head, unit):
    return Operand(head_of(tensor, strides, batch, head), strides.row, unit)


@triton.jit
def load(
    operand, start, low, high, DIM: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr, options
):
    """Rows for the functions below: see `load_rows`."""
    tile = load_rows(operand.first, operand.stride, start, low, high, DIM, TILE, BOUNDED)
    if options.precision == "fp16x3":
        rest = load_rows(operand.first + DIM, operand.stride, start, low, high, DIM, TILE, BOUNDED)
        return Halves(tile, rest, operand.unit)
    else:
        return tile


@triton.jit
def transposed(tile, options):
    if options.precision == "fp16x3":
        return Halves(tl.trans(tile.high), tl.trans(tile.low), tile.unit)
    else:
        return tl.trans(tile)


@triton.jit
def zero_unseen(tile, seen, options):
    if options.precision == "fp16x3":
        high = scores.zero_unseen(tile.high, seen)
        return Halves(high, scores.zero_unseen(tile.low, seen), tile.unit)
    else:
        return scores.zero_unseen(tile, seen)


@triton.jit
def no_number_in(tile):
    """Whether a tile holds NaN."""
    return tl.max(tl.max((tile != tile).to(tl.int32), 1), 0) != 0


@triton.jit
def dot(a, b, options):
    """a @ b."""
    if options.precision == "fp16x3":
        cross = tl.dot(a.high, b.low)
        cross = tl.dot(a.low, b.high, cross)
        return tl.dot(a.high, b.high, cross * (1 / LOW_STEP)) * (a.unit * b.unit)
    else:
        return tl.dot(a, b, input_precision=options.precision)


@triton.jit
def add_dot(a, b, acc, options):
    """acc + a @ b. a: float32 numbers just computed, whose every row gets a unit of its own."""
    if options.precision == "fp16x3":
        return acc + dot(split(a, tl.max(tl.abs(a), 1)[:, None]), b, options)
    else:
        return tl.dot(a.to(b.dtype), b, acc, input_precision=options.precision)


@triton.jit
def split(x, top):
    """x in halves. top: at least the magnitude of all numbers that share a unit; it broadcasts."""
    unit = unit_of(top)
    # Exponents are stored 127 too large, so 254 less one is the reciprocal's.
    scaled = x * ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    high = scaled.to(tl.float16)
    low = ((scaled - high.to(tl.float32)) * LOW_STEP).to(tl.float16)
    return Halves(high, low, unit)


@triton.jit
def unit_of(top):
    """The power of two that brings `top` under 2**15, as float16 ends below 2**16."""
    bits = tl.maximum(top.to(tl.int32, bitcast=True), 27 << 23)
    return ((bits >> 23 << 23) - (14 << 23)).to(tl.float32, bitcast=True)


class Units(NamedTuple):
    """Of what belongs to one head of keys; 0 where it is not in halves."""

    query: Any
    key: Any
    value: Any
    d_out: Any


@triton.jit
def units_of(units, batch, kv_head, sizes):
    """units: empty, or the pointer to units [B, G, 4] alone."""
    if len(units) == 0:
        return Units(0.0, 0.0, 0.0, 0.0)
    else:
        first = units[0] + (batch * (sizes.q_heads // sizes.group) + kv_head) * 4
        return Units(tl.load(first), tl.load(first + 1), tl.load(first + 2), tl.load(first + 3))


@triton.jit
def is_elsewhere(unit, options):
    """Whether this head is another launch's: one takes those in halves, one the others."""
    return (unit.query == 0) == (options.precision == "fp16x3")
