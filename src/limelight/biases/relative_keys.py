"""Relative keys: the query's product with a vector for the key's offset.

`ShawRelative` (Shaw et al., arXiv:1803.02155, equation 5) has one table for all heads;
`TransformerXLBias` (Dai et al., arXiv:1901.02860, section 3.3) a table for each head. In pictures
the query is all ones:

>>> import numpy
>>> from limelight.picture import matrix
>>> print(matrix(ShawRelative(numpy.array([[-1.0], [0.0], [1.0]])), 4, 4))
 0.0  1.0  1.0  1.0
-1.0  0.0  1.0  1.0
-1.0 -1.0  0.0  1.0
-1.0 -1.0 -1.0  0.0
>>> keys, scores = numpy.array([[[3.0], [2.0], [1.0]]]), numpy.array([[0.0, 0.5, 0.0]])
>>> print(matrix(TransformerXLBias(keys, scores, first=-2), 4, 4))
1.0 1.0 1.0 1.0
2.5 1.0 1.0 1.0
3.0 2.5 1.0 1.0
3.0 3.0 2.5 1.0

A tile of scores lies on a band of offsets. Its queries' products with the band's vectors, one
[rows, rows + keys], hold every value that the tile needs, each row shifted by one from the row
above: the relative shift, without a matrix of the whole.
"""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import Bias, GradientKind
from limelight.errors import invalid, invalid_type, is_integer
from limelight.terms import check_dtype, check_offset
from limelight.tile import Size, Tile, device_of

if TYPE_CHECKING:
    from typing_extensions import Self


class _Band(NamedTuple):
    """The vectors of a tile's offsets, w = j - i + rows - 1 counted from the tile's corner.

    keys [B or 1, H or 1, W, D], scores [B or 1, H or 1, 1, W] or None; W is rows + keys. first
    [B or 1]: the place in the table of w = 0, which may lie outside.
    """

    keys: Any
    scores: Any
    first: Any


class _RelativeKeys(Bias):
    """What both have in common. The first tensor field is the table, [n, D] or [H or 1, n, D]."""

    first: int | None

    multiplies: ClassVar[bool] = True
    upright: ClassVar[bool] = True
    gradient: ClassVar[GradientKind | None] = "vectors"

    def _table(self) -> Any:
        return getattr(self, self.tensor_fields[0])

    def _scores(self) -> Any:
        """[H or 1, n], added to the products before the scale; or None."""
        return None

    def _first(self) -> int:
        """The offset of the table's first entry."""
        return -(self._table().shape[-2] // 2) if self.first is None else self.first

    def __post_init__(self) -> None:
        name = f"{type(self).__name__} first"
        if self.first is not None and not is_integer(self.first):
            raise invalid_type(name, found=repr(self.first), needed="an integer or None")
        check_offset(name, self.first)

    def query_dim(self) -> int:
        return self._table().shape[-1]

    def _check_table(self, dimensions: int, needed: str) -> None:
        name = f"bias {type(self).__name__} {self.tensor_fields[0]}"
        check_dtype(name, self._table(), "float")
        shape = tuple(self._table().shape)
        if len(shape) != dimensions or shape[-2] < 1:
            raise invalid(name, found=f"shape {shape}", needed=needed)
        if self.first is None and shape[-2] % 2 == 0:
            raise invalid(
                name,
                found=f"{shape[-2]} offsets and no `first`",
                needed="an odd number, of which the middle one is offset 0, or the offset `first`",
            )

    def values(self, at: Tile, xp: Any) -> Any:
        rows, keys = at.row.shape[2], at.k_pos.shape[3]
        if 0 in (rows, keys):
            return xp.zeros((1, 1, rows, keys), dtype=at.dtype, device=device_of(at.k_pos))
        band = self._band(at, xp)
        products = xp.matmul(at.query, xp.matrix_transpose(band.keys))  # [B, H, M, W]
        if band.scores is not None:
            products = products + band.scores
        return _shifted(products, keys, xp) * at.scale

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        if 0 in d_scores.shape:
            return
        d_products = _unshifted(d_scores, xp) * at.scale
        first = self._band(at, xp).first
        d_table, *d_position_scores = gradients
        if d_table is not None:
            part = xp.matmul(xp.matrix_transpose(d_products), at.query)  # [B, H, W, D]
            _add_band(d_table, part, first, at, xp)
        for gradient in d_position_scores:
            if gradient is not None:
                part = xp.sum(d_products, axis=2)  # [B, H, W]
                _add_band(gradient, part, first, at, xp)

    def fold_query(self, d_scores: Any, at: Tile, xp: Any) -> Any:
        if 0 in d_scores.shape:
            return xp.zeros_like(at.query)
        d_products = _unshifted(d_scores, xp) * at.scale
        return xp.matmul(d_products, self._band(at, xp).keys)

    def on_device(self) -> NamedTuple:
        table, scores, dim = self._table(), self._scores(), self.query_dim()
        return _OnDevice(
            _fragment,
            _add_to_query,
            _unskewed,
            _places,
            table,
            _head_stride(table, 3),
            table.strides[-2],
            table.strides[-1],
            table if scores is None else scores,
            0 if scores is None else _head_stride(scores, 2),
            0 if scores is None else scores.strides[-1],
            table.shape[-2],
            self._first(),
            dim,
            max(16, 1 << (dim - 1).bit_length()),
            scores is not None,
        )

    def _band(self, at: Tile, xp: Any) -> _Band:
        rows, keys = at.row.shape[2], at.k_pos.shape[3]
        table, scores = self._table(), self._scores()
        table = table if len(table.shape) == 3 else table[None]
        start = (at.q_pos - at.row)[:, 0, 0, 0]  # [B or 1], the position of query 0
        first = at.k_start - (at.row_stop - 1) - start - self._first()
        place = first[:, None] + xp.arange(rows + keys, device=device_of(at.k_pos))  # [B or 1, W]
        place = xp.clip(place, 0, table.shape[1] - 1)

        def taken(entries: Any) -> Any:
            """[B or 1, H or 1, W, ...] of [H or 1, n, ...]"""
            entries = xp.astype(_of_heads(entries, at), at.dtype)
            found = xp.take(entries, xp.reshape(place, (-1,)), axis=1)
            found = xp.reshape(found, (entries.shape[0], *place.shape, *entries.shape[2:]))
            return xp.moveaxis(found, 0, 1)

        band_scores = None if scores is None else taken(scores)[:, :, None]
        return _Band(taken(table), band_scores, first)


@dataclass(frozen=True)
class ShawRelative(_RelativeKeys):
    """Adds `scale * q_i · key_table[clip(j - p - first, 0, n - 1)]`, query i at position p, key j.

    key_table: [n, head_dim], floating point, differentiable, shared by the heads. first: the offset
    j - p of its first entry; by default -(n - 1) / 2, with n odd. Offsets beyond the table take its
    nearest entry.
    """

    key_table: Any
    first: int | None = None

    tensor_fields: ClassVar[tuple[str, ...]] = ("key_table",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (0,)
    plain_fields: ClassVar[tuple[str, ...]] = ("first",)

    def check(self, size: Size) -> None:
        self._check_table(2, "(offsets, head_dim), at least one offset")


@dataclass(frozen=True)
class TransformerXLBias(_RelativeKeys):
    """Adds `scale * (q_i · position_keys[h, o] + position_scores[h, o])`.

    o = clip(j - p - first, 0, n - 1) for the query at position p and key j: offsets ascend, and
    those beyond the table take its nearest entry. position_keys: [q_heads or 1, n, head_dim], the
    paper's projected encodings of positions. position_scores: [q_heads or 1, n], their products
    with a bias for the whole head, or None. Both floating point, differentiable. first: the offset
    of the first entry; by default -(n - 1) / 2, with n odd. n = q_len + kv_len - 1 entries from
    first = -(q_len - 1) on cover every offset of queries that start at 0; n = kv_len entries from
    first = 1 - kv_len on cover what a causal mask shows.

    `of` makes it from the paper's two biases.
    """

    position_keys: Any
    position_scores: Any = None
    first: int | None = None

    tensor_fields: ClassVar[tuple[str, ...]] = ("position_keys", "position_scores")
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (0, 0)
    plain_fields: ClassVar[tuple[str, ...]] = ("first",)

    @classmethod
    def of(
        cls,
        query: Any,
        position_keys: Any,
        content_bias: Any,
        position_bias: Any,
        first: int | None = None,
    ) -> tuple[Any, Self]:
        """The query and the bias of the paper's score `(q + u)·k + (q + v)·r`.

        content_bias, position_bias: [q_heads, head_dim], the paper's u and v. With q' = q + u that
        is `q'·k + q'·r + (v - u)·r`: the first is a plain attention of q', the last a number for
        each head and offset. All gradients reach the arguments.

        >>> import torch, limelight
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> r, content, position = torch.randn(2, 9, 8), torch.randn(2, 8), torch.randn(2, 8)
        >>> query, bias = TransformerXLBias.of(q, r, content, position)
        >>> limelight.attention(query, k, v, bias=bias).shape
        torch.Size([1, 2, 5, 8])
        """
        scores = (position_keys @ (position_bias - content_bias)[:, :, None])[:, :, 0]
        return query + content_bias[:, None, :], cls(position_keys, scores, first)

    def check(self, size: Size) -> None:
        self._check_table(3, f"({size.q_heads} or 1, offsets, head_dim), at least one offset")
        for name, dimensions in zip(self.tensor_fields, (3, 2), strict=True):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            check_dtype(f"bias TransformerXLBias {name}", tensor, "float")
            shape = tuple(tensor.shape)
            offsets = self.position_keys.shape[1]
            if len(shape) != dimensions or shape[0] not in (1, size.q_heads) or shape[1] != offsets:
                raise invalid(
                    f"bias TransformerXLBias {name}",
                    found=f"shape {shape}",
                    needed=f"({size.q_heads} query heads or 1, {offsets} offsets"
                    f"{', head_dim' if dimensions == 3 else ''})",
                )

    def _scores(self) -> Any:
        return self.position_scores


def _head_stride(tensor: Any, dimensions: int) -> int:
    """0 where the heads share an entry."""
    has_heads = len(tensor.shape) == dimensions and tensor.shape[0] > 1
    return tensor.strides[0] if has_heads else 0


def _of_heads(entries: Any, at: Tile) -> Any:
    return entries if entries.shape[0] == 1 else entries[at.heads]


def _shifted(products: Any, keys: int, xp: Any) -> Any:
    """[..., M, N] from [..., M, M + N]: element (i, j) stood at j - i + M - 1 of its row."""
    *lead, rows, width = products.shape
    # In memory, one element less than a row further on from each row to the next.
    flat = xp.reshape(products, (*lead, rows * width))
    flat = flat[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return xp.reshape(flat, (*lead, rows, width - 1))[..., :keys]


def _unshifted(d_scores: Any, xp: Any) -> Any:
    """The other way: [..., M, M + N] from [..., M, N], zero elsewhere."""
    *lead, rows, keys = d_scores.shape

    def zeros(*shape: int) -> Any:
        return xp.zeros((*lead, *shape), dtype=d_scores.dtype, device=device_of(d_scores))

    wide = xp.concat([d_scores, zeros(rows, rows - 1)], axis=-1)
    flat = xp.reshape(wide, (*lead, rows * (rows + keys - 1)))
    flat = xp.concat([zeros(rows - 1), flat, zeros(1)], axis=-1)
    return xp.reshape(flat, (*lead, rows, rows + keys))


def _add_band(gradient: Any, part: Any, first: Any, at: Tile, xp: Any) -> None:
    """Adds a band's gradients [B, H, W, ...] to the entries [n, ...] or [H or 1, n, ...] that it
    took."""
    lead: tuple[Any, ...] = ()
    if len(gradient.shape) == len(part.shape) - 1:
        lead = (at.heads if gradient.shape[0] > 1 else slice(None),)
    if not lead or gradient.shape[0] == 1:
        part = xp.sum(part, axis=1, keepdims=bool(lead))
    if first.shape[0] == 1:
        part = xp.sum(part, axis=0, keepdims=True)
    axis = len(lead)
    entries, width = gradient.shape[axis], part.shape[axis + 1]
    taken = min(entries, width)
    along = (-1, *[1] * (len(part.shape) - axis - 2))
    w = xp.arange(width, device=device_of(first))
    for b in range(first.shape[0]):
        # Each entry between the ends once, so that nothing is lost where an index repeats.
        start = xp.clip(first[b], 0, entries - taken)
        place = start + xp.arange(taken, device=device_of(first))
        source = place - first[b]
        there = (source >= 0) & (source < width)
        moved = xp.take(part[b], xp.clip(source, 0, width - 1), axis=axis)
        moved = xp.where(xp.reshape(there, along), moved, xp.zeros_like(moved))
        gradient[(*lead, place)] += moved
        place = first[b] + w
        for end, hits in ((0, place < 0), (entries - 1, place >= entries)):
            clipped = xp.where(xp.reshape(hits, along), part[b], xp.zeros_like(part[b]))
            gradient[(*lead, end)] += xp.sum(clipped, axis=axis)


# On the device a tile has at most as many rows as keys, N. Its band has two halves of N offsets,
# whose products with the queries lie side by side in shared memory, from where every score takes
# its own. A warp holds 8 rows and 4 pairs of columns at a time: with the index of the pair and then
# that of the row last, its threads write to 32 banks, and read from 32, as the offset moves by two
# from pair to pair and by one from row to row.


class _OnDevice(NamedTuple):
    product_fragment: Any
    add_to_query: Any
    unskewed: Any
    places: Any
    table: Any
    table_head_stride: int
    table_entry_stride: int
    table_dim_stride: int
    scores: Any
    scores_head_stride: int
    scores_entry_stride: int
    entries: int
    first: int
    HEAD_DIM: int
    PADDED_DIM: int
    HAS_SCORES: bool


@jit
def _fragment(scores, at, own, PRECISION: tl.constexpr):
    ROWS: tl.constexpr = scores.shape[0]
    KEYS: tl.constexpr = scores.shape[1]
    near = _products(_places(at.offset, 0, ROWS, KEYS, own), at, own, PRECISION)
    far = _products(_places(at.offset, KEYS, ROWS, KEYS, own), at, own, PRECISION)
    values = _skewed(near, far)
    if own.HAS_SCORES:
        line = _numbers(tl.arange(0, 2 * KEYS) + (at.offset - (ROWS - 1) - own.first), at, own)
        element = tl.arange(0, ROWS * KEYS)
        place = element % KEYS - element // KEYS + (ROWS - 1)
        values += tl.reshape(tl.gather(line, place, 0), [ROWS, KEYS])
    return scores + values * (at.unit * at.scale)


@jit
def _skewed(near, far):
    """[M, N]: element (i, j) is element j - i + M - 1 of row i of both [M, N] side by side."""
    M: tl.constexpr = near.shape[0]
    N: tl.constexpr = near.shape[1]
    both = tl.reshape(tl.permute(tl.join(near, far), (0, 2, 1)), [M // 8, 8, N // 4, 4, 2])
    flat = tl.reshape(tl.permute(both, (2, 4, 0, 1, 3)), [2 * M * N])
    high, low = tl.arange(0, M // 8)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    group, within = tl.arange(0, N // 8)[None, None, :, None], tl.arange(0, 8)[None, None, None, :]
    step = within - low + 7
    place = (group - high + (M // 8 - 1)) * (8 * M) + high * 32
    place += (step // 8) * (8 * M) + (step % 2) * (4 * M) + low * 4 + step % 8 // 2
    return tl.reshape(tl.gather(flat, tl.reshape(place, [M * N]), 0), [M, N])


@jit
def _places(offset, skip, ROWS: tl.constexpr, KEYS: tl.constexpr, own):
    """Where in the table half a band's offsets lie, not clipped yet. offset: of the tile."""
    return tl.arange(0, KEYS) + (offset - (ROWS - 1) + skip - own.first)


@jit
def _products(place, at, own, PRECISION: tl.constexpr):
    """Of the tile's queries with the vectors at these places, [M, N]."""
    return tl.dot(at.query, tl.trans(_vectors(place, at, own)), input_precision=PRECISION)


@jit
def _numbers(place, at, own):
    place = tl.minimum(tl.maximum(place, 0), own.entries - 1)
    head = own.scores + at.head * own.scores_head_stride
    return tl.load(head + place * own.scores_entry_stride).to(tl.float32)


@jit
def _vectors(place, at, own):
    """[N, D] in the queries' dtype."""
    place = tl.minimum(tl.maximum(place, 0), own.entries - 1)
    dim = tl.arange(0, own.PADDED_DIM)
    head = own.table + at.head * own.table_head_stride
    places = head + place[:, None] * own.table_entry_stride + dim[None, :] * own.table_dim_stride
    if own.HEAD_DIM == own.PADDED_DIM:
        vectors = tl.load(places)
    else:
        vectors = tl.load(places, mask=(dim < own.HEAD_DIM)[None, :], other=0.0)
    return vectors.to(at.query.dtype)


@jit
def _add_to_query(d_query, d_scores, at, own, PRECISION: tl.constexpr):
    """d_query [M, D], not yet scaled, with what a tile's d_scores [M, N] add to it."""
    ROWS: tl.constexpr = d_scores.shape[0]
    KEYS: tl.constexpr = d_scores.shape[1]
    d_near, d_far = _unskewed(d_scores, at.kv_len)
    vectors = _vectors(_places(at.offset, 0, ROWS, KEYS, own), at, own)
    d_query = tl.dot(d_near.to(vectors.dtype), vectors, d_query, input_precision=PRECISION)
    vectors = _vectors(_places(at.offset, KEYS, ROWS, KEYS, own), at, own)
    return tl.dot(d_far.to(vectors.dtype), vectors, d_query, input_precision=PRECISION)


@jit
def _unskewed(d_scores, kv_len):
    """The way back: the gradients of the products with both halves of the band, [M, N] each.

    Row i is turned left by i + 1 (and N - M); what came around belongs to the first half.
    """
    M: tl.constexpr = d_scores.shape[0]
    N: tl.constexpr = d_scores.shape[1]
    parts = tl.reshape(d_scores, [M // 8, 8, N // 8, 4, 2])
    flat = tl.reshape(tl.permute(parts, (2, 4, 0, 1, 3)), [M * N])
    high, low = tl.arange(0, M // 8)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    group, within = tl.arange(0, N // 8)[None, None, :, None], tl.arange(0, 8)[None, None, None, :]
    step = within + low + (N - M + 1) % 8
    group = group + high + step // 8 + (N - M + 1) // 8
    place = (group % (N // 8)) * (8 * M) + high * 32
    place += (step % 2) * (4 * M) + low * 4 + step % 8 // 2
    turned = tl.reshape(tl.gather(flat, tl.reshape(place, [M * N]), 0), [M, N])
    # Always true, which Triton cannot know: it lays the result out like d_scores, for a product.
    turned = tl.where(kv_len > 0, turned, d_scores)
    is_near = tl.reshape(tl.broadcast_to(group >= N // 8, [M // 8, 8, N // 8, 8]), [M, N])
    return tl.where(is_near, turned, 0.0), tl.where(is_near, 0.0, turned)
