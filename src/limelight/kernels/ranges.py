"""Which tiles a program visits: empty ones never, full ones without a look at the mask.

A range runs from `start` to `stop`; what lies from `full_start` to `full_stop` is visible to all.
Where masks have states (masks/base.py), the tiles of a range are looked at in parts of 64, and the
bits of a word say which of them are visited; else there is one part, and all of it is.

What a mask or a bias of -inf hides inside a tile needs no help: only what was no number before can
pass a weight of 0, and makes NaN of a sum. So a program walks as if that could not be, and where a
sum came out as NaN it walks once more, carefully: with all tiles partial, and with zeros in the
place of keys and values that none of its rows sees.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

PART = tl.constexpr(64)


class Walk(NamedTuple):
    """The tiles of a range: all from `full_first` to `full_last` are full, the others partial."""

    first: Any
    full_first: Any
    full_last: Any
    partial_count: Any
    low: Any  # the range itself, inside the tensor
    high: Any


class Tiles(NamedTuple):
    """Tiles to visit; bits: which of those from `first` on, where masks have states."""

    count: Any
    first: Any
    bits: Any


@triton.jit
def keys_of(q_start, q_stop, masks, matrix, TILE: tl.constexpr, ALL_PARTIAL: tl.constexpr):
    """The tiles of keys for the queries at positions from q_start to q_stop."""
    start, full_start, full_stop, stop = key_range(q_start, q_stop, masks, matrix)
    return _walk(start, full_start, full_stop, stop, TILE, ALL_PARTIAL)


@triton.jit
def key_range(q_start, q_stop, masks, matrix):
    """The range of keys for the queries at positions from q_start to q_stop."""
    start, full_start, full_stop, stop = 0, 0, matrix.kv_len, matrix.kv_len
    for i in tl.static_range(len(masks)):
        a, b, c, d = masks[i].key_range(q_start, q_stop, matrix, masks[i])
        start, full_start = max(start, a), max(full_start, b)
        full_stop, stop = min(full_stop, c), min(stop, d)
    return start, full_start, full_stop, stop


@triton.jit
def queries_of(k_start, k_stop, masks, matrix, TILE: tl.constexpr, ALL_PARTIAL: tl.constexpr):
    """The tiles of queries, counted by their rows, for the keys from k_start to k_stop."""
    start, full_start = matrix.query_start, matrix.query_start
    stop = matrix.query_start + matrix.q_len
    full_stop = stop
    for i in tl.static_range(len(masks)):
        a, b, c, d = masks[i].query_range(k_start, k_stop, matrix, masks[i])
        start, full_start = max(start, a), max(full_start, b)
        full_stop, stop = min(full_stop, c), min(stop, d)
    shift = matrix.query_start
    return _walk(
        start - shift, full_start - shift, full_stop - shift, stop - shift, TILE, ALL_PARTIAL
    )


@triton.jit
def _walk(start, full_start, full_stop, stop, TILE: tl.constexpr, ALL_PARTIAL: tl.constexpr):
    start = max(start, 0)
    stop = max(start, stop)
    first = start // TILE
    last = max(first, tl.cdiv(stop, TILE))
    if ALL_PARTIAL:
        full_first, full_last = first, first
    else:
        full_first = min(max(tl.cdiv(max(full_start, 0), TILE), first), last)
        full_last = max(min(max(full_stop, 0) // TILE, last), full_first)
    partial_count = (last - first) - (full_last - full_first)
    return Walk(first, full_first, full_last, partial_count, start, stop)


@triton.jit
def partial_tile(walk, i):
    """The i-th partial tile: they lie on both sides of the full ones."""
    tile = walk.first + i
    return tl.where(tile < walk.full_first, tile, tile + walk.full_last - walk.full_first)


@triton.jit
def parts_of(walk, options):
    count = 1
    if options.scattered:
        count = tl.cdiv(_last(walk) - walk.first, PART)
    return count


@triton.jit
def key_tiles(
    part, walk, q_start, masks, matrix, options,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ALL_PARTIAL: tl.constexpr,
):  # fmt: skip
    """The full and the partial tiles of keys in this part of the walk."""
    if options.scattered:
        first = walk.first + part * PART
        k_start = (first + tl.arange(0, PART)) * TILE_N
        states = tl.full([PART], 2, tl.int32)
        for i in tl.static_range(len(masks)):
            of_mask = masks[i].key_states(q_start, k_start, matrix, masks[i], TILE_M, TILE_N)
            states = tl.minimum(states, of_mask)
        full, partial = _scattered(first, states, walk, matrix.kv_len, TILE_N, ALL_PARTIAL)
    else:
        full, partial = _side_by_side(walk)
    return full, partial


@triton.jit
def query_tiles(
    part, walk, k_start, masks, matrix, options,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ALL_PARTIAL: tl.constexpr,
):  # fmt: skip
    """The full and the partial tiles of queries in this part of the walk."""
    if options.scattered:
        first = walk.first + part * PART
        q_start = matrix.query_start + (first + tl.arange(0, PART)) * TILE_M
        states = tl.full([PART], 2, tl.int32)
        for i in tl.static_range(len(masks)):
            of_mask = masks[i].query_states(q_start, k_start, matrix, masks[i], TILE_M, TILE_N)
            states = tl.minimum(states, of_mask)
        full, partial = _scattered(first, states, walk, matrix.q_len, TILE_M, ALL_PARTIAL)
    else:
        full, partial = _side_by_side(walk)
    return full, partial


@triton.jit
def next_full(tiles, i, bits, options):
    """The i-th of these tiles, and the bits of those after it. bits: at first `tiles.bits`."""
    tile = tiles.first + i
    if options.scattered:
        tile, bits = _lowest(tiles, bits)
    return tile, bits


@triton.jit
def next_partial(tiles, walk, i, bits, options):
    """The same of partial tiles."""
    tile = partial_tile(walk, i)
    if options.scattered:
        tile, bits = _lowest(tiles, bits)
    return tile, bits


@triton.jit
def _lowest(tiles, bits):
    lowest = bits & -bits
    # A power of two is its exponent, as a float; the sign is that of the last bit.
    exponent = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tiles.first + exponent - 127, bits ^ lowest


@triton.jit
def _side_by_side(walk):
    none = tl.cast(0, tl.int64)
    full = Tiles(walk.full_last - walk.full_first, walk.full_first, none)
    return full, Tiles(walk.partial_count, walk.first, none)


@triton.jit
def _scattered(first, states, walk, length, TILE: tl.constexpr, ALL_PARTIAL: tl.constexpr):
    tile = first + tl.arange(0, PART)
    inside = tile < _last(walk)
    full = inside & (states == 2) & ((tile + 1) * TILE <= length)
    if ALL_PARTIAL:
        full = full & (tile < 0)
    return _named(first, full), _named(first, inside & (states > 0) & (full == 0))


@triton.jit
def _named(first, visited):
    bit = tl.cast(1, tl.int64) << tl.arange(0, PART).to(tl.int64)
    bits = tl.sum(tl.where(visited, bit, 0))
    return Tiles(tl.sum(visited.to(tl.int32)), first, bits)


@triton.jit
def _last(walk):
    return walk.first + walk.partial_count + walk.full_last - walk.full_first
