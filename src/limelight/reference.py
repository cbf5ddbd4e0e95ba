"""The oracle: dense attention and its gradients in float64 NumPy, written for clarity.

This page defines what every backend must compute. It shares nothing with them but what masks,
biases and dropout themselves say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from limelight import dropout
from limelight.biases import Bias
from limelight.call import Gradients
from limelight.masks import Mask
from limelight.tile import Positions, Size, Tile


class Reference(NamedTuple):
    """out [B, H, M, E], lse [B, H, M] (natural log), gradients where d_out was given."""

    out: np.ndarray
    lse: np.ndarray
    gradients: Gradients | None


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    query_start: Any = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    d_out: Any = None,
    d_lse: Any = None,
) -> Reference:
    """Attention over arrays that NumPy can read; arguments as in `limelight.attention`."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group = q_heads // kv_heads
    scale = float(head_dim**-0.5 if scale is None else scale)
    size = Size(batch, q_heads, q_len, kv_len)
    mask = mask.map_tensors(np.asarray) if mask is not None else None
    if bias is not None:
        bias = bias.resolved(q_heads, np.asarray).map_tensors(lambda t: np.asarray(t, np.float64))
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)
    start = query_start if isinstance(query_start, int) else np.asarray(query_start)
    positions = Positions.of(
        np,
        size=size,
        dtype=np.float64,
        device="cpu",
        query_start=start,
        query=query,
        scale=scale,
    )
    at = positions.whole()

    with np.errstate(invalid="ignore", over="ignore"):
        visible = _visible(mask, bias, at)
        # What no query sees must not be touched: 0 * NaN is NaN.
        seen = visible.any(axis=2).reshape(batch, kv_heads, group, kv_len, 1).any(axis=2)
        key, value = np.where(seen, key, 0.0), np.where(seen, value, 0.0)
        all_keys, all_values = (np.repeat(array, group, axis=1) for array in (key, value))

        products = scale * query @ all_keys.swapaxes(2, 3)
        capped = products if softcap is None else softcap * np.tanh(products / softcap)
        scores = capped if bias is None else capped + bias.values(at, np)
        scores = np.where(visible, scores, -np.inf)

        probs, sink_probs, lse = _softmax(scores, sinks)
        kept = np.ones_like(probs)
        if dropout_p > 0:
            dropped = dropout.dropped(at, np.asarray(seed, np.int64), dropout_p, np)
            kept = np.where(dropped, 0.0, dropout.rescale(dropout_p))
        out = (probs * kept) @ all_values
        if d_out is None:
            return Reference(out, lse, None)

        # Rows that see nothing have no gradient, whatever arrives or the query holds.
        nothing = np.isneginf(lse)
        query = np.where(nothing[..., None], 0.0, query)
        at = replace(at, query=query)
        d_out = np.where(nothing[..., None], 0.0, np.asarray(d_out, np.float64))
        d_lse = np.where(nothing, 0.0, 0.0 if d_lse is None else np.asarray(d_lse, np.float64))
        d_values = (probs * kept).swapaxes(2, 3) @ d_out
        d_probs = (d_out @ all_values.swapaxes(2, 3)) * kept
        delta = (d_out * out).sum(axis=-1) - d_lse
        d_scores = probs * (d_probs - delta[..., None])
        d_capped = d_scores if softcap is None else d_scores * (1 - (capped / softcap) ** 2)
        d_query = scale * d_capped @ all_keys
        d_keys = scale * d_capped.swapaxes(2, 3) @ query
        d_bias: list[np.ndarray] = []
        if bias is not None:
            d_bias = [np.zeros(tensor.shape) for tensor in bias.tensors()]
            bias.fold(d_scores, at, np, d_bias)
            if bias.reads_query():
                d_query += bias.fold_query(d_scores, at, np)
        d_sinks = None
        if sinks is not None:
            d_sinks = -(sink_probs * delta).sum(axis=(0, 2))

    def grouped(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(batch, kv_heads, group, *gradient.shape[2:]).sum(axis=2)

    gradients = Gradients(d_query, grouped(d_keys), grouped(d_values), d_sinks, tuple(d_bias))
    return Reference(out, lse, gradients)


def _visible(mask: Mask | None, bias: Bias | None, at: Tile) -> np.ndarray:
    full = (at.batch.shape[0], at.head.shape[1], at.row.shape[2], at.k_pos.shape[3])
    visible = np.ones(full, bool)
    if mask is not None:
        visible &= mask.values(at, np)
    if bias is not None:
        visible &= np.not_equal(bias.values(at, np), -np.inf)
    return visible


def _softmax(
    scores: np.ndarray, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of keys [B, H, M, N] and of the sink [B, H, M], and the LSE [B, H, M]."""
    sink = -np.inf if sinks is None else sinks[:, None]
    top = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
    shift = np.where(np.isneginf(top), 0.0, top)  # a row with nothing in it
    weights, sink_weight = np.exp(scores - shift[..., None]), np.exp(sink - shift)
    total = weights.sum(axis=-1) + sink_weight
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    total = np.where(total == 0, 1.0, total)
    return weights / total[..., None], sink_weight / total, lse
