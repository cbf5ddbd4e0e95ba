"""Turns: warpgroups that issue their matrix products one after the other.

While one has the tensor cores, the next computes its softmax: without an order both would wait for
products, then both for exponentials. Named barriers are cheaper than ones in shared memory. Triton
itself uses the lower numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_FIRST = 8


@gluon.constexpr_function
def _instruction(name, number):
    return f"bar.{name} {_FIRST + number}, 256; mov.u32 $0, $1;"


@gluon.jit
def wait_turn(ME: gl.constexpr):
    """Until the warpgroup before `ME` has passed the turn on."""
    _run(_instruction("sync", ME))


@gluon.jit
def pass_turn(TO: gl.constexpr):
    _run(_instruction("arrive", TO))


@gluon.jit
def _run(INSTRUCTION: gl.constexpr):
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)
