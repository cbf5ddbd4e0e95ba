"""FlashAttention-2 (Dao, arXiv:2307.08691, algorithms 1 and 2) in JAX, on any of its devices.

As in tiled.py, scores are made a tile at a time, and the backward makes them again from the
log-sum-exp. One loop walks all tiles, of all batch elements and heads together; tiles that a mask
is known to empty, whatever its tensors hold, are not in it. Memory grows with the length.

Axes: B batch elements, G heads of keys, R query heads that share one, M queries, N keys. Masks and
biases see [B, H, M, N], with H = G R.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from limelight import dropout
from limelight.biases.base import Accumulator
from limelight.call import Call, Gradients
from limelight.namespace import namespace
from limelight.tile import Tile, TileState
from limelight.tuning import TileConfig

_product = partial(jnp.einsum, precision="highest")


def forward(call: Call, tiles: TileConfig) -> tuple[jax.Array, jax.Array]:
    """out [B, H, M, E] and the LSE [B, H, M], in the compute dtype."""
    work = _Work(call, tiles)
    row_max, row_sum, acc = _online_softmax(work)
    empty = row_sum == 0  # a row that sees nothing: output 0, LSE -inf
    total = jnp.where(empty, 1.0, row_sum)
    out = acc / total * dropout.rescale(call.dropout_p)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + row_max)
    return work.ungrouped(out), work.ungrouped(lse)[..., 0]


class _Sums(NamedTuple):
    """Of each row: the maximum of its scores, the sum of exp(score - maximum), and that sum
    weighted with the values."""

    row_max: jax.Array  # [B, G, R, M, 1]
    row_sum: jax.Array  # [B, G, R, M, 1]
    acc: jax.Array  # [B, G, R, M, E]


def _online_softmax(work: _Work) -> _Sums:
    def step(sums: _Sums, place: _Place) -> tuple[_Sums, None]:
        tile = work.tile(place)
        before = _Sums(*(work.rows_of(each, place) for each in sums))
        new_max = jnp.maximum(before.row_max, tile.scores.max(axis=-1, keepdims=True))
        shift = _finite(new_max)
        weights = jnp.exp(tile.scores - shift)
        rescale = jnp.exp(before.row_max - shift)
        row_sum = before.row_sum * rescale + weights.sum(axis=-1, keepdims=True)
        if tile.dropped is not None:
            weights = jnp.where(tile.dropped, 0.0, weights)
        acc = before.acc * rescale + _product("bgrmn,bgne->bgrme", weights, tile.value)
        after = _Sums(new_max, row_sum, acc)
        return _Sums(*(_put(*each, place.row, 3) for each in zip(sums, after, strict=True))), None

    shape = work.query.shape[:-1]
    start = _Sums(
        jnp.full((*shape, 1), -jnp.inf, work.dtype),
        jnp.zeros((*shape, 1), work.dtype),
        jnp.zeros((*shape, work.value.shape[3]), work.dtype),
    )
    sums = _walk(step, start, work.places())
    if work.call.sinks is None:
        return sums
    sinks = work.sinks()
    new_max = jnp.maximum(sums.row_max, sinks)
    shift = _finite(new_max)
    rescale = jnp.exp(sums.row_max - shift)
    return _Sums(new_max, sums.row_sum * rescale + jnp.exp(sinks - shift), sums.acc * rescale)


def _finite(row_max: jax.Array) -> jax.Array:
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


class _Totals(NamedTuple):
    """What tiles add to. d_read: what a bias's own look at the queries adds to their gradient."""

    d_query: jax.Array  # [B, G, R, M, D]
    d_read: jax.Array | None  # [B, H, M, D]
    d_key: jax.Array  # [B, G, N, D]
    d_value: jax.Array  # [B, G, N, E]
    d_bias: list[jax.Array | None]


def backward(
    call: Call,
    tiles: TileConfig,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array | None,
    d_lse: jax.Array | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients, each in its input's dtype, accumulated in the compute dtype."""
    # Rows that see no key have no gradient, whatever arrives.
    nothing = (lse == -jnp.inf)[..., None]
    work = _Work(replace_query(call, jnp.where(nothing, 0.0, call.query)), tiles)
    state = _row_state(work, nothing, out, lse, d_out, d_lse)
    parameters = call.bias.tensors() if call.bias is not None else []
    reads = call.bias is not None and call.bias.reads_query()

    def step(totals: _Totals, place: _Place) -> tuple[_Totals, None]:
        tile = work.tile(place)
        rows = _RowState(*(work.rows_of(each, place) for each in state))
        probs = jnp.exp(tile.scores - rows.shift) / rows.row_sum
        d_probs = _product("bgrme,bgne->bgrmn", rows.d_out, tile.value)
        survived = probs
        if tile.dropped is not None:
            survived = jnp.where(tile.dropped, 0.0, probs)
            d_probs = jnp.where(tile.dropped, 0.0, d_probs)
        d_scores = probs * (d_probs - rows.delta)
        d_read, d_bias = totals.d_read, totals.d_bias
        if call.bias is not None:
            full = work.ungrouped(d_scores)
            if d_read is not None:
                d_read = _add(d_read, call.bias.fold_query(full, tile.at, work.xp), place.row, 2)
            if any(each is not None for each in d_bias):
                d_bias = _folded(call.bias, full, tile.at, work.xp, d_bias)
        if tile.slope is not None:
            d_scores = d_scores * tile.slope
        d_query = _product("bgrmn,bgnd->bgrmd", d_scores, tile.key)
        d_key = _product("bgrmn,bgrmd->bgnd", d_scores, tile.query)
        d_value = _product("bgrmn,bgrme->bgne", survived, rows.d_out)
        return _Totals(
            _add(totals.d_query, d_query, place.row, 3),
            d_read,
            _add(totals.d_key, d_key, place.key, 2),
            _add(totals.d_value, d_value, place.key, 2),
            d_bias,
        ), None

    start = _Totals(
        jnp.zeros_like(work.query),
        jnp.zeros(call.query.shape, work.dtype) if reads else None,
        jnp.zeros_like(work.key),
        jnp.zeros_like(work.value),
        [
            jnp.zeros(tensor.shape, work.dtype) if want else None
            for tensor, want in zip(parameters, wanted.bias, strict=True)
        ],
    )
    totals = _walk(step, start, work.places())
    d_query = work.ungrouped(totals.d_query) * call.scale
    if totals.d_read is not None:
        d_query += totals.d_read

    def cast(gradient: Any, like: Any, want: bool = True) -> Any:
        return gradient.astype(like.dtype) if want and gradient is not None else None

    return Gradients(
        cast(d_query, call.query, wanted.query),
        cast(totals.d_key, call.key, wanted.key),
        cast(totals.d_value, call.value, wanted.value),
        cast(_sinks_gradient(work, state), call.sinks) if wanted.sinks else None,
        tuple(map(cast, totals.d_bias, parameters)),
    )


def replace_query(call: Call, query: jax.Array) -> Call:
    return call.with_tensors([query, *call.tensors()[1:]])


class _RowState(NamedTuple):
    """What the backward knows of rows before it looks at keys; [B, G, R, M, 1] but for d_out.

    A probability is exp(score - shift) / row_sum. delta is what the softmax's derivative takes from
    the gradient of each of a row's probabilities.
    """

    d_out: jax.Array  # [B, G, R, M, E], rescaled for what dropout drops
    shift: jax.Array
    row_sum: jax.Array
    delta: jax.Array


def _row_state(
    work: _Work,
    nothing: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array | None,
    d_lse: jax.Array | None,
) -> _RowState:
    out, lse = out.astype(work.dtype), lse.astype(work.dtype)[..., None]
    d_out = jnp.zeros_like(out) if d_out is None else d_out.astype(work.dtype)
    d_out = jnp.where(nothing, 0.0, d_out)
    delta = (d_out * out).sum(axis=-1, keepdims=True)
    if d_lse is not None:
        delta -= jnp.where(nothing, 0.0, d_lse.astype(work.dtype)[..., None])
    # Beside scores beyond 1e4 the LSE has no digits left for a probability.
    shift, row_sum = lax.cond(
        jnp.any((jnp.abs(lse) > 1e4) & ~nothing),
        lambda: tuple(map(work.ungrouped, _online_softmax(work)[:2])),
        lambda: (lse, jnp.ones_like(lse)),
    )
    shift = jnp.where(nothing, jnp.inf, shift)  # exp(-inf - inf) is 0
    row_sum = jnp.where(nothing, 1.0, row_sum)
    d_out = d_out * dropout.rescale(work.call.dropout_p)
    return _RowState(*map(work.grouped, (d_out, shift, row_sum, delta)))


def _sinks_gradient(work: _Work, state: _RowState) -> jax.Array:
    """[H]"""
    probs = jnp.exp(work.sinks() - state.shift) / state.row_sum
    return -(probs * state.delta).sum(axis=(0, 3, 4)).reshape(-1)


def _folded(
    bias: Any, d_scores: jax.Array, at: Tile, xp: Any, d_bias: list[jax.Array | None]
) -> list[jax.Array | None]:
    """The gradients of a bias's tensors with a tile's part."""
    sums = [None if each is None else Accumulator(each) for each in d_bias]
    bias.fold(d_scores, at, xp, sums)
    return [None if each is None else each.value for each in sums]


class _Place(NamedTuple):
    """Where a tile begins. A last tile that would end past the matrix begins earlier, and looks at
    rows and keys from `new_row` and `new_key` on: those before were in another tile."""

    row: Any
    key: Any
    new_row: Any
    new_key: Any


class _ScoreTile(NamedTuple):
    """scores [B, G, R, M, N], -inf where hidden.

    key and value are zero where no row of the tile sees them: 0 * NaN is NaN. slope is the
    derivative of the softcap at each score. dropped: where dropout drops a weight.
    """

    at: Tile
    query: jax.Array  # [B, G, R, M, D], scaled
    key: jax.Array
    value: jax.Array
    scores: jax.Array
    slope: jax.Array | None
    dropped: jax.Array | None


class _Work:
    """One call cut into tiles, with its tensors in the compute dtype."""

    def __init__(self, call: Call, tiles: TileConfig) -> None:
        self.call, self.xp = call, namespace(call.query)
        self.dtype = jnp.float64 if call.query.dtype == jnp.float64 else jnp.float32
        self.query = self.grouped(call.query.astype(self.dtype)) * call.scale
        self.key, self.value = call.key.astype(self.dtype), call.value.astype(self.dtype)
        self.positions = call.positions(self.xp, self.dtype)
        self.rows = min(tiles.rows, max(call.size.q_len, 1))
        self.keys = min(tiles.keys, max(call.size.kv_len, 1))

    def grouped(self, array: jax.Array) -> jax.Array:
        """[B, H, M, X] -> [B, G, R, M, X]"""
        batch, _, *rest = array.shape
        return array.reshape(batch, self.call.key.shape[1], self.call.group, *rest)

    def ungrouped(self, array: jax.Array) -> jax.Array:
        """[B, G, R, M, X] -> [B, H, M, X]"""
        batch, heads, group, *rest = array.shape
        return array.reshape(batch, heads * group, *rest)

    def sinks(self) -> jax.Array:
        """[G, R, 1, 1]"""
        sinks = self.call.sinks.astype(self.dtype)
        return sinks.reshape(-1, self.call.group, 1, 1)

    def places(self) -> _Place:
        """Of all tiles that a mask may show, one after another."""
        _, _, q_len, kv_len = self.call.size
        found = [
            (min(row, q_len - self.rows), min(key, kv_len - self.keys), row, key)
            for row in range(0, q_len, self.rows)
            for key in range(0, kv_len, self.keys)
            if self._may_be_seen(row, key)
        ]
        return _Place(*np.asarray(found, np.int32).reshape(-1, 4).T)

    def _may_be_seen(self, row: int, key: int) -> bool:
        call = self.call
        if call.mask is None or not isinstance(call.query_start, int):
            return True
        batch, heads, q_len, kv_len = call.size
        rows, keys = (
            slice(row, min(row + self.rows, q_len)),
            slice(key, min(key + self.keys, kv_len)),
        )
        start = call.query_start
        nowhere: Any = None  # a state goes by ranges, and by tensors only on the host
        at = Tile(
            slice(0, batch), slice(0, heads), rows, keys, self.dtype,
            nowhere, nowhere, nowhere, nowhere, nowhere,
            start + rows.start, start + rows.stop,
        )  # fmt: skip
        return call.mask.tile_state(at) != TileState.EMPTY

    def rows_of(self, array: jax.Array, place: _Place) -> jax.Array:
        """The tile's rows of [B, G, R, M, X]."""
        return lax.dynamic_slice_in_dim(array, place.row, self.rows, axis=3)

    def tile(self, place: _Place) -> _ScoreTile:
        call, xp = self.call, self.xp
        batch, heads, q_len, kv_len = call.size
        at = self.positions.tile(
            slice(0, batch),
            slice(0, heads),
            place.row + jnp.arange(self.rows),
            place.key + jnp.arange(self.keys),
        )
        query = self.rows_of(self.query, place)
        key, value = (
            lax.dynamic_slice_in_dim(each, place.key, self.keys, axis=2)
            for each in (self.key, self.value)
        )
        shown = []
        if q_len % self.rows:
            shown.append(at.row >= place.new_row)
        if kv_len % self.keys:
            shown.append(at.k_pos >= place.new_key)
        if call.mask is not None:
            shown.append(call.mask.evaluated(at, xp))
        bias = None if call.bias is None else call.bias.evaluated(at, xp).astype(self.dtype)
        if call.bias is not None and call.bias.hides():
            shown.append(bias != -jnp.inf)
        visible = None
        for each in shown:
            visible = each if visible is None else visible & each
        if visible is not None:
            seen = self._seen(visible)
            key, value = (jnp.where(seen, each, 0.0) for each in (key, value))
        scores = _product("bgrmd,bgnd->bgrmn", query, key)
        slope = None
        if call.softcap is not None:
            tanh = jnp.tanh(scores / call.softcap)
            scores, slope = tanh * call.softcap, 1 - tanh**2
        full = self.ungrouped(scores)
        if bias is not None:
            full = full + bias
        if visible is not None:
            full = jnp.where(visible, full, -jnp.inf)
        dropped = None
        if call.dropout_p > 0:
            dropped = self.grouped(dropout.dropped(at, call.seed, call.dropout_p, xp))
        return _ScoreTile(at, query, key, value, self.grouped(full), slope, dropped)

    def _seen(self, visible: jax.Array) -> jax.Array:
        """[B or 1, G or 1, N, 1]: the keys that at least one row of the tile sees."""
        seen = visible.any(axis=2)
        if seen.shape[1] > 1:
            batch, heads, keys = seen.shape
            group = self.call.group
            seen = seen.reshape(batch, heads // group, group, keys).any(axis=2)
        return seen[..., None]


def _walk(step: Any, start: Any, places: _Place) -> Any:
    """What a step makes of the start, tile after tile."""
    return lax.scan(step, start, places)[0] if places.row.size else start


def _put(array: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, part, start, axis)


def _add(array: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    before = lax.dynamic_slice_in_dim(array, start, part.shape[axis], axis)
    return _put(array, before + part, start, axis)
