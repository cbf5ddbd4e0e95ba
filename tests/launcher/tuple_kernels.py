"""Small kernels for the launcher's tests, with fragments as masks and biases bring them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def add_slope(scores, offsets, own):
    return scores + tl.load(own.slopes) * offsets


@triton.jit
def add_table(scores, offsets, own):
    return scores + tl.load(own.table + offsets * own.stride).to(tl.float32) * own.gain


@triton.jit
def add_both(scores, offsets, own):
    scores = own.left.fragment(scores, offsets, own.left)
    return own.right.fragment(scores, offsets, own.right)


class Slope(NamedTuple):
    fragment: Any
    slopes: Any


class Table(NamedTuple):
    fragment: Any
    table: Any
    stride: Any
    gain: Any
    clipped: Any


class Both(NamedTuple):
    fragment: Any
    left: Any
    right: Any


@triton.jit
def apply_biases(scores, out, biases, length, scale, extra, BLOCK: tl.constexpr):
    """Scales scores [length] and adds every bias of a tuple, as the attention kernels do."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(scores + offsets, mask=offsets < length, other=0.0) * scale
    for n in tl.static_range(len(biases)):
        tile = biases[n].fragment(tile, offsets, biases[n])
    if extra is not None:
        tile += tl.load(extra)
    tl.store(out + offsets, tile, mask=offsets < length)


@triton.jit
def apply_constant(scores, biases: tl.constexpr):
    """Takes its biases as one constant, which Triton's own hash knows by its text alone."""
    tl.store(scores, biases[0](tl.load(scores), 1, biases[1]))


@triton.jit
def multiply(left, right, out, SIZE: tl.constexpr):
    """One product of two square matrices: needs shared memory."""
    lines = tl.arange(0, SIZE)
    at = lines[:, None] * SIZE + lines[None, :]
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


class Choice(NamedTuple):
    kind: Any
    value: Any


@triton.jit
def choose(scores, how):
    """Decides by a string that stands inside a tuple."""
    if how.kind == "negate":
        tl.store(scores, -how.value)
    else:
        tl.store(scores, how.value)


@gluon.jit
def gluon_scale(scores, scale, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(scores + at, gl.load(scores + at) * scale)


@triton.jit
def abort_the_compiler(scores):
    """Assembly that no assembler takes."""
    tl.inline_asm_elementwise("no such instruction;", "=r,r", [tl.load(scores)], tl.int32, False, 1)
