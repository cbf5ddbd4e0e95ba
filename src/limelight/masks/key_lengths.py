"""Padding at the end of the keys: each batch element has a number of real ones.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(KeyLengths(numpy.array([3])), 4, 4))
1 1 1 0
1 1 1 0
1 1 1 0
1 1 1 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.errors import invalid
from limelight.masks.base import Mask
from limelight.terms import check_dtype
from limelight.tile import Size, Tile, TileState, on_host


@dataclass(frozen=True)
class KeyLengths(Mask):
    """Key j of batch element b is visible where `j < lengths[b]`.

    lengths: [batch] integers (tensor, array or list). Values outside [0, kv_len] mean the nearer
    end of that range; they are never read back from a device to be checked.
    """

    lengths: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("lengths",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (1,)
    gaps: ClassVar[bool] = False

    def check(self, size: Size) -> None:
        check_dtype("mask KeyLengths lengths", self.lengths, "int")
        if tuple(self.lengths.shape) != (size.batch,):
            raise invalid(
                "mask KeyLengths lengths",
                found=f"shape {tuple(self.lengths.shape)}",
                needed=f"one length per batch element, shape ({size.batch},)",
            )

    def key_lengths(self) -> tuple[Any, ...]:
        return (self.lengths,)

    def values(self, at: Tile, xp: Any) -> Any:
        return at.k_pos < self.lengths[at.batches][:, None, None, None]

    def tile_state(self, at: Tile) -> TileState:
        if not on_host(self.lengths):
            return TileState.PARTIAL
        lengths = self.lengths[at.batches].tolist()
        if at.k_start >= max(lengths):
            return TileState.EMPTY
        return TileState.FULL if at.k_stop <= min(lengths) else TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        return _OnDevice(_fragment, _key_range, _query_range, self.lengths, self.lengths.strides[0])


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    lengths: Any
    stride: int


@jit
def _fragment(scores, at, own):
    return tl.where(at.k_pos < _length(at, own), scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    length = _length(matrix, own)
    return 0, 0, length, length


@jit
def _query_range(k_start, k_stop, matrix, own):
    length = _length(matrix, own)
    start, stop = matrix.query_start, matrix.query_start + matrix.q_len
    full_stop = tl.where(k_stop <= length, stop, start)
    return start, start, full_stop, tl.where(k_start < length, stop, start)


@jit
def _length(matrix, own):
    length = tl.load(own.lengths + matrix.batch * own.stride).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), matrix.kv_len).to(tl.int32)
