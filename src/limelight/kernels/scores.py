"""From products of queries and keys to scores: scale, softcap, biases, masks, in this order."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels.tiles import load_or

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Matrix(NamedTuple):
    """One matrix of scores. head counts query heads."""

    batch: Any
    head: Any
    q_len: Any
    kv_len: Any
    query_start: Any
    unit: Any
    scale: Any


class At(NamedTuple):
    """Where a tile of scores lies: the positions broadcast against it; else as Matrix.

    q_near, k_near: the positions as float32, counted from the tile's first key. For what depends on
    their difference; converting positions for each tile costs as much as its exponentials.
    offset: k_pos - q_pos of the tile's first query and key.
    side: -1 where no key comes after any query, 1 where none comes before any, else 0.
    unit: what a bias of 1 is in the scores at hand, which may not have been scaled yet.
    query [M, D] and scale: for a bias that reads the query.
    guarded: whether a bias of -inf must hide what is no number, see ranges.py.
    """

    q_pos: Any
    k_pos: Any
    q_near: Any
    k_near: Any
    first_key: Any
    offset: Any
    side: Any
    batch: Any
    head: Any
    q_len: Any
    kv_len: Any
    query_start: Any
    unit: Any
    query: Any
    scale: Any
    guarded: Any


@triton.jit
def matrix_of(batch, head, query_starts, sizes, numbers):
    """The Matrix of this batch element and query head."""
    query_start = load_or(query_starts, batch, numbers.query_start).to(tl.int32)
    # Casts, as the interpreter loops over Python's numbers.
    batch, head = tl.cast(batch, tl.int32), tl.cast(head, tl.int32)
    return Matrix(batch, head, sizes.q_len, sizes.kv_len, query_start, numbers.unit, numbers.scale)


@triton.jit
def place(
    matrix, q_tile, first_row, first_key, offset,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GUARDED: tl.constexpr,
    TRANSPOSED: tl.constexpr = False, ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """The At of a tile of scores [M, N], or [N, M] where TRANSPOSED.

    offset: first_key - first_row, in the words of a loop that knows it does not change. ANYWHERE:
    whether it may begin before the first key, where nothing may be read.
    """
    if TRANSPOSED:
        rows, keys = tl.arange(0, TILE_M)[None, :], tl.arange(0, TILE_N)[:, None]
    else:
        rows, keys = tl.arange(0, TILE_M)[:, None], tl.arange(0, TILE_N)[None, :]
    return place_offsets(
        matrix, q_tile, first_row, first_key, offset, rows, keys, TILE_M, TILE_N, GUARDED, ANYWHERE
    )


@triton.jit
def place_offsets(
    matrix, q_tile, first_row, first_key, offset, rows, keys,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GUARDED: tl.constexpr = True,
    ANYWHERE: tl.constexpr = False,
):  # fmt: skip
    """The same. rows, keys: counted from the tile's first ones, broadcast against it."""
    q_start = matrix.query_start + first_row
    k_pos = first_key + keys
    if ANYWHERE:
        k_pos = tl.maximum(k_pos, 0)
    return At(
        q_start + rows,
        k_pos,
        (q_start - first_key).to(tl.float32) + rows.to(tl.float32),
        keys.to(tl.float32),
        first_key,
        offset - matrix.query_start,
        tl.where(
            q_start >= first_key + TILE_N - 1, -1, tl.where(q_start + TILE_M <= first_key + 1, 1, 0)
        ),
        matrix.batch,
        matrix.head,
        matrix.q_len,
        matrix.kv_len,
        matrix.query_start,
        matrix.unit,
        q_tile,
        matrix.scale,
        GUARDED,
    )


@triton.jit
def exponent_factor(numbers, options):
    """What turns a score into an exponent of two.

    The scale waits for the exponent, where it costs nothing; biases then come in its unit.
    """
    factor = LOG2E
    if options.late_scale:
        factor = numbers.scale * LOG2E
    return factor


@triton.jit
def scores_of(products, at, masks, biases, numbers, options, PARTIAL: tl.constexpr):
    """The scores, -inf where hidden, and the softcap's tanh (without a softcap, anything).

    They are in units of `numbers.unit`, which `exponent_factor` undoes.

    PARTIAL: whether the tile may hold hidden keys. What lies past the end is left to the caller.
    """
    scores = products
    saturation = products
    if options.softcap:
        saturation = _tanh(products * (numbers.scale / numbers.softcap))
        scores = saturation * numbers.softcap
    elif not options.late_scale:
        scores = products * numbers.scale
    for i in tl.static_range(len(biases)):
        scores = biases[i].fragment(scores, at, biases[i])
    if PARTIAL:
        for i in tl.static_range(len(masks)):
            scores = masks[i].fragment(scores, at, masks[i])
    return scores, saturation


class Product(NamedTuple):
    """A bias that makes a product of its own, as one that has a fragment."""

    fragment: Any  # `multiply`
    bias: Any
    TF32: int  # products of TF32 that make one of float32; 0 where float32 has its own


@triton.jit
def multiply(scores, at, own):
    if own.TF32 == 0:
        scores = own.bias.product_fragment(scores, at, own.bias, "ieee")
    elif own.TF32 == 1:
        scores = own.bias.product_fragment(scores, at, own.bias, "tf32")
    else:
        scores = own.bias.product_fragment(scores, at, own.bias, "tf32x3")
    return scores


class Spread(NamedTuple):
    """A bias that depends on the offset alone, as one that has a fragment."""

    fragment: Any  # `spread`
    bias: Any


@triton.jit
def spread(scores, at, own):
    """The fragment of a bias of offsets.

    It is read at the tile's offsets, once each, and shared out from there: a read for every score
    makes the whole forward 2 to 3.6 times slower.
    """
    ROWS: tl.constexpr = scores.shape[0]
    COLUMNS: tl.constexpr = scores.shape[1]
    element = tl.arange(0, ROWS * COLUMNS)
    source = element % COLUMNS - element // COLUMNS
    if at.q_pos.shape[0] == 1:  # a column of scores belongs to a query
        source = -source
        BEFORE: tl.constexpr = COLUMNS
    else:
        BEFORE: tl.constexpr = ROWS
    place = tl.arange(0, 2 * max(ROWS, COLUMNS))
    values = own.bias.offset_fragment(at.offset - BEFORE + place, at, own.bias) * at.unit
    return scores + tl.reshape(tl.gather(values, source + BEFORE, 0), [ROWS, COLUMNS])


@triton.jit
def weights_of(scores, shift, numbers, options):
    """The softmax's weights. shift: the rows' log-sum-exp as an exponent of two, +inf for none."""
    return tl.exp2(scores * exponent_factor(numbers, options) - shift)


@triton.jit
def d_scores_of(weights, d_weights, delta, PARTIAL: tl.constexpr):
    """The gradient of the scores; zero where hidden, even if the value there is NaN."""
    d_scores = weights * (d_weights - delta)
    if PARTIAL:
        d_scores = tl.where(weights == 0, 0.0, d_scores)
    return d_scores


@triton.jit
def d_products_of(d_scores, saturation, options):
    """The gradient of scale * products: back through the softcap."""
    if options.softcap:
        slope = 1.0 - saturation * saturation
        d_scores = tl.where(d_scores == 0, 0.0, d_scores * slope)  # a hidden slope may be NaN
    return d_scores


@triton.jit
def hide_past_end(scores, index, length):
    return tl.where(index < length, scores, float("-inf"))


@triton.jit
def zero_unseen(tile, seen):
    """Rows of keys or values, zero where no query sees them: 0 * NaN is NaN. seen: [M, N]."""
    by_any = tl.max(seen.to(tl.int32), axis=0)
    return tl.where(by_any[:, None] != 0, tile, 0.0)


@triton.jit
def _tanh(x):
    shrunk = tl.exp2(-2.0 * LOG2E * tl.abs(x))
    magnitude = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -magnitude, magnitude)
