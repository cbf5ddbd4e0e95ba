"""Block-sparse attention: blocks of scores are visible or hidden, and hidden ones cost nothing.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(BlockSparse(numpy.array([[True, False], [True, True]]), 2, 2), 4, 4))
1 1 0 0
1 1 0 0
1 1 1 1
1 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import Fixed, jit, tl
from limelight.errors import invalid, is_integer
from limelight.masks.base import Mask, all_keys, all_queries
from limelight.terms import broadcast_strides, check_dtype
from limelight.tile import Size, Tile, TileState, on_host


@dataclass(frozen=True)
class BlockSparse(Mask):
    """Key j is visible to query i where block_mask is True at [b, h, i // q_block, j // kv_block].

    block_mask: bool [batch or 1, q_heads or 1, q_blocks, kv_blocks], of which the first one or two
        dimensions may be left out; as many blocks as cover the queries and the keys.
    q_block, kv_block: queries and keys of a block. Multiples of 64 are fastest: tiles of the fused
        kernels then lie within one block and need no mask.

    FlexAttention's `BlockMask` has the same blocks, in another form: its `to_dense()` is this one's
    block_mask, and what its `mask_mod` hides within them takes a further mask, joined by `&`.

    Raises ValueError for a block of no queries or keys.
    """

    block_mask: Any
    q_block: int = 128
    kv_block: int = 128

    tensor_fields: ClassVar[tuple[str, ...]] = ("block_mask",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (4,)
    shares_batch: ClassVar[bool] = True
    plain_fields: ClassVar[tuple[str, ...]] = ("q_block", "kv_block")

    def __post_init__(self) -> None:
        for name, size in (("q_block", self.q_block), ("kv_block", self.kv_block)):
            if not is_integer(size) or size < 1:
                raise invalid(f"BlockSparse {name}", found=size, needed="1 or more")

    def check(self, size: Size) -> None:
        check_dtype("mask BlockSparse block_mask", self.block_mask, "bool")
        blocks = (-(-size.q_len // self.q_block), -(-size.kv_len // self.kv_block))
        full = (size.batch, size.q_heads, *blocks)
        shape = tuple(self.block_mask.shape)
        lead = zip(reversed(shape[:-2]), (size.q_heads, size.batch), strict=False)
        if (
            not 2 <= len(shape) <= 4
            or shape[-2:] != blocks
            or any(found not in (1, count) for found, count in lead)
        ):
            raise invalid(
                "mask BlockSparse block_mask",
                found=f"shape {shape}",
                needed=f"(batch or 1, q_heads or 1, q_blocks, kv_blocks) of {full}",
            )

    def values(self, at: Tile, xp: Any) -> Any:
        rows = xp.reshape(at.row, (-1,)) // self.q_block
        keys = xp.reshape(at.k_pos, (-1,)) // self.kv_block
        return xp.take(xp.take(self._of_heads(at), rows, axis=2), keys, axis=3)

    def tile_state(self, at: Tile) -> TileState:
        if not on_host(self.block_mask):
            return TileState.PARTIAL
        rows = slice(at.rows.start // self.q_block, -(-at.rows.stop // self.q_block))
        keys = slice(at.keys.start // self.kv_block, -(-at.keys.stop // self.kv_block))
        blocks = self._of_heads(at)[:, :, rows, keys]
        if blocks.all():
            return TileState.FULL
        return TileState.PARTIAL if blocks.any() else TileState.EMPTY

    def _of_heads(self, at: Tile) -> Any:
        """[B or 1, H or 1, q_blocks, kv_blocks]"""
        blocks = self.block_mask[(None,) * (4 - len(self.block_mask.shape))]
        batches = slice(None) if blocks.shape[0] == 1 else at.batches
        heads = slice(None) if blocks.shape[1] == 1 else at.heads
        return blocks[batches, heads]

    def on_device(self) -> NamedTuple:
        return _OnDevice(
            _fragment,
            all_keys,
            all_queries,
            _states,
            _states,
            self.block_mask,
            *broadcast_strides(self.block_mask),
            Fixed(self.q_block),
            Fixed(self.kv_block),
        )


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    key_states: Any
    query_states: Any
    blocks: Any
    batch_stride: int
    head_stride: int
    row_stride: int
    key_stride: int
    q_block: Fixed
    kv_block: Fixed


@jit
def _fragment(scores, at, own):
    row = at.q_pos - at.query_start
    block_row, block_key = row // own.q_block, at.k_pos // own.kv_block
    inside = (row < at.q_len) & (at.k_pos < at.kv_len)
    if own.q_block % row.numel == 0 and own.kv_block % at.k_pos.numel == 0:
        # The tile lies in one block: one look, which needs no registers for places.
        block_row, block_key = _greatest(block_row), _greatest(block_key)
        inside = block_row >= 0
    visible = _visible(block_row, block_key, inside, at, own)
    return tl.where(visible, scores, float("-inf"))


@jit
def _states(q_start, k_start, matrix, own, ROWS, KEYS):
    row = q_start - matrix.query_start
    stop_row = tl.minimum(row + ROWS, matrix.q_len)
    stop_key = tl.minimum(k_start + KEYS, matrix.kv_len)
    any_visible, any_hidden = row + k_start < 0, row + k_start < 0
    # Tiles start at multiples of their size: one look where they lie within blocks.
    for i in tl.static_range(1 if own.q_block % ROWS == 0 else (ROWS - 1) // own.q_block + 2):
        for j in tl.static_range(1 if own.kv_block % KEYS == 0 else (KEYS - 1) // own.kv_block + 2):
            block_row, block_key = row // own.q_block + i, k_start // own.kv_block + j
            inside = (block_row * own.q_block < stop_row) & (block_key * own.kv_block < stop_key)
            visible = _visible(block_row, block_key, inside, matrix, own)
            any_visible = any_visible | visible
            any_hidden = any_hidden | (inside & (visible == 0))
    return tl.where(any_visible, tl.where(any_hidden, 1, 2), 0)


@jit
def _visible(block_row, block_key, inside, matrix, own):
    blocks = own.blocks + matrix.batch * own.batch_stride + matrix.head * own.head_stride
    places = blocks + block_row * own.row_stride + block_key * own.key_stride
    return tl.load(places, mask=inside, other=0) != 0


@jit
def _greatest(tile):
    return tl.max(tl.max(tile, 1), 0)
