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
from typing import Any, ClassVar

from limelight.masks.base import Mask
from limelight.terms import check_broadcastable, check_dtype
from limelight.tile import Size, Tile


@dataclass(frozen=True)
class DenseMask(Mask):
    """Key j is visible to query i where the tensor is True at [b, h, i, j].

    tensor: bool, two to four dimensions that broadcast to (batch, q_heads, q_len, kv_len); a
    dimension of size 1 costs no memory: `(batch, 1, 1, kv_len)` is padding of any shape.
    """

    tensor: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("tensor",)

    def check(self, size: Size) -> None:
        check_dtype("mask DenseMask tensor", self.tensor, "bool")
        check_broadcastable("mask DenseMask tensor", self.tensor.shape, size)

    def values(self, at: Tile, xp: Any) -> Any:
        return at.take(self.tensor)
