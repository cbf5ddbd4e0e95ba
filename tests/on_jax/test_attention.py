"""JAX arrays: eager, under jit, grad and vmap, second derivatives, errors, records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax_inputs import check, normal, on_jax, qkv, results
from test_terms import QUERY, SIZE, biases, kind, masks

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    DenseMask,
    KeyLengths,
    Problem,
    RelativeBias,
    SlidingWindow,
    T5Bias,
    attention,
    attention_vjp,
    backends,
    explain,
    record,
    scaled_dot_product_attention,
)
from limelight.backends import tiled
from limelight.biases.base import Accumulator, Bias
from limelight.jax import register
from limelight.namespace import namespace
from limelight.testing import as_float64, assert_close, oracle
from limelight.tile import Positions
from limelight.tuning import TileConfig

MASKS, BIASES = masks(), biases()
TERMS = [*MASKS, *BIASES]
PAIRS = list(zip(MASKS, BIASES, strict=True))[::3]


def tile_of(xp, rows, keys):
    """A tile of SIZE; rows and keys as JAX's loop has them, or as ranges."""
    query = xp.asarray(QUERY, dtype=xp.float32)
    positions = Positions.of(
        xp, size=SIZE, dtype=xp.float32, device=None, query_start=2, query=query, scale=0.5
    )
    return positions.tile(slice(0, 2), slice(0, 4), rows, keys)


@pytest.mark.parametrize("term", TERMS, ids=kind)
def test_each_mask_and_bias_on_a_tile(term):
    """Where only the device knows the place of the tile."""
    xp = namespace(jnp.zeros(()))
    at = tile_of(np, slice(3, 9), slice(5, 12))
    d_scores = np.random.default_rng(1).normal(size=(2, 4, 6, 7)).astype(np.float32)
    own = term.map_tensors(lambda t: t.astype(np.float32) if t.dtype.kind == "f" else t)

    def gradients(tensors):
        return [np.zeros(t.shape, np.float32) for t in tensors]

    @jax.jit
    def on_device(term, row, key, d_scores):
        at = tile_of(xp, row + jnp.arange(6), key + jnp.arange(7))
        sums = [Accumulator(jnp.asarray(t)) for t in gradients(term.tensors())]
        if isinstance(term, Bias):
            term.fold(d_scores, at, xp, sums)
        return term.evaluated(at, xp), [each.value for each in sums]

    values, folded = on_device(on_jax(term), 3, 5, d_scores)
    assert_close("values", values, own.evaluated(at, np), 1e-5)
    if isinstance(term, Bias):
        expected = gradients(own.tensors())
        own.fold(d_scores, at, np, expected)
        for found, right in zip(folded, expected, strict=True):
            assert_close("fold", found, right, 1e-5, rows=False)


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{kind(m)}-{kind(b)}" for m, b in PAIRS])
def test_a_mask_with_a_bias(pair):
    mask, bias = map(on_jax, pair)
    with backends("tiled"):
        check(*qkv(), mask=mask, bias=bias, query_start=2)


@pytest.mark.parametrize(("n", "m"), [(0, 6), (6, 8), (10, 10), (16, 0)])
def test_math(n, m):
    with backends("math"):
        check(*qkv(), mask=on_jax(MASKS[m]), bias=on_jax(BIASES[n]), query_start=1)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": Causal(), "query_start": "end", "softcap": 3.0, "sinks": normal(4)},
        {
            "mask": on_jax(KeyLengths(np.array([9, 0]))) & SlidingWindow(7),
            "bias": on_jax(ALiBi(np.ones(4))) + on_jax(BIASES[6]) + on_jax(BIASES[14]),
            "query_start": 0,
        },
        {"query_start": jnp.asarray([3, 0]), "mask": Causal(), "bias": on_jax(BIASES[6])},
        {"mask": Causal(), "query_start": 1, "dropout_p": 0.4, "seed": -(2**40) - 7},
    ],
    ids=["sinks", "sum", "starts", "dropout"],
)
def test_many_tiles(options, monkeypatch):
    """Tiles that do not divide the lengths, and that masks empty."""
    small = TileConfig(8, 8, "")
    monkeypatch.setattr(tiled, "tiled_jax", lambda size: small)
    check(*qkv(q_len=21, kv_len=19), **options)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(dtype):
    check(*qkv(dtype=dtype), mask=Causal(), query_start="end", bias=on_jax(BIASES[6]))


def test_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(t), jnp.float64) for t in qkv())
        options = {"mask": Causal(), "query_start": 0, "dropout_p": 0.25, "seed": 3}
        out, lse = attention(q, k, v, return_lse=True, **options)
        expected = oracle(q, k, v, **options)
    assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float64)
    assert_close("out", out, expected.out, 1e-12)


def test_each_call_is_recorded_and_a_traced_one_once():
    q, k, v = qkv(q_len=15)
    call = jax.jit(lambda q: attention(q, k, v, mask=Causal()))
    with record() as eager:
        first = attention(q, k, v, mask=Causal())
        attention(q, k, v, mask=Causal())
    with record() as traced:
        second = call(q)
        call(q)
    assert [each.stage for each in eager] == ["forward"] * 2
    assert [each.backend for each in traced] == ["tiled"]
    assert_close("out", first, second, 1e-6)


@pytest.mark.parametrize("wanted", ["query", "bias.0", "sinks"])
def test_gradients_of_what_is_asked_for(wanted):
    q, k, v = qkv()
    arrays = {"query": q, "bias.0": jnp.abs(normal(4)), "sinks": normal(4, seed=7)}

    def loss(own):
        a = arrays | {wanted: own}
        return attention(a["query"], k, v, bias=ALiBi(a["bias.0"]), sinks=a["sinks"]).sum()

    with record() as calls:
        gradient = jax.grad(loss)(arrays[wanted])
    assert [call.choice.problem.gradients for call in calls] == [(wanted,)] * 2
    assert [call.stage for call in calls] == ["forward", "backward"]
    expected = oracle(
        q, k, v, bias=ALiBi(np.asarray(arrays["bias.0"])), sinks=arrays["sinks"],
        d_out=np.ones(q.shape),
    ).gradients  # fmt: skip
    right = {"query": expected.query, "bias.0": expected.bias[0], "sinks": expected.sinks}
    assert_close(wanted, gradient, right[wanted], 1e-5, rows=False)


def mapped_call(q, k, v, lengths, slopes, table):
    bias = ALiBi(slopes) if table is None else ALiBi(slopes) + RelativeBias(table)
    return attention(q, k, v, mask=KeyLengths(lengths), bias=bias, return_lse=True)


def mapped_inputs(axes):
    q, k, v = qkv(q_len=10, kv_len=10)
    own = [q, k, v, jnp.asarray([7, 3]), jnp.abs(normal(4)), normal(4, 19)]
    several = [jnp.stack([t, t + 1, t - 1]) for t in own]
    return [t if axis is None else s for t, s, axis in zip(own, several, axes, strict=True)]


@pytest.mark.parametrize(
    ("axes", "in_turn"),
    [
        ((0, 0, 0, 0, None, None), False),
        ((0, None, None, None, 0, None), False),
        ((None, None, 0, 0, None, 0), True),
    ],
    ids=["inputs", "slopes", "table"],
)
def test_vmap(axes, in_turn):
    """A mapped axis joins the batch where all arrays have a place for it."""
    inputs = mapped_inputs(axes)
    mapped = jax.vmap(mapped_call, in_axes=axes)
    call = jax.jit(mapped_call)

    def one(n):
        return call(*[t if a is None else t[n] for t, a in zip(inputs, axes, strict=True)])

    out, lse = jax.jit(mapped)(*inputs)
    for n in range(3):
        expected = one(n)
        assert_close("out", out[n], expected[0], 1e-5)
        assert_close("lse", lse[n], expected[1], 1e-5)
    text = str(jax.make_jaxpr(mapped)(*inputs))
    assert ("f32[6,4,10,4]" in text) != in_turn  # three times a batch of two


@pytest.mark.parametrize("table", [False, True], ids=["folded", "in turn"])
def test_vmap_of_grad_and_grad_of_vmap(table):
    axes = (0, 0, None, 0, None, None)
    q, k, v, lengths, slopes, entries = mapped_inputs(axes)
    entries = entries if table else None
    wanted = (0, 1, 2, 4, 5) if table else (0, 1, 2, 4)

    def loss(*arrays):
        out, lse = mapped_call(*arrays)
        return (out**2).sum() + jnp.where(jnp.isinf(lse), 0.0, lse).sum()

    gradient = jax.jit(jax.grad(loss, argnums=wanted))
    each = jax.jit(jax.vmap(gradient, in_axes=axes))(q, k, v, lengths, slopes, entries)
    expected = [gradient(q[n], k[n], v, lengths[n], slopes, entries) for n in range(3)]
    for found, *right in zip(each, *expected, strict=True):
        assert_close("each", found, np.stack(right), 1e-5, rows=False)

    def total(*arrays):
        return jax.vmap(loss, in_axes=axes)(*arrays).sum()

    summed = jax.jit(jax.grad(total, argnums=wanted))(q, k, v, lengths, slopes, entries)
    for n, found, *right in zip(wanted, summed, *expected, strict=True):
        right = np.stack(right) if axes[n] == 0 else np.sum(right, axis=0)
        assert_close("summed", found, right, 1e-5, rows=False)


def dense(q, k, v, table):
    k, v = (jnp.repeat(t, 2, axis=1) for t in (k, v))
    i, j = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None]
    scores = jnp.einsum("bhmd,bhnd->bhmn", q, k) * q.shape[3] ** -0.5
    scores = scores + table[:, j - i + q.shape[2] - 1]
    probs = jax.nn.softmax(jnp.where(j <= i, scores, -jnp.inf))
    return jnp.einsum("bhmn,bhnd->bhmd", probs, v)


def test_second_derivative():
    inputs = (*qkv(q_len=7, kv_len=7), normal(4, 13))
    directions = [normal(*t.shape, seed=9) for t in inputs]

    def slope(call):
        def along(*arrays):
            gradients = jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=(0, 1, 2, 3))(*arrays)
            return sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))

        return jax.jit(jax.grad(along, argnums=(0, 1, 2, 3)))(*inputs)

    def ours(q, k, v, table):
        return attention(q, k, v, mask=Causal(), bias=RelativeBias(table))

    for found, right in zip(slope(ours), slope(dense), strict=True):
        assert_close("second", found, right, 1e-5, rows=False)


def test_what_no_query_sees_reaches_nothing():
    q, k, v = qkv()
    lengths = jnp.asarray([4, 0])
    bad = jnp.arange(15)[None, None, :, None] >= lengths[:, None, None, None]
    k, v = (jnp.where(bad, jnp.nan, t) for t in (k, v))
    out, lse, _, _, gradients = results(q, k, v, mask=KeyLengths(lengths), query_start=0)
    assert all(np.isfinite(t).all() for t in (out, *gradients.values()))
    assert np.isneginf(lse[1]).all()
    assert not out[1].any()
    assert not gradients["query"][1].any()


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"kv_len": 0}, {"batch": 0}], ids=str)
def test_empty_sizes(sizes):
    q, k, v = qkv(**sizes)
    out, lse, _, _, gradients = results(q, k, v)
    assert out.shape == q.shape
    assert not np.isnan(as_float64(lse)).any()
    assert gradients["key"].shape == k.shape


def test_large_scores_keep_their_gradients():
    q, k, v = qkv()
    check(q * 3e4, k, v, mask=on_jax(DenseMask((np.arange(15) % 3 > 0)[None])))


def test_memory_grows_with_the_length():
    def needed(length):
        x = jax.ShapeDtypeStruct((1, 4, length, 32), jnp.float32)
        loss = jax.grad(lambda q, k, v: attention(q, k, v, mask=Causal()).sum(), argnums=(0, 1, 2))
        return jax.jit(loss).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 4 * 4096**2
    least, most = needed(2048), needed(4096)
    assert most < scores / 4
    assert most < 2.5 * least


def test_masks_and_biases_are_pytrees():
    q, k, v = qkv(q_len=15)
    bias = on_jax(BIASES[0]) + on_jax(T5Bias(np.ones((8, 4))))

    @jax.jit
    def loss(bias, mask):
        return (attention(q, k, v, bias=bias, mask=mask) ** 2).sum()

    gradient = jax.grad(loss)(bias, Causal())
    assert kind(gradient) == kind(bias)
    assert [t.shape for t in gradient.tensors()] == [t.shape for t in bias.tensors()]


@register
@dataclass(frozen=True)
class Stripe(Bias):
    """A user's own: adds `heights[b]` at every other key."""

    heights: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("heights",)

    def values(self, at, xp):
        return self.heights[at.batches][:, None, None, None] * (at.k_pos % 2)

    def fold(self, d_scores, at, xp, gradients):
        gradients[0][at.batches] += xp.sum(d_scores * (at.k_pos % 2), axis=(1, 2, 3))


def test_a_bias_of_ones_own():
    q, k, v = qkv()
    check(q, k, v, bias=Stripe(normal(2)))

    @jax.jit
    @partial(jax.vmap, in_axes=(None, Stripe(0)))
    def call(q, bias):
        return attention(q, k, v, bias=bias)

    heights = normal(3, 2)
    out = call(q, Stripe(heights))
    for n in range(3):
        expected = oracle(q, k, v, bias=Stripe(np.asarray(heights[n])))
        assert_close("out", out[n], expected.out, 1e-5)


def test_other_public_functions():
    q, k, v = qkv(q_len=15, kv_heads=4)
    expected = oracle(q, k, v, mask=Causal(), d_out=np.ones(q.shape))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close("out", out, expected.out, 1e-5)
    out, pullback = attention_vjp(q, k, v, mask=Causal())
    assert_close("d_key", pullback(jnp.ones_like(out)).key, expected.gradients.key, 1e-5)
    assert explain(q, k, v).backend == "tiled"
    assert "jax" in str(explain(q, k, v))
    gpu = explain(q, k, v, device="H200")
    assert gpu.backend == "flash"
    assert explain(Problem.of(library="jax", dtype="float64"), device="T4").backend == "tiled"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dropout_p": 0.1}, ValueError, "seed"),
        ({"dropout_p": 0.1, "seed": jnp.ones(1)}, TypeError, "seed"),
        ({"dropout_p": 0.1, "seed": jnp.arange(2)}, ValueError, "seed"),
        ({"mask": KeyLengths(jnp.ones(2))}, ValueError, "KeyLengths"),
        ({"bias": DenseBias(["a"])}, TypeError, "bias"),
        ({"sinks": jnp.ones(3)}, ValueError, "sinks"),
        ({"mask": Causal()}, ValueError, "query_start"),
        ({"key": np.ones((2, 2, 15, 4), np.float32)}, TypeError, "key"),
        ({"value": jnp.ones((2, 2, 14, 4))}, ValueError, "value"),
    ],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_errors(change, error, text, jit):
    q, k, v = qkv()
    inputs = {"query": q, "key": k, "value": v, **change}

    def call(query):
        return attention(**{**inputs, "query": query})

    with pytest.raises(error, match=text):
        (jax.jit(call) if jit else call)(q)


def test_forward_mode_is_refused():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))
