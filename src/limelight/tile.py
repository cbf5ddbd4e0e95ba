"""Where a tile of scores lies: what `values` of a mask or bias is evaluated at.

Every index array broadcasts against the tile's scores `(batch, heads, rows, keys)`, so a mask or
bias is written once, elementwise, whatever the tile's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple


class Size(NamedTuple):
    """The sizes of a full matrix of scores, against which a term's tensors are checked."""

    batch: int
    q_heads: int
    q_len: int
    kv_len: int


def device_of(array: Any) -> Any:
    """Where an array lies, for another to be made there; None while JAX traces: where it runs."""
    return getattr(array, "device", None)


def on_host(array: Any) -> bool:
    """Whether reading this array's values is free: a device is never waited for."""
    device = device_of(array)
    # NumPy's arrays of before 2.0 have no device either.
    return str(device) == "cpu" if device is not None else hasattr(array, "__array_interface__")


class TileState(IntEnum):
    """What a mask does to a tile. EMPTY tiles are skipped, FULL ones never evaluate the mask."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of scores, for a range of batch elements and query heads.

    Index arrays (integers): `batch` [B, 1, 1, 1], `head` [1, H, 1, 1] (query heads), `row`
    [1, 1, M, 1] (index i of a query in its tensor), `q_pos` [B or 1, 1, M, 1] (`query_start + i`),
    `k_pos` [1, 1, 1, N]. `dtype` is that of the scores (float32 or float64): compute in it, as
    positions are too long for half precision. `rows` and `keys` are arrays of indices where only
    the device knows the first one.
    """

    batches: slice
    heads: slice
    rows: Any
    keys: Any
    dtype: Any
    batch: Any
    head: Any
    row: Any
    q_pos: Any
    k_pos: Any
    # The least first and the greatest last position of a query over the tile's batch elements;
    # None where they are on a device and would have to be waited for.
    q_start: int | None
    q_stop: int | None
    # For a bias that reads the query: the tile's queries [B, H, M, head_dim], in `dtype`, and the
    # scale of the scores.
    query: Any = None
    scale: float = 1.0

    @property
    def k_start(self) -> Any:
        return self.keys.start if isinstance(self.keys, slice) else self.keys[0]

    @property
    def k_stop(self) -> Any:
        return self.keys.stop if isinstance(self.keys, slice) else self.keys[-1] + 1

    @property
    def row_stop(self) -> Any:
        return self.rows.stop if isinstance(self.rows, slice) else self.rows[-1] + 1

    def take(self, tensor: Any) -> Any:
        """This tile's part of a tensor that broadcasts to (batch, q_heads, q_len, kv_len)."""
        tensor = tensor[(None,) * (4 - len(tensor.shape))]
        return tensor[self.window(tensor.shape)]

    def window(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """The index of that part, for a tensor of two to four dimensions as it is."""
        rows, keys = self.rows, self.keys
        if not isinstance(rows, slice) and shape[-1] != 1:
            rows = rows[:, None]  # two arrays of indices are taken together
        parts = (self.batches, self.heads, rows, keys)[4 - len(shape) :]
        return tuple(
            slice(None) if size == 1 else part for size, part in zip(shape, parts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """The index arrays of a whole problem, of which tiles are slices.

    `starts` is the position of each batch element's first query: one number for all, or a tuple
    with one per batch element, or None where they are on a device.
    """

    dtype: Any
    batch: Any
    head: Any
    row: Any
    q_pos: Any
    k_pos: Any
    starts: int | tuple[int, ...] | None
    query: Any
    scale: float

    @classmethod
    def of(
        cls,
        xp: Any,
        *,
        size: Size,
        dtype: Any,
        device: Any,
        query_start: Any,
        query: Any = None,
        scale: float = 1.0,
    ) -> Positions:
        """`query_start`: a number, or an integer array [batch]; `dtype`: that of the scores.

        query, scale: the call's, where a bias reads the query.
        """
        batch, heads, q_len, kv_len = size

        def indices(count: int, axis: int) -> Any:
            shape = [1, 1, 1, 1]
            shape[axis] = count
            return xp.reshape(xp.arange(count, dtype=xp.int64, device=device), tuple(shape))

        row = indices(q_len, 2)
        if isinstance(query_start, int):
            starts = query_start
        else:
            starts = tuple(query_start.tolist()) if on_host(query_start) else None
            query_start = xp.reshape(xp.astype(query_start, xp.int64), (batch, 1, 1, 1))
        return cls(
            dtype=dtype,
            batch=indices(batch, 0),
            head=indices(heads, 1),
            row=row,
            q_pos=row + query_start,
            k_pos=indices(kv_len, 3),
            starts=starts,
            query=query,
            scale=scale,
        )

    def tile(self, batches: slice, heads: slice, rows: Any, keys: Any) -> Tile:
        """The tile at these ranges; each slice has a start and a stop.

        rows and keys may also be arrays of indices, each one after another.
        """
        if self.starts is None or not isinstance(rows, slice):
            q_start = q_stop = None
        elif isinstance(self.starts, int):
            q_start, q_stop = self.starts + rows.start, self.starts + rows.stop
        else:
            starts = self.starts[batches]
            q_start, q_stop = (
                min(starts, default=0) + rows.start,
                max(starts, default=0) + rows.stop,
            )
        q_pos = self.q_pos if self.q_pos.shape[0] == 1 else self.q_pos[batches]
        return Tile(
            batches=batches,
            heads=heads,
            rows=rows,
            keys=keys,
            dtype=self.dtype,
            batch=self.batch[batches],
            head=self.head[:, heads],
            row=self.row[:, :, rows],
            q_pos=q_pos[:, :, rows],
            k_pos=self.k_pos[..., keys],
            q_start=q_start,
            q_stop=q_stop,
            query=None if self.query is None else self.query[batches, heads, rows],
            scale=self.scale,
        )

    def whole(self) -> Tile:
        """All the scores as one tile."""
        size = (self.batch.shape[0], self.head.shape[1], self.row.shape[2], self.k_pos.shape[3])
        return self.tile(*(slice(0, count) for count in size))
