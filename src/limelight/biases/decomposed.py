"""Decomposed relative positions of images: a number for the key's line of a grid and one for its
column (Li et al., MViTv2, arXiv:2112.01526, equation 4; Segment Anything, arXiv:2304.02643).

>>> import numpy
>>> from limelight.picture import matrix
>>> lines, columns = numpy.array([[0.0, 10.0]] * 4), numpy.array([[1.0, 2.0]] * 4)
>>> print(matrix(DecomposedBias(lines[None, None], columns[None, None]), 4, 4))
 1.0  2.0 11.0 12.0
 1.0  2.0 11.0 12.0
 1.0  2.0 11.0 12.0
 1.0  2.0 11.0 12.0
"""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import Bias, GradientKind
from limelight.errors import invalid, invalid_type, is_integer
from limelight.terms import check_dtype
from limelight.tile import Size, Tile, device_of


@dataclass(frozen=True)
class DecomposedBias(Bias):
    """Adds `rel_h[b, h, i, y] + rel_w[b, h, i, x]` for query i and the key at (y, x) of a grid.

    rel_h: [batch, q_heads, q_len, lines], rel_w: [batch, q_heads, q_len, columns], floating point,
    differentiable. The grid's keys lie line by line from `first_key` on: key j is at line
    y = (j - first_key) // columns and column x = (j - first_key) % columns. Keys before and after
    the grid (class tokens, registers) get 0. Every query has a row in both tensors, a class token's
    query too: give it zeros for no bias.
    """

    rel_h: Any
    rel_w: Any
    first_key: int = 0

    tensor_fields: ClassVar[tuple[str, ...]] = ("rel_h", "rel_w")
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (4, 4)
    plain_fields: ClassVar[tuple[str, ...]] = ("first_key",)
    multiplies: ClassVar[bool] = True
    upright: ClassVar[bool] = True
    gradient: ClassVar[GradientKind | None] = "rows"

    def __post_init__(self) -> None:
        if not is_integer(self.first_key):
            found = repr(self.first_key)
            raise invalid_type("DecomposedBias first_key", found=found, needed="an integer")
        if self.first_key < 0:
            needed = "the index of a key, 0 or more"
            raise invalid("DecomposedBias first_key", found=self.first_key, needed=needed)

    def check(self, size: Size) -> None:
        for name, tensor in (("rel_h", self.rel_h), ("rel_w", self.rel_w)):
            check_dtype(f"bias DecomposedBias {name}", tensor, "float")
            shape = tuple(tensor.shape)
            if len(shape) != 4 or shape[:3] != tuple(size[:3]) or shape[3] < 1:
                what = "lines" if name == "rel_h" else "columns"
                raise invalid(
                    f"bias DecomposedBias {name}",
                    found=f"shape {shape}",
                    needed=f"(batch, q_heads, q_len, {what} of the grid) = "
                    f"({size.batch}, {size.q_heads}, {size.q_len}, at least 1)",
                )
        lines, columns = self.rel_h.shape[3], self.rel_w.shape[3]
        if self.first_key + lines * columns > size.kv_len:
            raise invalid(
                "bias DecomposedBias",
                found=f"a grid of {lines} x {columns} keys from key {self.first_key} on",
                needed=f"one within the {size.kv_len} keys",
            )

    def values(self, at: Tile, xp: Any) -> Any:
        line, column, inside = self._places(at, xp)
        rows = (at.batches, at.heads, at.rows)
        by_line = xp.take(xp.astype(self.rel_h[rows], at.dtype), line, axis=3)
        by_column = xp.take(xp.astype(self.rel_w[rows], at.dtype), column, axis=3)
        values = by_line + by_column
        return xp.where(inside, values, xp.zeros_like(values))

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        line, column, inside = self._places(at, xp)
        for place, gradient in zip((line, column), gradients, strict=True):
            if gradient is not None:
                every = xp.arange(gradient.shape[3], device=device_of(place))
                keys_there = (place[:, None] == every[None, :]) & inside[:, None]  # [N, places]
                part = xp.matmul(d_scores, xp.astype(keys_there, d_scores.dtype))
                gradient[at.batches, at.heads, at.rows] += part

    def _places(self, at: Tile, xp: Any) -> tuple[Any, Any, Any]:
        """Of each key [N]: its line and its column, and whether it is in the grid at all."""
        lines, columns = self.rel_h.shape[3], self.rel_w.shape[3]
        place = xp.reshape(at.k_pos, (-1,)) - self.first_key
        inside = (place >= 0) & (place < lines * columns)
        place = xp.where(inside, place, xp.zeros_like(place))
        return place // columns, place % columns, inside

    def on_device(self) -> NamedTuple:
        return _OnDevice(
            _fragment,
            _no_rows,
            _add_rows,
            _store_rows,
            _rows(self.rel_h),
            _rows(self.rel_w),
            self.first_key,
        )


class _Rows(NamedTuple):
    """[B, H, M, COUNT] of numbers."""

    tensor: Any
    batch_stride: int
    head_stride: int
    row_stride: int
    place_stride: int
    COUNT: int
    PADDED: int


class _OnDevice(NamedTuple):
    product_fragment: Any
    no_rows: Any
    add_rows: Any
    store_rows: Any
    lines: _Rows
    columns: _Rows
    FIRST_KEY: int


def _rows(tensor: Any) -> _Rows:
    batch, head, row, place = tensor.strides
    count = tensor.shape[3]
    # The least power of two that holds them and that a matrix product takes.
    padded = max(16, 1 << (count - 1).bit_length())
    return _Rows(tensor, batch, head, row, place, count, padded)


@jit
def _fragment(scores, at, own, PRECISION: tl.constexpr):
    KEYS: tl.constexpr = at.k_pos.numel
    IN_ONE_LINE: tl.constexpr = (own.columns.COUNT % KEYS == 0) & (own.FIRST_KEY % KEYS == 0)
    row = at.q_pos - at.query_start
    if IN_ONE_LINE:
        line, column, inside = _place(at.first_key, own)
        within = tl.arange(0, KEYS)
        if own.columns.COUNT > KEYS:
            within += column
        by_line = _load(own.lines, row, line, at).to(tl.float32)
        # Without a look at `inside`, so that a line as long as a tile is read once for all tiles.
        by_column = _load(own.columns, row, within[None, :], at).to(tl.float32)
        # A difference: Triton would start the product from a sum, and wait for its loads before.
        scores -= tl.where(inside, by_column, 0.0) * -at.unit
        scores += tl.where(inside, by_line, 0.0) * at.unit
    else:
        line, column, inside = _place(at.k_pos, own)
        bias = _shared_out(own.lines, row, line, inside, at, PRECISION)
        bias += _shared_out(own.columns, row, column, inside, at, PRECISION)
        scores += bias * at.unit
    return scores


@jit
def _place(key, own):
    """The line and column of keys, 0 outside of the grid, and whether they are inside."""
    place = key - own.FIRST_KEY
    inside = (place >= 0) & (place < own.lines.COUNT * own.columns.COUNT)
    place = tl.where(inside, place, 0)
    return place // own.columns.COUNT, place % own.columns.COUNT, inside


@jit
def _load(rows, row, place, at):
    matrix = rows.tensor + at.batch * rows.batch_stride + at.head * rows.head_stride
    places = matrix + row * rows.row_stride + place * rows.place_stride
    return tl.load(places, mask=row < at.q_len, other=0.0)


@jit
def _shared_out(rows, row, place, inside, at, PRECISION: tl.constexpr):
    """Each row's numbers at the places of the keys: a product with a matrix of ones and zeros."""
    every = tl.arange(0, rows.PADDED)
    matrix = rows.tensor + at.batch * rows.batch_stride + at.head * rows.head_stride
    places = matrix + row * rows.row_stride + every[None, :] * rows.place_stride
    there = (row < at.q_len) & (every < rows.COUNT)[None, :]
    numbers = tl.load(places, mask=there, other=0.0)  # [M, places]
    if numbers.dtype == tl.float64:
        numbers = numbers.to(tl.float32)
    is_there = (every[:, None] == place) & inside
    return tl.dot(numbers, is_there.to(numbers.dtype), input_precision=PRECISION)


# The gradient of a row is the sum of its scores' gradients at the keys of each line and column.


@jit
def _no_rows(own, ROWS: tl.constexpr, KEYS: tl.constexpr):
    lines = tl.zeros([ROWS, own.lines.PADDED], tl.float32)
    IN_ONE_LINE: tl.constexpr = (own.columns.COUNT % KEYS == 0) & (own.FIRST_KEY % KEYS == 0)
    if IN_ONE_LINE:
        columns = ()
        for _ in tl.static_range(own.columns.COUNT // KEYS):
            columns = columns + (tl.zeros([ROWS, KEYS], tl.float32),)
    else:
        columns = (tl.zeros([ROWS, own.columns.PADDED], tl.float32),)
    return lines, columns


@jit
def _add_rows(sums, d_scores, at, own, PRECISION: tl.constexpr):
    KEYS: tl.constexpr = at.k_pos.numel
    lines, columns = sums
    IN_ONE_LINE: tl.constexpr = (own.columns.COUNT % KEYS == 0) & (own.FIRST_KEY % KEYS == 0)
    if IN_ONE_LINE:
        line, column, inside = _place(at.first_key, own)
        here = (tl.arange(0, own.lines.PADDED) == line)[None, :] & inside
        lines += tl.where(here, tl.sum(d_scores, 1)[:, None], 0.0)
        added = ()
        for piece in tl.static_range(own.columns.COUNT // KEYS):
            part = tl.where(inside & (column == piece * KEYS), d_scores, 0.0)
            added = added + (columns[piece] + part,)
        columns = added
    else:
        line, column, inside = _place(tl.trans(at.k_pos), own)  # [N, 1]
        d_scores = d_scores.to(at.query.dtype)
        here = (tl.arange(0, own.lines.PADDED)[None, :] == line) & inside
        lines = tl.dot(d_scores, here.to(d_scores.dtype), lines, input_precision=PRECISION)
        here = (tl.arange(0, own.columns.PADDED)[None, :] == column) & inside
        part = tl.dot(d_scores, here.to(d_scores.dtype), columns[0], input_precision=PRECISION)
        columns = (part,)
    return lines, columns


@jit
def _store_rows(sums, row, matrix, own):
    lines, columns = sums
    _store(own.lines, row, 0, lines, matrix)
    for piece in tl.static_range(len(columns)):
        _store(own.columns, row, piece, columns[piece], matrix)


@jit
def _store(rows, row, piece, values, matrix):
    """Nothing where the gradient is not wanted: its pointer is null."""
    place = tl.arange(0, values.shape[1]) + piece * values.shape[1]
    first = rows.tensor + matrix.batch * rows.batch_stride + matrix.head * rows.head_stride
    places = first + row[:, None] * rows.row_stride + place[None, :] * rows.place_stride
    inside = (row < matrix.q_len)[:, None] & (place < rows.COUNT)[None, :]
    wanted = tl.cast(rows.tensor, tl.int64) != 0
    tl.store(places, values.to(rows.tensor.dtype.element_ty), mask=inside & wanted)
