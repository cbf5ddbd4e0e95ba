"""Sequences packed one after the other in one row, each seeing only itself, by cumulative lengths.

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(Packed(numpy.array([0, 2, 3])), 4, 4))
1 1 0 0
1 1 0 0
0 0 1 0
0 0 0 0
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import Fixed, jit, tl
from limelight.errors import invalid
from limelight.masks.base import Mask
from limelight.terms import check_dtype
from limelight.tile import Size, Tile, TileState, on_host


@dataclass(frozen=True)
class Packed(Mask):
    """Key j is visible to query i where both lie in the same document.

    cu_seqlens: [documents + 1] or [batch, documents + 1] integers that never decrease: document n
        has the keys from cu_seqlens[n] up to cu_seqlens[n + 1]. Keys and queries outside all of
        them are padding: they see nothing and nothing sees them. A document may be empty.
    query_cu_seqlens: the same of the queries; by default a query belongs to the document at its
        position (`query_start + i`), which needs positions inside the keys.

    `Causal` and `SlidingWindow` compare positions in the whole row. Joined with this mask they mean
    order within a document where queries and keys are packed alike, and nothing useful otherwise.
    FlashAttention's `cu_seqlens_k` and `cu_seqlens_q` are these two. Where documents are known by
    an id for each token, or do not lie in one piece, see `Documents`.
    """

    cu_seqlens: Any
    query_cu_seqlens: Any = None

    tensor_fields: ClassVar[tuple[str, ...]] = ("cu_seqlens", "query_cu_seqlens")
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (2, 2)

    def check(self, size: Size) -> None:
        documents = self._check_bounds("cu_seqlens", self.cu_seqlens, size.batch)
        if self.query_cu_seqlens is not None:
            found = self._check_bounds("query_cu_seqlens", self.query_cu_seqlens, size.batch)
            if found != documents:
                raise invalid(
                    "mask Packed query_cu_seqlens",
                    found=f"{found} documents",
                    needed=f"as many as cu_seqlens has, {documents}",
                )
        elif size.q_len > size.kv_len:
            raise invalid(
                "mask Packed query_cu_seqlens",
                found="None",
                needed=f"where each document's queries lie, as there are {size.q_len} queries "
                f"and only {size.kv_len} keys",
            )

    @staticmethod
    def _check_bounds(name: str, bounds: Any, batch: int) -> int:
        """How many documents they bound."""
        check_dtype(f"mask Packed {name}", bounds, "int")
        shape = tuple(bounds.shape)
        if len(shape) not in (1, 2) or shape[:-1] not in ((), (batch,)) or shape[-1] < 1:
            raise invalid(
                f"mask Packed {name}",
                found=f"shape {shape}",
                needed=f"shape (documents + 1,) or ({batch}, documents + 1)",
            )
        return shape[-1] - 1

    def has_gaps(self) -> bool:
        # Between the first and the last document of a tile's queries, one may have keys alone.
        return self.query_cu_seqlens is not None

    def values(self, at: Tile, xp: Any) -> Any:
        of_keys = _documents(self.cu_seqlens, at.k_pos, at, xp)
        if self.query_cu_seqlens is None:
            of_queries = _documents(self.cu_seqlens, at.q_pos, at, xp)
        else:
            of_queries = _documents(self.query_cu_seqlens, at.row, at, xp)
        inside = (of_keys >= 0) & (of_keys < self.cu_seqlens.shape[-1] - 1)
        return (of_keys == of_queries) & inside

    def tile_state(self, at: Tile) -> TileState:
        if not on_host(self.cu_seqlens) or at.q_start is None or at.q_stop is None:
            return TileState.PARTIAL
        first_key, last_key = _first_and_last(self.cu_seqlens, at.k_start, at.k_stop, at)
        if self.query_cu_seqlens is None:
            first, last = _first_and_last(self.cu_seqlens, at.q_start, at.q_stop, at)
        else:
            first, last = _first_and_last(self.query_cu_seqlens, at.rows.start, at.rows.stop, at)
        first_shared, last_shared = max(first_key, first), min(last_key, last)
        documents = self.cu_seqlens.shape[-1] - 1
        if first_shared > last_shared or last_shared < 0 or first_shared >= documents:
            return TileState.EMPTY
        alike = min(first_key, first) == max(last_key, last)
        return TileState.FULL if alike else TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        bounds = self.cu_seqlens
        queries, by_row = (
            (bounds, 0) if self.query_cu_seqlens is None else (self.query_cu_seqlens, 1)
        )
        documents = bounds.shape[-1] - 1
        # In fives, as each count of steps is a kernel of its own.
        steps = -(-(documents + 1).bit_length() // 5) * 5
        return _OnDevice(
            _fragment,
            _key_range,
            _query_range,
            bounds,
            queries,
            _batch_stride(bounds),
            bounds.strides[-1],
            _batch_stride(queries),
            queries.strides[-1],
            documents,
            by_row,
            Fixed(steps),
        )


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any
    bounds: Any
    query_bounds: Any
    bounds_batch_stride: int
    bounds_stride: int
    query_bounds_batch_stride: int
    query_bounds_stride: int
    documents: int
    by_row: int  # 1 where query_bounds count rows, 0 where they are positions
    steps: Fixed  # halvings that find one of the documents


@jit
def _fragment(scores, at, own):
    # The search is for what runs down the tile: a thread has few of its rows and many columns.
    if at.q_pos.shape[0] == 1:
        document = _document_of_key(at.k_pos, at, own)
        start, stop = _first_query(document, at, own), _first_query(document + 1, at, own)
        visible = (at.q_pos >= start) & (at.q_pos < stop)
    else:
        document = _document_of_query(at.q_pos, at, own)
        start, stop = _first_key(document, at, own), _first_key(document + 1, at, own)
        visible = (at.k_pos >= start) & (at.k_pos < stop)
    return tl.where(visible, scores, float("-inf"))


@jit
def _key_range(q_start, q_stop, matrix, own):
    """From the first query's document to the last one's: all is visible where they are the same."""
    first = _document_of_query(q_start, matrix, own)
    last = _document_of_query(q_stop - 1, matrix, own)
    start, stop = _first_key(first, matrix, own), _first_key(last + 1, matrix, own)
    return start, start, tl.where(first == last, stop, start), stop


@jit
def _query_range(k_start, k_stop, matrix, own):
    """The same of the queries for these keys."""
    first = _document_of_key(k_start, matrix, own)
    last = _document_of_key(k_stop - 1, matrix, own)
    start, stop = _first_query(first, matrix, own), _first_query(last + 1, matrix, own)
    return start, start, tl.where(first == last, stop, start), stop


@jit
def _document_of_key(k_pos, matrix, own):
    bounds = own.bounds + matrix.batch * own.bounds_batch_stride
    return _document(k_pos, bounds, own.bounds_stride, own)


@jit
def _document_of_query(q_pos, matrix, own):
    queries = own.query_bounds + matrix.batch * own.query_bounds_batch_stride
    index = q_pos - own.by_row * matrix.query_start
    return _document(index, queries, own.query_bounds_stride, own)


@jit
def _document(index, bounds, stride, own):
    """Where a key or query belongs: -1 before the first document, their number after the last."""
    low = index * 0  # the bounds up to the index are at least `low` and at most `high`
    high = low + own.documents + 1
    for _ in tl.static_range(own.steps):
        middle = (low + high) // 2
        bound = tl.load(bounds + middle * stride, mask=middle <= own.documents, other=0)
        reached = (low < high) & (bound <= index)
        low = tl.where(reached, middle + 1, low)
        high = tl.where(reached, high, middle)
    return low - 1


@jit
def _first_key(document, matrix, own):
    bounds = own.bounds + matrix.batch * own.bounds_batch_stride
    return _bound(document, bounds, own.bounds_stride, own)


@jit
def _first_query(document, matrix, own):
    """Its position."""
    bounds = own.query_bounds + matrix.batch * own.query_bounds_batch_stride
    return _bound(document, bounds, own.query_bounds_stride, own) + own.by_row * matrix.query_start


@jit
def _bound(document, bounds, stride, own):
    """Where a document starts. Outside all of them lie empty ones."""
    inside = tl.minimum(tl.maximum(document, 0), own.documents)
    return tl.load(bounds + inside * stride).to(tl.int32)


def _batch_stride(bounds: Any) -> int:
    return bounds.strides[0] if len(bounds.shape) == 2 and bounds.shape[0] > 1 else 0


def _of_batches(bounds: Any, at: Tile) -> Any:
    """[B or 1, documents + 1]"""
    return bounds[None] if len(bounds.shape) == 1 else bounds[at.batches]


def _documents(bounds: Any, index: Any, at: Tile, xp: Any) -> Any:
    """Of each index, as `_document` says: of the shape of `index`, with the batch elements."""
    reached = _of_batches(bounds, at)[:, None, None, None, :] <= index[..., None]
    return xp.sum(xp.astype(reached, xp.int64), axis=-1) - 1


def _first_and_last(bounds: Any, start: int, stop: int, at: Tile) -> tuple[int, int]:
    """The least and the greatest document of some indices over the tile's batch elements."""
    rows = _of_batches(bounds, at).tolist()
    return (
        min(bisect_right(row, start) for row in rows) - 1,
        max(bisect_right(row, stop - 1) for row in rows) - 1,
    )
