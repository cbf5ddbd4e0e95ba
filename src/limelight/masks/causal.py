"""Causal attention: a query sees the keys at its own position and before.

>>> from limelight.picture import matrix
>>> print(matrix(Causal(), 4, 4))
1 0 0 0
1 1 0 0
1 1 1 0
1 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.masks.base import Mask
from limelight.tile import Tile, TileState


@dataclass(frozen=True)
class Causal(Mask):
    """Key j is visible to the query at position p where `j <= p`.

    With unequal lengths, `query_start` says where the queries stand: 0 aligns the first query with
    the first key (top-left), "end" the last with the last (bottom-right, decoding with a cache).
    """

    ordered: ClassVar[bool] = True
    gaps: ClassVar[bool] = False

    def values(self, at: Tile, xp: Any) -> Any:
        return at.k_pos <= at.q_pos

    def tile_state(self, at: Tile) -> TileState:
        if at.q_start is None or at.q_stop is None:
            return TileState.PARTIAL
        if at.k_start > at.q_stop - 1:
            return TileState.EMPTY
        return TileState.FULL if at.k_stop - 1 <= at.q_start else TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        return _OnDevice(_fragment, _key_range, _query_range)


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any


@jit
def _fragment(scores, at, own):
    return tl.where(at.k_pos <= at.q_pos, scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    return 0, 0, q_start + 1, q_stop


@jit
def _query_range(k_start, k_stop, matrix, own):
    stop = matrix.query_start + matrix.q_len
    return k_start, k_stop - 1, stop, stop
