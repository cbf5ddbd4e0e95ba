"""A learned number for each relative place in a window of an image (Swin, arXiv:2103.14030).

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(RelativeBias2D(numpy.arange(9.0)[:, None], 2, 2), 4, 4))
4.0 3.0 1.0 0.0
5.0 4.0 2.0 1.0
7.0 6.0 4.0 3.0
8.0 7.0 5.0 4.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import GradientKind
from limelight.biases.table import TableBias
from limelight.errors import invalid, is_integer
from limelight.tile import Size, Tile


@dataclass(frozen=True)
class RelativeBias2D(TableBias):
    """Adds `table[(yq - yk + H - 1) * (2W - 1) + xq - xk + W - 1, h]` in a window of H rows of W.

    Key j lies at row j // W and column j % W; so does the query at position p, which gets no bias
    where p is outside the window.

    table: [(2H - 1)(2W - 1), q_heads] floating point, differentiable: the weight of a Swin model's
        `relative_position_bias_table`.
    height, width: H and W; keys are H * W.

    The gradient takes memory for a few matrices of scores, of all heads and one batch element:
    it is meant for windows, which are small and many.
    """

    table: Any
    height: int
    width: int

    plain_fields: ClassVar[tuple[str, ...]] = ("height", "width")
    heads_last: ClassVar[bool] = True
    gradient: ClassVar[GradientKind | None] = "pair"

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            found = getattr(self, name)
            if not is_integer(found) or found < 1:
                raise invalid(f"RelativeBias2D {name}", found=found, needed="1 or more")

    def check(self, size: Size) -> None:
        super().check(size)
        entries = (2 * self.height - 1) * (2 * self.width - 1)
        window = f"a window of {self.height} x {self.width}"
        if self.table.shape[0] != entries:
            raise invalid(
                "bias RelativeBias2D table",
                found=f"{self.table.shape[0]} entries",
                needed=f"{entries}, (2 height - 1)(2 width - 1), for {window}",
            )
        if size.kv_len != self.height * self.width:
            raise invalid(
                "bias RelativeBias2D",
                found=f"{size.kv_len} keys",
                needed=f"{self.height * self.width}, for {window}",
            )

    def entries(self, at: Tile, xp: Any) -> Any:
        last = self.height * self.width - 1
        middle = (2 * self.height - 1) * (2 * self.width - 1) // 2
        return middle + self._place(xp.clip(at.q_pos, 0, last)) - self._place(at.k_pos)

    def _place(self, position: Any) -> Any:
        """Two positions' places differ by that of their entry and the middle one."""
        return position + position // self.width * (self.width - 1)

    def values(self, at: Tile, xp: Any) -> Any:
        values = super().values(at, xp)
        return xp.where(self._inside(at), values, xp.zeros_like(values))

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        d_scores = xp.where(self._inside(at), d_scores, xp.zeros_like(d_scores))
        super().fold(d_scores, at, xp, gradients)

    def _inside(self, at: Tile) -> Any:
        return (at.q_pos >= 0) & (at.q_pos < self.height * self.width)

    def on_device(self) -> NamedTuple:
        return _OnDevice(
            _fragment, _entry, self.table, *self.device_strides(),
            self.width, self.height * self.width, (2 * self.height - 1) * (2 * self.width - 1) // 2,
        )  # fmt: skip


class _OnDevice(NamedTuple):
    fragment: Any
    entry: Any
    table: Any
    head_stride: int
    entry_stride: int
    width: int
    positions: int
    middle: int


@jit
def _fragment(scores, at, own):
    entry = _entry(at.q_pos, at.k_pos, own)
    places = own.table + at.head * own.head_stride + entry * own.entry_stride
    bias = tl.load(places, mask=entry >= 0, other=0.0)
    return scores + bias.to(tl.float32) * at.unit


@jit
def _entry(q_pos, k_pos, own):
    """The entry of a query and a key; negative outside the window."""
    q_place = q_pos + q_pos // own.width * (own.width - 1)
    k_place = k_pos + k_pos // own.width * (own.width - 1)
    inside = (q_pos >= 0) & (q_pos < own.positions) & (k_pos < own.positions)
    return tl.where(inside, own.middle + q_place - k_place, -1)
