"""Adds up what programs left, in a fixed order, so that a gradient repeats bit for bit."""

import triton
import triton.language as tl


@triton.jit
def add_partial_sums(sums, total, strides, heads, batches, tiles, BLOCK: tl.constexpr):
    """total [heads] or [batches, heads] = sums [batches, heads, tiles], added over what it lacks.

    Grid: one program for each element of total. batches: how many each program adds.
    """
    program = tl.program_id(0)
    head = program % heads
    first = program // heads
    acc = tl.zeros([BLOCK], tl.float32)
    for batch in range(batches):
        matrix = sums + ((first + batch) * heads + head).to(tl.int64) * tiles
        for start in range(0, tiles, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            acc += tl.load(matrix + tile, mask=tile < tiles, other=0.0)
    place = total + first * strides.batch + head * strides.head
    tl.store(place, tl.sum(acc, 0).to(total.dtype.element_ty))
