"""Packed sequences: several documents in one row, each seeing only itself.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(Documents(numpy.array([0, 0, 1, -1])), 4, 4))
1 1 0 0
1 1 0 0
0 0 1 0
0 0 0 0
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
class Documents(Mask):
    """Key j is visible to query i where both belong to the same document.

    ids: [kv_len] or [batch, kv_len] integers, the document of each key. A negative id is padding:
        it sees nothing and nothing sees it.
    query_ids: [q_len] or [batch, q_len], the document of each query; by default, that of the key at
        the query's position (`query_start + i`), which needs positions inside the keys.

    Ids need no order, but tiles are skipped best where each document's keys lie together.
    """

    ids: Any
    query_ids: Any = None

    tensor_fields: ClassVar[tuple[str, ...]] = ("ids", "query_ids")
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (2, 2)

    def check(self, size: Size) -> None:
        self._check_ids("ids", self.ids, size.batch, size.kv_len)
        if self.query_ids is not None:
            self._check_ids("query_ids", self.query_ids, size.batch, size.q_len)
        elif size.q_len > size.kv_len:
            raise invalid(
                "mask Documents query_ids",
                found="None",
                needed=f"the document of each query, as there are {size.q_len} queries "
                f"and only {size.kv_len} keys",
            )

    @staticmethod
    def _check_ids(name: str, ids: Any, batch: int, length: int) -> None:
        check_dtype(f"mask Documents {name}", ids, "int")
        if tuple(ids.shape) not in ((length,), (batch, length)):
            raise invalid(
                f"mask Documents {name}",
                found=f"shape {tuple(ids.shape)}",
                needed=f"shape ({length},) or ({batch}, {length})",
            )

    def values(self, at: Tile, xp: Any) -> Any:
        key_ids = _of_batches(self.ids, at)[:, None, None, at.keys]
        query_ids = self._query_ids(at, xp)
        return (key_ids == query_ids) & (key_ids >= 0)

    def _query_ids(self, at: Tile, xp: Any) -> Any:
        """[B or 1, 1, M, 1]"""
        if self.query_ids is not None:
            return _of_batches(self.query_ids, at)[:, None, at.rows, None]
        kv_len = self.ids.shape[-1]
        inside = (at.q_pos >= 0) & (at.q_pos < kv_len)
        position = xp.where(inside, at.q_pos, xp.zeros_like(at.q_pos))
        ids = self.ids[position] if len(self.ids.shape) == 1 else self.ids[at.batch, position]
        ids = xp.astype(ids, xp.int64)
        return xp.where(inside, ids, xp.full_like(ids, -1))

    def tile_state(self, at: Tile) -> TileState:
        if not on_host(self.ids) or at.q_start is None or at.q_stop is None:
            return TileState.PARTIAL
        keys = _of_batches(self.ids, at)[:, at.keys]
        if self.query_ids is not None:
            queries = _of_batches(self.query_ids, at)[:, at.rows]
        else:
            start, stop = max(at.q_start, 0), min(at.q_stop, self.ids.shape[-1])
            if start >= stop:
                return TileState.EMPTY
            if (start, stop) != (at.q_start, at.q_stop):
                return TileState.PARTIAL
            queries = _of_batches(self.ids, at)[:, start:stop]
        least = max(int(keys.min()), int(queries.min()))
        greatest = min(int(keys.max()), int(queries.max()))
        if least > greatest or greatest < 0:
            return TileState.EMPTY
        alike = min(int(keys.min()), int(queries.min())) == max(int(keys.max()), int(queries.max()))
        return TileState.FULL if alike else TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        queries, by_row = (self.ids, 0) if self.query_ids is None else (self.query_ids, 1)
        return _OnDevice(
            _fragment,
            _key_range,
            _query_range,
            self.ids,
            queries,
            _batch_stride(self.ids),
            self.ids.strides[-1],
            _batch_stride(queries),
            queries.strides[-1],
            queries.shape[-1],
            by_row,
        )


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    ids: Any
    query_ids: Any
    ids_batch_stride: int
    ids_stride: int
    query_ids_batch_stride: int
    query_ids_stride: int
    query_count: int
    by_row: int  # 1 where query_ids has one id per query, 0 where it is read at a query's position


@jit
def _fragment(scores, at, own):
    key_ids = _key_ids(at.k_pos, at, own)
    same = (key_ids == _query_ids(at.q_pos, at, own)) & (key_ids >= 0)
    return tl.where(same, scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    """From the first to the last key whose id lies between the queries' least and greatest."""
    least, greatest = tl.cast(2**62, tl.int64), tl.cast(-1, tl.int64)
    for first in tl.range(q_start, q_stop, 1024):
        q_pos = first + tl.arange(0, 1024)
        ids = _query_ids(q_pos, matrix, own)
        least = min(least, tl.min(tl.where(q_pos < q_stop, ids.to(tl.int64), 2**62)))
        greatest = max(greatest, tl.max(tl.where(q_pos < q_stop, ids.to(tl.int64), -1)))
    start, stop, count = matrix.kv_len, matrix.kv_len * 0, matrix.kv_len * 0
    for first in tl.range(0, matrix.kv_len, 1024):
        k_pos = first + tl.arange(0, 1024)
        ids = _key_ids(k_pos, matrix, own)
        near = (ids >= least) & (ids <= greatest) & (ids >= 0)
        start = min(start, tl.min(tl.where(near, k_pos, matrix.kv_len)))
        stop = max(stop, tl.max(tl.where(near, k_pos + 1, 0)))
        count += tl.sum(near.to(tl.int32))
    alike = (least == greatest) & (count == stop - start)
    return start, start, tl.where(alike, stop, start), stop


@jit
def _query_range(k_start, k_stop, matrix, own):
    """The same of the queries for these keys."""
    least, greatest = tl.cast(2**62, tl.int64), tl.cast(-1, tl.int64)
    for first in tl.range(k_start, k_stop, 1024):
        k_pos = first + tl.arange(0, 1024)
        ids = _key_ids(k_pos, matrix, own)
        least = min(least, tl.min(tl.where(k_pos < k_stop, ids.to(tl.int64), 2**62)))
        greatest = max(greatest, tl.max(tl.where(k_pos < k_stop, ids.to(tl.int64), -1)))
    first_query, last_query = matrix.query_start, matrix.query_start + matrix.q_len
    start, stop, count = last_query, first_query, matrix.q_len * 0
    for first in tl.range(first_query, last_query, 1024):
        q_pos = first + tl.arange(0, 1024)
        ids = _query_ids(q_pos, matrix, own)
        near = (ids >= least) & (ids <= greatest) & (ids >= 0) & (q_pos < last_query)
        start = min(start, tl.min(tl.where(near, q_pos, last_query)))
        stop = max(stop, tl.max(tl.where(near, q_pos + 1, first_query)))
        count += tl.sum(near.to(tl.int32))
    alike = (least == greatest) & (count == stop - start)
    return start, start, tl.where(alike, stop, start), stop


@jit
def _key_ids(k_pos, matrix, own):
    ids = own.ids + matrix.batch * own.ids_batch_stride
    return tl.load(ids + k_pos * own.ids_stride, mask=k_pos < matrix.kv_len, other=-1)


@jit
def _query_ids(q_pos, matrix, own):
    index = q_pos - own.by_row * matrix.query_start
    inside = (index >= 0) & (index < own.query_count)
    ids = own.query_ids + matrix.batch * own.query_ids_batch_stride
    return tl.load(ids + index * own.query_ids_stride, mask=inside, other=-1)


def _batch_stride(ids: Any) -> int:
    return ids.strides[0] if len(ids.shape) == 2 and ids.shape[0] > 1 else 0


def _of_batches(ids: Any, at: Tile) -> Any:
    """[B or 1, length]"""
    return ids[None] if len(ids.shape) == 1 else ids[at.batches]
