"""A learned number for each relative position, clipped (Shaw et al., arXiv:1803.02155).

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(RelativeBias(numpy.array([[1.0, 2.0, 3.0, 4.0, 5.0]])), 4, 4))
3.0 4.0 5.0 5.0
2.0 3.0 4.0 5.0
1.0 2.0 3.0 4.0
1.0 1.0 2.0 3.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.table import TableBias
from limelight.errors import invalid, is_integer
from limelight.terms import check_offset
from limelight.tile import Size


@dataclass(frozen=True)
class RelativeBias(TableBias):
    """Adds `table[h, clip(j - p - first, 0, n - 1)]` for the query at position p and key j.

    table: [q_heads or 1, n] floating point, differentiable.
    first: the offset j - p of the first entry; by default the middle entry is that of offset 0, for
        which n has to be odd.

    Raises ValueError for a table without a middle, unless `first` is given.
    """

    table: Any
    first: int | None = None

    plain_fields: ClassVar[tuple[str, ...]] = ("first",)

    def __post_init__(self) -> None:
        if self.first is not None and not is_integer(self.first):
            raise invalid("RelativeBias first", found=self.first, needed="an integer, or None")
        check_offset("RelativeBias first", self.first)

    def check(self, size: Size) -> None:
        super().check(size)
        entries = self.table.shape[1]
        if self.first is None and entries % 2 == 0:
            raise invalid(
                "bias RelativeBias table",
                found=f"{entries} entries",
                needed="an odd number of entries, or the offset of the first one as `first`",
            )

    def entry(self, offset: Any, xp: Any) -> Any:
        return xp.clip(offset - self._first, 0, self.table.shape[1] - 1)

    def rule(self) -> NamedTuple:
        return _Rule(_entry, self._first, self.table.shape[1] - 1)

    @property
    def _first(self) -> int:
        return -(self.table.shape[1] // 2) if self.first is None else int(self.first)


class _Rule(NamedTuple):
    entry: Any
    first: int
    last: int


@jit
def _entry(offset, rule):
    return tl.minimum(tl.maximum(offset - rule.first, 0), rule.last)
