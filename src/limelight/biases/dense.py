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
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import Bias, GradientKind
from limelight.terms import broadcast_strides, check_broadcastable, check_dtype
from limelight.tile import Size, Tile


@dataclass(frozen=True)
class DenseBias(Bias):
    """Adds `tensor[b, h, i, j]` for query i and key j; -inf hides the key.

    tensor: floating point, differentiable, two to four dimensions that broadcast to (batch,
    q_heads, q_len, kv_len); the gradient of a dimension of size 1 is summed over it.
    """

    tensor: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("tensor",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (4,)
    shares_batch: ClassVar[bool] = True
    may_hide: ClassVar[bool] = True
    upright: ClassVar[bool] = True
    gradient: ClassVar[GradientKind | None] = "dense"

    def check(self, size: Size) -> None:
        check_dtype("bias DenseBias tensor", self.tensor, "float")
        check_broadcastable("bias DenseBias tensor", self.tensor.shape, size)

    def values(self, at: Tile, xp: Any) -> Any:
        return at.take(self.tensor)

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        (gradient,) = gradients
        shape = (*([1] * (4 - len(gradient.shape))), *gradient.shape)
        broadcast = tuple(axis for axis in range(4) if shape[axis] == 1)
        if broadcast:
            d_scores = xp.sum(d_scores, axis=broadcast, keepdims=True)
        part = xp.reshape(d_scores, d_scores.shape[4 - len(gradient.shape) :])
        gradient[at.window(gradient.shape)] += part

    def on_device(self) -> NamedTuple:
        return _OnDevice(_fragment, self.tensor, *broadcast_strides(self.tensor))


class _OnDevice(NamedTuple):
    fragment: Any
    tensor: Any
    batch_stride: int
    head_stride: int
    row_stride: int
    key_stride: int


@jit
def _fragment(scores, at, own):
    row = at.q_pos - at.query_start
    matrix = own.tensor + at.batch * own.batch_stride + at.head * own.head_stride
    places = matrix + row * own.row_stride + at.k_pos * own.key_stride
    inside = (row < at.q_len) & (at.k_pos < at.kv_len)
    bias = tl.load(places, mask=inside, other=0.0).to(tl.float32) * at.unit
    total = scores + bias
    if at.guarded:  # the score of a hidden key may be NaN
        total = tl.where(bias == float("-inf"), bias, total)
    return total
