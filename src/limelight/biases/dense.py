"""Any bias, given as a tensor.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(DenseBias(numpy.arange(4.0).reshape(1, 4)), 4, 4))
0.0 1.0 2.0 3.0
0.0 1.0 2.0 3.0
0.0 1.0 2.0 3.0
0.0 1.0 2.0 3.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from limelight.biases.base import Bias
from limelight.terms import check_broadcastable, check_dtype
from limelight.tile import Size, Tile


@dataclass(frozen=True)
class DenseBias(Bias):
    """Adds `tensor[b, h, i, j]` for query i and key j; -inf hides the key.

    tensor: floating point, differentiable, two to four dimensions that broadcast to (batch,
    q_heads, q_len, kv_len); the gradient of a dimension of size 1 is summed over it.
    """

    tensor: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("tensor",)
    may_hide: ClassVar[bool] = True

    def check(self, size: Size) -> None:
        check_dtype("bias DenseBias tensor", self.tensor, "float")
        check_broadcastable("bias DenseBias tensor", self.tensor.shape, size)

    def values(self, at: Tile, xp: Any) -> Any:
        return at.take(self.tensor)

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        (gradient,) = gradients
        part = at.take(gradient)
        broadcast = tuple(axis for axis in range(4) if part.shape[axis] == 1)
        if broadcast:
            d_scores = xp.sum(d_scores, axis=broadcast, keepdims=True)
        part += d_scores
