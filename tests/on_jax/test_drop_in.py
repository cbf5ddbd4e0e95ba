"""`limelight.jax.dot_product_attention` in the place of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax_inputs import normal

from limelight import ALiBi, Causal, record
from limelight.jax import dot_product_attention
from limelight.testing import assert_close

LENGTHS = {
    "query_seq_lengths": jnp.asarray([5, 9], jnp.int32),
    "key_value_seq_lengths": jnp.asarray([9, 7], jnp.int32),
}
CASES = [
    {"is_causal": True, "scale": -0.3, "return_residual": True},
    {"bias": normal(1, 4, 9, 9), "mask": jnp.asarray(np.tri(9, 9, 3, bool))[None, None]},
    {"local_window_size": (3, 1), **LENGTHS},
    {"local_window_size": 2, "is_causal": True},
]


def inputs(batch=(2,)):
    return (normal(*batch, 9, heads, 8, seed=n) for n, heads in enumerate((4, 2, 2)))


def test_it_takes_the_same_arguments():
    own, jaxs = (
        inspect.signature(function).parameters
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(p.name, p.kind, p.default) for p in own.values()] == [
        (p.name, p.kind, p.default) for p in jaxs.values()
    ]


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(options))
def test_values_and_gradients(options):
    q, k, v = inputs()
    d_out = normal(*q.shape, seed=7)

    def run(call):
        def loss(q, k, v, bias):
            found = call(q, k, v, **{**options, "bias": bias})
            out = found[0] if isinstance(found, tuple) else found
            return (out * d_out).sum(), found

        wanted = (0, 1, 2, 3) if "bias" in options else (0, 1, 2)
        step = jax.jit(jax.grad(loss, argnums=wanted, has_aux=True))
        return jax.tree.leaves(step(q, k, v, options.get("bias")))

    pairs = zip(run(dot_product_attention), run(jax.nn.dot_product_attention), strict=True)
    for found, right in pairs:
        assert_close("result", found, right, 1e-5, rows=False)


def test_without_a_batch():
    q, k, v = inputs(batch=())
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    expected = jax.nn.dot_product_attention(q, k, v, return_residual=True)
    assert_close("out", out, expected[0], 1e-5)
    assert_close("lse", lse, expected[1], 1e-5)


def test_limelights_own_masks_and_biases():
    q, k, v = inputs()
    out = dot_product_attention(q, k, v, ALiBi(), Causal())
    offset = -jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)[None])
    bias = jnp.asarray(ALiBi.paper_slopes(4))[None, :, None, None] * offset
    expected = jax.nn.dot_product_attention(q, k, v, bias, is_causal=True)
    assert_close("out", out, expected, 1e-5)


def test_implementation():
    q, k, v = inputs()
    with record() as calls:
        dot_product_attention(q, k, v, implementation="xla")
    assert not len(calls)
    for wrong, options in (("fast", {}), ("xla", {"bias": ALiBi()})):
        with pytest.raises(ValueError, match="implementation"):
            dot_product_attention(q, k, v, implementation=wrong, **options)


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize("wrong", [jnp.ones(2), jnp.ones(3, jnp.int32)], ids=["float", "three"])
def test_wrong_lengths(name, wrong):
    with pytest.raises((TypeError, ValueError), match=name):
        dot_product_attention(*inputs(), **{name: wrong})


@pytest.mark.parametrize("window", [(1, 2, 3), [1, 2], "a", 1.5, True])
def test_a_window_is_one_integer_or_two(window):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="local_window_size: found"):
        dot_product_attention(x, x, x, local_window_size=window)
