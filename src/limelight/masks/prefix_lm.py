"""A prefix that every query sees, and causal attention after it (T5, arXiv:1910.10683, figure 3).

>>> from limelight.picture import matrix
>>> print(matrix(PrefixLM(2), 4, 4))
1 1 0 0
1 1 0 0
1 1 1 0
1 1 1 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.errors import invalid, is_integer
from limelight.masks.base import Mask
from limelight.terms import check_dtype
from limelight.tile import Size, Tile, TileState, on_host


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Key j is visible to the query at position p where `j <= p` or `j < prefix_lengths[b]`.

    prefix_lengths: tokens that every query sees, an integer or [batch] integers (tensor, array or
        list). Values outside [0, kv_len] mean the nearer end of that range; those on a device are
        never read back to be checked.
    prefix_length: where the one integer is kept.

    Raises ValueError for a negative integer.
    """

    prefix_lengths: Any = None
    prefix_length: int | None = None

    ordered: ClassVar[bool] = True
    gaps: ClassVar[bool] = False
    tensor_fields: ClassVar[tuple[str, ...]] = ("prefix_lengths",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (1,)
    plain_fields: ClassVar[tuple[str, ...]] = ("prefix_length",)

    def __post_init__(self) -> None:
        if is_integer(self.prefix_lengths) and self.prefix_length is None:
            object.__setattr__(self, "prefix_length", self.prefix_lengths)
            object.__setattr__(self, "prefix_lengths", None)
        length = self.prefix_length
        if (length is None) == (self.prefix_lengths is None):
            found = "none" if length is None else "one for all and one per batch element"
            needed = "an integer, or one per batch element"
            raise invalid("PrefixLM prefix_lengths", found=found, needed=needed)
        if length is not None and (not is_integer(length) or length < 0):
            raise invalid("PrefixLM prefix_lengths", found=length, needed="tokens (0 or more)")
        if length is not None and not isinstance(length, int):  # NumPy's
            object.__setattr__(self, "prefix_length", int(length))

    def check(self, size: Size) -> None:
        if self.prefix_lengths is None:
            return
        check_dtype("mask PrefixLM prefix_lengths", self.prefix_lengths, "int")
        if tuple(self.prefix_lengths.shape) != (size.batch,):
            raise invalid(
                "mask PrefixLM prefix_lengths",
                found=f"shape {tuple(self.prefix_lengths.shape)}",
                needed=f"an integer, or one per batch element, shape ({size.batch},)",
            )

    def values(self, at: Tile, xp: Any) -> Any:
        length = self.prefix_length
        if self.prefix_lengths is not None:
            length = self.prefix_lengths[at.batches][:, None, None, None]
        return (at.k_pos <= at.q_pos) | (at.k_pos < length)

    def tile_state(self, at: Tile) -> TileState:
        shortest, longest = self._shortest_and_longest(at)
        q_start = at.k_start - 1 if at.q_start is None else at.q_start
        q_stop = at.k_stop if at.q_stop is None else at.q_stop
        if at.k_start > q_stop - 1 and at.k_start >= longest:
            return TileState.EMPTY
        full = at.k_stop - 1 <= q_start or at.k_stop <= shortest
        return TileState.FULL if full else TileState.PARTIAL

    def _shortest_and_longest(self, at: Tile) -> tuple[float, float]:
        """Of the prefixes of the tile's batch elements; the widest bounds where not on the host."""
        if self.prefix_length is not None:
            return self.prefix_length, self.prefix_length
        if not on_host(self.prefix_lengths):
            return 0, float("inf")
        lengths = self.prefix_lengths[at.batches].tolist()
        return min(lengths), max(lengths)

    def on_device(self) -> NamedTuple:
        functions = (_fragment, _key_range, _query_range)
        if self.prefix_lengths is None:
            return _OnDevice(*functions, min(int(self.prefix_length or 0), _LONGEST), 0, False)
        return _OnDevice(*functions, self.prefix_lengths, self.prefix_lengths.strides[0], True)


_LONGEST = 2**30  # beyond any tensor's length


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    lengths: Any  # one number, or the pointer to one per batch element
    stride: int
    per_batch: bool


@jit
def _fragment(scores, at, own):
    visible = (at.k_pos <= at.q_pos) | (at.k_pos < _length(at, own))
    return tl.where(visible, scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    length = _length(matrix, own)
    return 0, 0, tl.maximum(length, q_start + 1), tl.maximum(length, q_stop)


@jit
def _query_range(k_start, k_stop, matrix, own):
    length = _length(matrix, own)
    first, stop = matrix.query_start, matrix.query_start + matrix.q_len
    start = tl.where(k_start < length, first, k_start)
    full_start = tl.where(k_stop <= length, first, k_stop - 1)
    return start, full_start, stop, stop


@jit
def _length(matrix, own):
    length = own.lengths
    if own.per_batch:
        length = tl.load(own.lengths + matrix.batch * own.stride)
    length = tl.minimum(tl.maximum(tl.cast(length, tl.int64), 0), matrix.kv_len)
    return length.to(tl.int32)
