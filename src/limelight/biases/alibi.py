"""ALiBi: a penalty that grows with distance (Press et al., arXiv:2108.12409, section 3).

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(ALiBi(numpy.array([0.5])), 4, 4))
 0.0 -0.5 -1.0 -1.5
-0.5  0.0 -0.5 -1.0
-1.0 -0.5  0.0 -0.5
-1.5 -1.0 -0.5  0.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import Bias, GradientKind
from limelight.errors import invalid
from limelight.terms import check_dtype
from limelight.tile import Size, Tile

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ALiBi(Bias):
    """Adds `-slopes[h] * |p - j|` for the query at position p and key j.

    slopes: [q_heads] or [batch, q_heads] floating point, differentiable; None is the paper's
    (`ALiBi.paper_slopes`). Under a causal mask this equals the paper's `slopes[h] * (j - p)`.
    """

    slopes: Any = None

    tensor_fields: ClassVar[tuple[str, ...]] = ("slopes",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (2,)
    gradient: ClassVar[GradientKind | None] = "head"

    @staticmethod
    def paper_slopes(heads: int) -> tuple[float, ...]:
        """The paper's slopes: 2**(-8 i / n) for n a power of two.

        Other head counts take those of the next lower power of two, then every other slope of the
        next higher one, as the authors' code does.

        >>> ALiBi.paper_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
        >>> ALiBi.paper_slopes(3)
        (0.0625, 0.00390625, 0.25)
        """
        if heads < 1:
            raise invalid("heads", found=heads, needed="at least 1")
        lower = 2 ** int(math.log2(heads))
        slopes = _geometric(lower)
        return (*slopes, *_geometric(2 * lower)[::2][: heads - lower])

    def check(self, size: Size) -> None:
        if self.slopes is None:
            return
        check_dtype("bias ALiBi slopes", self.slopes, "float")
        if tuple(self.slopes.shape) not in ((size.q_heads,), (size.batch, size.q_heads)):
            raise invalid(
                "bias ALiBi slopes",
                found=f"shape {tuple(self.slopes.shape)}",
                needed=f"one slope per query head, shape ({size.q_heads},) "
                f"or ({size.batch}, {size.q_heads})",
            )

    def resolved(self, q_heads: int, asarray: Callable[[Sequence[float]], Any]) -> Self:
        if self.slopes is not None:
            return self
        return type(self)(asarray(self.paper_slopes(q_heads)))

    def values(self, at: Tile, xp: Any) -> Any:
        slopes = self.slopes[None] if len(self.slopes.shape) == 1 else self.slopes[at.batches]
        slopes = slopes[:, at.heads, None, None]
        return xp.astype(-xp.abs(at.q_pos - at.k_pos), at.dtype) * xp.astype(slopes, at.dtype)

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        distance = xp.astype(-xp.abs(at.q_pos - at.k_pos), at.dtype)
        d_slopes = xp.sum(d_scores * distance, axis=(2, 3))  # [B, H]
        (gradient,) = gradients
        if len(gradient.shape) == 1:
            gradient[at.heads] += xp.sum(d_slopes, axis=0)
        else:
            gradient[at.batches, at.heads] += d_slopes

    def on_device(self) -> NamedTuple:
        batch_stride = self.slopes.strides[0] if len(self.slopes.shape) == 2 else 0
        return _OnDevice(_fragment, _slope, self.slopes, batch_stride, self.slopes.strides[-1])


class _OnDevice(NamedTuple):
    fragment: Any
    slope: Any
    slopes: Any
    batch_stride: int
    head_stride: int


@jit
def _fragment(scores, at, own):
    slope = tl.load(own.slopes + at.batch * own.batch_stride + at.head * own.head_stride)
    slope = slope.to(tl.float32) * at.unit
    if at.side == 0:
        bias = slope * _slope(at, own)
    else:  # the distance splits in two, which leaves one operation for each score
        slope = -slope * at.side.to(tl.float32)
        bias = slope * at.k_near - slope * at.q_near
    return scores + bias


@jit
def _slope(at, own):
    """The derivative of the score with respect to the head's number."""
    return -tl.abs(at.q_near - at.k_near)


def _geometric(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * (i + 1) / count) for i in range(count))
