"""T5's relative positions, in buckets that widen with distance (Raffel et al., arXiv:1910.10683).

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(T5Bias(numpy.arange(8.0)[:, None], max_distance=4), 4, 4))
0.0 5.0 6.0 7.0
1.0 0.0 5.0 6.0
2.0 1.0 0.0 5.0
3.0 2.0 1.0 0.0
"""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.table import TableBias
from limelight.errors import invalid, is_integer
from limelight.tile import Size


@dataclass(frozen=True)
class T5Bias(TableBias):
    """Adds `table[bucket(j - p), h]` for the query at position p and key j.

    The nearest distances have a bucket each; further ones share buckets that widen up to
    `max_distance`, from where on there is one.

    table: [buckets, q_heads] floating point, differentiable: the weight of a T5 model's
        `relative_attention_bias`.
    bidirectional: half of the buckets are for the keys before a query, half for those after it, as
        in T5's encoder; otherwise all keys after it have the bucket of distance 0, as in its
        decoder.
    max_distance: from where on all keys share the last bucket.

    Raises ValueError for fewer than two buckets of each direction, and for a `max_distance` that
    the nearest buckets reach.
    """

    table: Any
    bidirectional: bool = True
    max_distance: int = 128

    plain_fields: ClassVar[tuple[str, ...]] = ("bidirectional", "max_distance")
    heads_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.bidirectional, bool):
            found = repr(self.bidirectional)
            raise invalid("T5Bias bidirectional", found=found, needed="True or False")
        if not is_integer(self.max_distance) or self.max_distance < 1:
            raise invalid("T5Bias max_distance", found=self.max_distance, needed="1 or more tokens")

    def check(self, size: Size) -> None:
        super().check(size)
        if self._one_way < 2:
            least = 4 if self.bidirectional else 2
            raise invalid(
                "bias T5Bias table",
                found=f"{self.table.shape[0]} buckets",
                needed=f"{least} or more, as bidirectional is {self.bidirectional}",
            )
        if self.max_distance <= self._one_way // 2:
            raise invalid(
                "bias T5Bias max_distance",
                found=self.max_distance,
                needed=f"more than {self._one_way // 2}, the distances with a bucket of their own",
            )

    def entry(self, offset: Any, xp: Any) -> Any:
        behind = xp.clip(-offset, 0, None)
        if self.bidirectional:
            behind = xp.abs(offset)
        bucket = xp.clip(behind, 0, self._one_way // 2)
        for distance in self._steps:
            bucket = bucket + xp.astype(behind >= distance, xp.int64)
        if self.bidirectional:
            bucket = bucket + xp.where(offset > 0, self._one_way, 0)
        return bucket

    def rule(self) -> NamedTuple:
        after = self._one_way if self.bidirectional else 0
        return _Rule(_entry, self._one_way // 2, after, self._steps)

    @property
    def _one_way(self) -> int:
        """The buckets of one direction."""
        return self.table.shape[0] // (2 if self.bidirectional else 1)

    @property
    def _steps(self) -> tuple[int, ...]:
        return _widening(self._one_way, int(self.max_distance))


class _Rule(NamedTuple):
    entry: Any
    exact: int  # distances with a bucket of their own
    after: int  # the first bucket of keys after the query; 0 where they have none
    steps: tuple[int, ...]


@jit
def _entry(offset, rule):
    distance = tl.where(rule.after > 0, tl.abs(offset), tl.maximum(-offset, 0))
    bucket = tl.minimum(distance, rule.exact)
    for i in tl.static_range(len(rule.steps)):
        bucket += (distance >= rule.steps[i]).to(tl.int32)
    return bucket + tl.where(offset > 0, rule.after, 0)


@lru_cache(maxsize=64)
def _widening(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The distances at which each wider bucket begins, but for the first.

    T5 rounds a logarithm down, in float32; on a border its rounding decides. So the borders are
    found by that very formula, once, and are whole numbers from there on.
    """
    exact = buckets // 2
    span = _float32(math.log(max_distance / exact))

    def bucket(distance: int) -> int:
        logarithm = _float32(math.log(_float32(distance / exact)))
        return exact + int(_float32(_float32(logarithm / span) * (buckets - exact)))

    steps = []
    for wanted in range(exact + 1, buckets):
        low, high = exact, 2 * max_distance
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if bucket(middle) >= wanted else (middle + 1, high)
        steps.append(low)
    return tuple(steps)


def _float32(number: float) -> float:
    return c_float(number).value
