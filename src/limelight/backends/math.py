"""The `math` backend: dense attention in plain array operations.

It runs everything, on any array library, and every library can differentiate it again. Its price is
memory: a few matrices of batch * q_heads * q_len * kv_len numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from limelight import dropout
from limelight.backends.base import Backend, Reason
from limelight.biases.base import Accumulator
from limelight.call import Call, Gradients
from limelight.namespace import namespace
from limelight.problem import Problem
from limelight.tile import Tile


class _Dense(NamedTuple):
    """What forward and backward share; every matrix is [B, H, M, N] in the compute dtype."""

    query: Any
    key: Any  # zero where no query sees it
    value: Any
    at: Tile
    capped: Any  # scores before bias and mask
    scores: Any  # -inf where hidden
    kept: Any  # 0 or 1 / (1 - dropout_p), or None


class Math(Backend):
    name = "math"
    summary = "dense array operations, O(L^2) memory, any library, any order of derivative"

    def why_not(self, problem: Problem) -> list[Reason]:
        return []

    def forward(self, call: Call) -> tuple[Any, Any]:
        xp = namespace(call.query)
        dense = _dense(call, xp)
        probs, lse, _ = _softmax(dense, call, xp)
        if dense.kept is not None:
            probs = probs * dense.kept
        return _matmul(probs, dense.value, call.group, xp), lse

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        xp = namespace(call.query)
        dense = _dense(call, xp)
        dtype = dense.at.dtype
        # Anew rather than from the LSE, which has no digits left where scores are huge.
        probs, _, sink_probs = _softmax(dense, call, xp)
        # Rows that see nothing have no gradient, whatever arrives or the query holds.
        nothing = lse == -xp.inf
        query = _zeroed(dense.query, nothing[..., None], xp)
        at = replace(dense.at, query=query)
        d_lse = xp.zeros_like(lse) if d_lse is None else xp.astype(d_lse, dtype)
        d_out = xp.zeros_like(out) if d_out is None else d_out
        d_out = _zeroed(xp.astype(d_out, dtype), nothing[..., None], xp)
        out = xp.astype(out, dtype)
        delta = xp.sum(d_out * out, axis=-1) - _zeroed(d_lse, nothing, xp)
        d_probs = _matmul(d_out, xp.matrix_transpose(dense.value), call.group, xp)
        survived = probs
        if dense.kept is not None:
            d_probs, survived = d_probs * dense.kept, probs * dense.kept
        d_value = _matmul_t(survived, d_out, call.group, xp) if wanted.value else None
        d_scores = probs * (d_probs - delta[..., None])

        d_bias = [None] * len(wanted.bias)
        if call.bias is not None and any(wanted.bias):
            sums = [
                Accumulator(xp.zeros_like(tensor, dtype=dtype)) if want else None
                for tensor, want in zip(call.bias.tensors(), wanted.bias, strict=True)
            ]
            call.bias.fold(d_scores, at, xp, sums)
            d_bias = [None if each is None else each.value for each in sums]
        d_sinks = None
        if wanted.sinks:
            d_sinks = -xp.sum(sink_probs * delta, axis=(0, 2))

        d_products = d_scores * call.scale
        if call.softcap is not None:
            d_products = d_products * (1 - (dense.capped / call.softcap) ** 2)
        d_query = _matmul(d_products, dense.key, call.group, xp) if wanted.query else None
        if wanted.query and call.bias is not None and call.bias.reads_query():
            d_query = d_query + call.bias.fold_query(d_scores, at, xp)
        d_key = _matmul_t(d_products, query, call.group, xp) if wanted.key else None

        def cast(gradient: Any, like: Any) -> Any:
            return None if gradient is None else xp.astype(gradient, like.dtype)

        return Gradients(
            cast(d_query, call.query),
            cast(d_key, call.key),
            cast(d_value, call.value),
            cast(d_sinks, call.sinks),
            tuple(
                cast(gradient, tensor)
                for gradient, tensor in zip(
                    d_bias, call.bias.tensors() if call.bias is not None else (), strict=True
                )
            ),
        )


def _dense(call: Call, xp: Any) -> _Dense:
    dtype = xp.float64 if call.query.dtype == xp.float64 else xp.float32
    query, key, value = (xp.astype(t, dtype) for t in (call.query, call.key, call.value))
    at = call.positions(xp, dtype).whole()
    bias = None if call.bias is None else xp.astype(call.bias.evaluated(at, xp), dtype)
    visible = None if call.mask is None else call.mask.evaluated(at, xp)
    if call.bias is not None and call.bias.hides():
        shown = bias != -xp.inf
        visible = shown if visible is None else visible & shown
    if visible is not None:
        seen = _seen(visible, call, xp)
        key, value = _zeroed(key, ~seen, xp), _zeroed(value, ~seen, xp)
    scores = _matmul(query, xp.matrix_transpose(key), call.group, xp) * call.scale
    if call.softcap is not None:
        scores = xp.tanh(scores / call.softcap) * call.softcap
    capped = scores
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = xp.where(visible, scores, -xp.inf * xp.ones_like(scores))
    kept = None
    if call.dropout_p > 0:
        dropped = dropout.dropped(at, call.seed, call.dropout_p, xp)
        kept = xp.astype(~dropped, dtype) * dropout.rescale(call.dropout_p)
    return _Dense(query, key, value, at, capped, scores, kept)


def _zeroed(array: Any, where: Any, xp: Any) -> Any:
    return xp.where(where, xp.zeros_like(array), array)


def _softmax(dense: _Dense, call: Call, xp: Any) -> tuple[Any, Any, Any]:
    """Probabilities [B, H, M, N], LSE [B, H, M] and the sinks' probabilities [B, H, M] or None."""
    sinks = None if call.sinks is None else xp.astype(call.sinks, dense.at.dtype)[:, None]
    top = _row_max(dense.scores, sinks, xp)
    weights = xp.exp(dense.scores - top[..., None])
    total = xp.sum(weights, axis=-1)
    sink_weights = None
    if sinks is not None:
        sink_weights = xp.exp(sinks - top)
        total = total + sink_weights
    empty = total == 0
    # Nothing divides by zero or takes its log, not even where the result is thrown away: the
    # derivative of that would be NaN.
    total = xp.where(empty, xp.ones_like(total), total)
    lse = xp.where(empty, -xp.inf * xp.ones_like(total), xp.log(total) + top)
    return weights / total[..., None], lse, None if sinks is None else sink_weights / total


def _seen(visible: Any, call: Call, xp: Any) -> Any:
    """[B or 1, G or 1, N, 1]: the keys that at least one query of the head's group sees."""
    seen = xp.any(visible, axis=2)
    if seen.shape[1] == call.query.shape[1]:
        heads = seen.shape[1] // call.group
        seen = xp.reshape(seen, (seen.shape[0], heads, call.group, seen.shape[2]))
        seen = xp.any(seen, axis=2)
    return seen[..., None]


def _row_max(scores: Any, sinks: Any, xp: Any) -> Any:
    """[B, H, M], finite also for rows that see nothing."""
    no_keys = scores.shape[-1] == 0
    top = xp.sum(scores, axis=-1) - xp.inf if no_keys else xp.max(scores, axis=-1)
    if sinks is not None:
        top = xp.maximum(top, sinks)
    return xp.where(top == -xp.inf, xp.zeros_like(top), top)


def _matmul(rows: Any, shared: Any, group: int, xp: Any) -> Any:
    """rows [B, H, M, X] @ shared [B, G, X, Y] -> [B, H, M, Y], a head of `shared` per group."""
    if group == 1:
        return xp.matmul(rows, shared)
    batch, heads, length, _ = rows.shape
    rows = xp.reshape(rows, (batch, heads // group, group * length, rows.shape[3]))
    return xp.reshape(xp.matmul(rows, shared), (batch, heads, length, shared.shape[3]))


def _matmul_t(left: Any, right: Any, group: int, xp: Any) -> Any:
    """left [B, H, M, X]ᵀ @ right [B, H, M, Y] -> [B, G, X, Y], summed over the heads of a group."""
    if group > 1:
        batch, heads, length, _ = left.shape
        stacked = (batch, heads // group, group * length)
        left = xp.reshape(left, (*stacked, left.shape[3]))
        right = xp.reshape(right, (*stacked, right.shape[3]))
    return xp.matmul(xp.matrix_transpose(left), right)
