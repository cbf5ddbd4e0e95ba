"""Tiles that the copy engine brings into shared memory, and how roles hand them to one another."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from limelight.kernels.hopper.gluon_names import copy_in


class Ring(NamedTuple):
    """Tiles in shared memory that one role fills and others empty, in turn."""

    tiles: Any  # [STAGES, 1, 1, rows, dim]
    filled: Any  # barriers, one for each stage
    emptied: Any


@gluon.constexpr_function
def padded(dim):
    """The width of a tile whose rows hold `dim` numbers: 64, 128 or 256."""
    return max(64, 1 << (dim - 1).bit_length())


@gluon.jit
def descriptor(tensor, strides, batches, heads, length, DIM: gl.constexpr, ROWS: gl.constexpr):
    """What the copy engine needs to know of a tensor; what lies outside arrives as zeros."""
    BLOCK: gl.constexpr = [1, 1, ROWS, padded(DIM)]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, tensor.dtype.element_ty)
    return tma.make_tensor_descriptor(
        tensor,
        [batches, heads, length, DIM],
        [strides.batch, strides.head, strides.row, 1],
        BLOCK,
        layout,
    )


@gluon.jit
def ring(source, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of tiles of a descriptor, which the copy engine fills and `READERS` roles empty."""
    return ring_of(_tiles(source, STAGES), 1, READERS)


@gluon.jit
def ring_of(tiles, WRITERS: gl.constexpr, READERS: gl.constexpr):
    STAGES: gl.constexpr = tiles.type.shape[0]
    return Ring(tiles, _barriers(STAGES, WRITERS), _barriers(STAGES, READERS))


@gluon.jit
def tiles_beside(ring, source):
    """Further tiles, of another descriptor, that arrive with those of a ring."""
    STAGES: gl.constexpr = ring.tiles.type.shape[0]
    return Ring(_tiles(source, STAGES), ring.filled, ring.emptied)


@gluon.jit
def _tiles(source, STAGES: gl.constexpr):
    return gl.allocate_shared_memory(
        source.dtype, [STAGES] + source.block_type.shape, source.layout
    )


@gluon.jit
def _barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), count=ARRIVALS)
    return made


@gluon.jit
def stage_of(ring, n):
    """Where the n-th tile lies, and the phase of its barriers."""
    STAGES: gl.constexpr = ring.tiles.type.shape[0]
    return n % STAGES, (n // STAGES) & 1


@gluon.jit
def fill(ring, n, source, batch, head, row):
    """Has the n-th tile of a ring copied, as soon as its place is empty."""
    stage, _ = stage_of(ring, n)
    await_empty(ring, n)
    mbarrier.expect(ring.filled.index(stage), source.block_type.nbytes)
    copy_in(source, [batch, head, row, 0], ring.filled.index(stage), ring.tiles.index(stage))


@gluon.jit
def await_empty(ring, n):
    """Until the place of the n-th tile is free."""
    stage, phase = stage_of(ring, n)
    mbarrier.wait(ring.emptied.index(stage), phase ^ 1)


@gluon.jit
def await_tile(ring, n):
    """The n-th tile of a ring, once it has arrived."""
    stage, phase = stage_of(ring, n)
    mbarrier.wait(ring.filled.index(stage), phase)
    return tile_of(ring, n)


@gluon.jit
def tile_of(ring, n):
    SHAPE: gl.constexpr = [ring.tiles.type.shape[3], ring.tiles.type.shape[4]]
    stage, _ = stage_of(ring, n)
    return ring.tiles.index(stage).reshape(SHAPE)


@gluon.jit
def hand_over(ring, n):
    """Says that this role has written its part of the n-th tile."""
    stage, _ = stage_of(ring, n)
    mbarrier.arrive(ring.filled.index(stage), count=1)


@gluon.jit
def empty(ring, n, pred=True):
    """Says that this role has read the n-th tile for the last time."""
    stage, _ = stage_of(ring, n)
    mbarrier.arrive(ring.emptied.index(stage), count=1, pred=pred)
