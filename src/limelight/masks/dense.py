"""Any mask, given as a tensor of booleans.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(DenseMask(numpy.eye(4, dtype=bool)), 4, 4))
1 0 0 0
0 1 0 0
0 0 1 0
0 0 0 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.masks.base import Mask, all_keys, all_queries
from limelight.terms import broadcast_strides, check_broadcastable, check_dtype
from limelight.tile import Size, Tile


@dataclass(frozen=True)
class DenseMask(Mask):
    """Key j is visible to query i where the tensor is True at [b, h, i, j].

    tensor: bool, two to four dimensions that broadcast to (batch, q_heads, q_len, kv_len); a
    dimension of size 1 costs no memory: `(batch, 1, 1, kv_len)` is padding of any shape.
    """

    tensor: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("tensor",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (4,)
    shares_batch: ClassVar[bool] = True

    def check(self, size: Size) -> None:
        check_dtype("mask DenseMask tensor", self.tensor, "bool")
        check_broadcastable("mask DenseMask tensor", self.tensor.shape, size)

    def values(self, at: Tile, xp: Any) -> Any:
        return at.take(self.tensor)

    def on_device(self) -> NamedTuple:
        strides = broadcast_strides(self.tensor)
        differ = int(strides[2] != 0)
        return _OnDevice(_fragment, all_keys, all_queries, self.tensor, *strides, differ)


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    tensor: Any
    batch_stride: int
    head_stride: int
    row_stride: int
    key_stride: int
    ROWS_DIFFER: int  # 0 where all queries share a row, as in padding


@jit
def _fragment(scores, at, own):
    matrix = own.tensor + at.batch * own.batch_stride + at.head * own.head_stride
    places = matrix + at.k_pos * own.key_stride
    inside = at.k_pos < at.kv_len
    if own.ROWS_DIFFER:
        row = at.q_pos - at.query_start
        places += row * own.row_stride
        inside &= row < at.q_len
    visible = tl.load(places, mask=inside, other=0)
    return tl.where(visible != 0, scores, float("-inf"))
