"""Local attention: a query sees the keys near its own position (Longformer, arXiv:2004.05150).

>>> from limelight.picture import matrix
>>> print(matrix(SlidingWindow(1), 4, 4))
1 1 0 0
1 1 1 0
0 1 1 1
0 0 1 1
>>> print(matrix(SlidingWindow(1, 0), 4, 4))
1 0 0 0
1 1 0 0
0 1 1 0
0 0 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from limelight._jit import jit, tl
from limelight.errors import invalid, is_integer
from limelight.masks.base import Mask
from limelight.tile import Tile, TileState


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Key j is visible to the query at position p where `p - left <= j <= p + right`.

    left: tokens seen before the query's own position; None is no limit.
    right: tokens seen after it; None is no limit; the same as `left` when not given.

    FlashAttention's `window_size=(left, right)` counts the same way. A model whose configuration
    says `sliding_window=w` (w keys, the query's own included) is `Causal() & SlidingWindow(w - 1)`.

    Raises ValueError for a negative width.
    """

    left: int | None
    right: int | Literal["left"] | None = "left"

    ordered: ClassVar[bool] = True
    gaps: ClassVar[bool] = False
    plain_fields: ClassVar[tuple[str, ...]] = ("left", "right")

    def __post_init__(self) -> None:
        if self.right == "left":
            object.__setattr__(self, "right", self.left)
        for name, width in (("left", self.left), ("right", self.right)):
            if width is None:
                continue
            if not is_integer(width) or width < 0:
                raise invalid(
                    f"SlidingWindow {name}", found=width, needed="tokens (0 or more), or None"
                )
            if not isinstance(width, int):  # NumPy's may be unsigned, and wrap when negated
                object.__setattr__(self, name, int(width))

    def values(self, at: Tile, xp: Any) -> Any:
        offset = at.k_pos - at.q_pos
        if self.left is None and self.right is None:
            return offset == offset
        if self.left is None:
            return offset <= self.right
        if self.right is None:
            return offset >= -self.left
        return (offset >= -self.left) & (offset <= self.right)

    def tile_state(self, at: Tile) -> TileState:
        if at.q_start is None or at.q_stop is None:
            return TileState.PARTIAL
        least = at.k_start - (at.q_stop - 1)
        greatest = (at.k_stop - 1) - at.q_start
        left = float("inf") if self.left is None else self.left
        right = float("inf") if self.right is None else float(self.right)
        if greatest < -left or least > right:
            return TileState.EMPTY
        return TileState.FULL if -left <= least and greatest <= right else TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        left = _NO_LIMIT if self.left is None else min(self.left, _NO_LIMIT)
        right = _NO_LIMIT if self.right is None else min(int(self.right), _NO_LIMIT)
        return _OnDevice(_fragment, _key_range, _query_range, left, right)


_NO_LIMIT = 2**30  # beyond any tensor's length, and far enough from the end of int32


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    left: int
    right: int


@jit
def _fragment(scores, at, own):
    offset = at.k_pos - at.q_pos
    return tl.where((offset >= -own.left) & (offset <= own.right), scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    full_start, full_stop = q_stop - 1 - own.left, q_start + own.right + 1
    return q_start - own.left, full_start, full_stop, q_stop + own.right


@jit
def _query_range(k_start, k_stop, matrix, own):
    full_start, full_stop = k_stop - 1 - own.right, k_start + own.left + 1
    return k_start - own.right, full_start, full_stop, k_stop + own.left
