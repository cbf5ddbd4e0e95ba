"""Random inputs of a call on JAX arrays, and a comparison with the oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from limelight import attention
from limelight.testing import ROUNDING, TOLERANCES, as_float64, as_numpy, assert_close, oracle


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def qkv(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 12,
    kv_len: int = 15,
    head_dim: int = 4,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(batch, heads, q_len, head_dim, dtype=dtype, seed=1),
        normal(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=2),
        normal(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=3),
    )


def on_jax(term: Any, dtype: Any = jnp.float32) -> Any:
    """A mask or bias of NumPy arrays as one of JAX arrays."""
    return term.map_tensors(lambda t: jnp.asarray(t, dtype if t.dtype.kind == "f" else None))


def results(query: Any, key: Any, value: Any, *, jit: bool = True, **options: Any) -> Any:
    """out, the LSE, what arrives of their gradients, and all gradients by name."""
    sinks, bias = options.pop("sinks", None), options.pop("bias", None)
    names = ["query", "key", "value"] + (["sinks"] if sinks is not None else [])
    names += [f"bias.{n}" for n in range(len(bias.tensors()) if bias is not None else 0)]
    arrays = [query, key, value, *([] if sinks is None else [sinks])]
    arrays += [] if bias is None else bias.tensors()

    def run(*arrays: Any) -> Any:
        rest = iter(arrays[3:])
        own = {"sinks": None if sinks is None else next(rest)}
        own["bias"] = None if bias is None else bias.with_tensors(rest)
        return attention(*arrays[:3], return_lse=True, **own, **options)

    def both(*arrays: Any) -> Any:
        (out, lse), pull = jax.vjp(run, *arrays)
        arrived = normal(*out.shape, dtype=out.dtype, seed=4), normal(*lse.shape, seed=5)
        return out, lse, *arrived, pull((arrived[0], arrived[1].astype(lse.dtype)))

    *made, gradients = (jax.jit(both) if jit else both)(*arrays)
    return *made, dict(zip(names, gradients, strict=True))


def check(query: Any, key: Any, value: Any, **options: Any) -> None:
    """Holds output, LSE and all gradients to the oracle."""
    out, lse, d_out, d_lse, gradients = results(query, key, value, **options)
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            options[name] = options[name].map_tensors(as_numpy)
    options.pop("jit", None)
    expected = oracle(query, key, value, d_out=d_out, d_lse=d_lse, **options)
    tolerance = TOLERANCES[query.dtype.name]
    largest = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=0.0)
    tolerance += 2 * ROUNDING["float32"] * largest
    assert out.dtype == query.dtype
    assert_close("lse", lse, expected.lse, tolerance, rows=False)
    assert_close("out", out, expected.out, tolerance)
    found = expected.gradients
    assert found is not None
    right = {"query": found.query, "key": found.key, "value": found.value, "sinks": found.sinks}
    right |= {f"bias.{n}": each for n, each in enumerate(found.bias)}
    for name, gradient in gradients.items():
        # Sums over many scores, of which large ones cancel.
        slack = 20 * tolerance * np.abs(as_float64(right[name])).max(initial=0.0)
        assert_close(f"d_{name}", gradient, right[name], tolerance, slack=slack / 20, rows=False)
