"""limelight for JAX: `attention`, and `dot_product_attention` in the place of `jax.nn`'s.

>>> import jax, limelight.jax
>>> x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
>>> limelight.jax.dot_product_attention(x, x, x, is_causal=True).shape
(1, 6, 2, 8)
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp

from limelight.adapters.base import Arguments
from limelight.adapters.jax.adapter import ADAPTER
from limelight.api import attention as attention
from limelight.biases import Bias, DenseBias
from limelight.errors import invalid, invalid_type, is_integer
from limelight.masks import Causal, DenseMask, KeyLengths, Mask, Packed, SlidingWindow
from limelight.terms import Term

__all__ = ["attention", "dot_product_attention", "register"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, with its arguments, layout and meaning.

    Letters: B batch elements, T queries and S keys, N query heads and K of keys, H head_dim.

    Arguments:
        query: (B, T, N, H) or (T, N, H); key, value: (B, S, K, H) or (S, K, H). The last dimension
            of value may differ.
        bias: added to the scaled scores, broadcastable to (B, N, T, S); or a `limelight.Bias`.
        mask: booleans broadcastable to (B, N, T, S), True may attend; or a `limelight.Mask`.
        scale: 1 / sqrt(H) by default.
        is_causal: key j is visible to query i where j <= i.
        query_seq_lengths, key_value_seq_lengths: (B,) int32; what lies past a length is padding.
        local_window_size: keys seen before and after a query's own, or one number for both.
        implementation: "xla" and "cudnn" are JAX's own and run there; None is limelight's choice.
        return_residual: also return the log-sum-exp (B, T, N).

    Returns:
        (B, T, N, H) or (T, N, H) in the query's dtype. A query that sees no key gets 0, where
        JAX's own gives it the mean of the values.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    if implementation in ("xla", "cudnn"):
        if isinstance(bias, Bias) or isinstance(mask, Mask):
            needed = "None with limelight's masks and biases"
            raise invalid("implementation", found=repr(implementation), needed=needed)
        return jax.nn.dot_product_attention(
            query, key, value, bias, mask,
            scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            implementation=implementation, return_residual=return_residual,
        )  # fmt: skip
    if implementation is not None:
        raise invalid("implementation", found=repr(implementation), needed="None, 'xla' or 'cudnn'")
    arrays = {"query": query, "key": key, "value": value}
    rows = {name: _heads_first(name, jnp.asarray(array)) for name, array in arrays.items()}
    batch, _, q_len, _ = rows["query"].shape
    arguments = Arguments(
        **rows,
        mask=_mask(
            mask,
            is_causal,
            local_window_size,
            _lengths("query_seq_lengths", query_seq_lengths, batch, q_len),
            _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, rows["key"].shape[2]),
        ),
        bias=bias if bias is None or isinstance(bias, Bias) else DenseBias(jnp.asarray(bias)),
        query_start=0,
        scale=scale,
        return_lse=return_residual,
    )
    found = ADAPTER.attention(arguments, heads_last=True)
    out, lse = found if return_residual else (found, None)
    lead = jnp.shape(query)[:-3]
    out = out.swapaxes(1, 2)
    out = out.reshape(*lead, *out.shape[1:])
    if lse is None:
        return out
    return out, lse.swapaxes(1, 2).reshape(out.shape[:-1])


def _heads_first(name: str, array: Any) -> Any:
    """[B, N, T, H]"""
    if array.ndim not in (3, 4):
        raise invalid(name, found=f"shape {array.shape}", needed="(batch,) length, heads, head_dim")
    return (array if array.ndim == 4 else array[None]).swapaxes(1, 2)


def _lengths(name: str, lengths: Any, batch: int, length: int) -> Any:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise invalid_type(name, found=f"dtype {lengths.dtype}", needed="integers")
    if lengths.shape != (batch,):
        raise invalid(name, found=f"shape {lengths.shape}", needed=f"one per batch, ({batch},)")
    return jnp.clip(lengths, 0, length).astype(jnp.int32)


def _mask(
    mask: Any,
    is_causal: bool,
    window: int | tuple[int, int] | None,
    q_lengths: Any,
    kv_lengths: Any,
) -> Mask | None:
    parts: list[Mask] = []
    if mask is not None:
        parts.append(mask if isinstance(mask, Mask) else DenseMask(jnp.asarray(mask)))
    if is_causal:
        parts.append(Causal())
    if window is not None:
        parts.append(SlidingWindow(*_window(window)))
    if q_lengths is not None:
        # One document, of all keys and the real queries.
        parts.append(Packed(jnp.asarray([0, _MOST]), _from_zero(q_lengths)))
    if kv_lengths is not None:
        parts.append(KeyLengths(kv_lengths))
    return reduce(and_, parts) if parts else None


def _window(window: Any) -> tuple[int, int]:
    sides = (window, window) if is_integer(window) else window
    if not isinstance(sides, tuple) or len(sides) != 2 or not all(map(is_integer, sides)):
        raise invalid_type(
            "local_window_size", found=repr(window), needed="an integer, or a tuple of two"
        )
    return int(sides[0]), int(sides[1])


_MOST = 2**30  # beyond any tensor's length


def _from_zero(lengths: Any) -> Any:
    """[B, 2]"""
    return jnp.stack([jnp.zeros_like(lengths), lengths], axis=1)


def register(kind: type[Term]) -> type[Term]:
    """Makes a class of masks or biases a pytree of its tensors, as all of limelight's are.

    Their instances can then be arguments of functions under `jit`, `grad` and `vmap`. May stand
    over the class as a decorator.
    """

    def flattened(term: Term) -> tuple[list[Any], Term]:
        return term.tensors(), term.map_tensors(lambda _: ...)

    def restored(empty: Term, tensors: Any) -> Term:
        return empty.with_tensors(iter(tensors))

    jax.tree_util.register_pytree_node(kind, flattened, restored)
    return kind


for _kind in tuple(Term.kinds.values()):
    register(_kind)
