"""Which tiles a program visits: empty ones never, full ones without a look at the mask.

A range runs from `start` to `stop`; what lies from `full_start` to `full_stop` is visible to all.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Walk(NamedTuple):
    """The tiles of a range: all from `full_first` to `full_last` are full, the others partial."""

    first: Any
    full_first: Any
    full_last: Any
    partial_count: Any
    low: Any  # the range itself, inside the tensor
    high: Any


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
