"""JAX on a GPU: the fused kernels as steps of JAX's programs, against the oracle and JAX's own."""

from __future__ import annotations

import time

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax_inputs import check, normal, on_jax, qkv
from test_terms import biases, masks

import limelight.jax
from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DenseBias,
    KeyLengths,
    RelativeBias,
    SlidingWindow,
    attention,
    explain,
    record,
)
from limelight.testing import assert_close


def has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="needs JAX on a GPU")]
BIASES, MASKS = biases(), masks()
CASES = {
    "plain": {},
    "sinks": {"mask": Causal(), "query_start": "end", "softcap": 3.0, "sinks": (4,)},
    "tables": {"mask": MASKS[4] & SlidingWindow(9), "bias": BIASES[6] + BIASES[8] + BIASES[0]},
    "dense": {"mask": MASKS[9], "bias": BIASES[2] + BIASES[9]},
    "rows": {"mask": MASKS[10] | MASKS[15], "bias": BIASES[10]},
    "relative keys": {"mask": Causal(), "bias": BIASES[15]},
    "dropout": {"bias": BIASES[1], "dropout_p": 0.3, "seed": 5},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case, dtype):
    options = {"query_start": 1, **CASES[case]}
    for name in ("mask", "bias"):
        if name in options:
            options[name] = on_jax(options[name])
    if "sinks" in options:
        options["sinks"] = normal(*options["sinks"])
    q, k, v = qkv(dtype=jnp.dtype(dtype))
    assert explain(q, k, v, **options).backend == "flash"
    check(q, k, v, **options)


def test_float32_in_halves():
    """Two launches of each kernel share their outputs."""
    bias = ALiBi(jnp.abs(normal(4)))
    check(*qkv(q_len=520, kv_len=600, head_dim=32), mask=Causal(), query_start="end", bias=bias)


def gradients(call, inputs, **options):
    def loss(*arrays):
        return (call(*arrays, **options).astype(jnp.float32) ** 2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)


@pytest.mark.parametrize("lengths", [False, True], ids=["full", "padded"])
def test_dot_product_attention_under_jit_of_grad(lengths):
    """As it lies in memory, so nothing is transposed."""
    q, k, v = (t.swapaxes(1, 2) for t in qkv(q_len=200, kv_len=200, head_dim=64))
    options = {"is_causal": True, "local_window_size": (60, 0)}
    if lengths:
        options |= {"key_value_seq_lengths": jnp.asarray([200, 77], jnp.int32)}
        options |= {"query_seq_lengths": jnp.asarray([120, 77], jnp.int32)}
    with jax.default_matmul_precision("highest"):
        expected = gradients(jax.nn.dot_product_attention, (q, k, v), **options)
        with record() as calls:
            found = gradients(limelight.jax.dot_product_attention, (q, k, v), **options)
    assert {call.backend for call in calls} == {"flash"}
    for name, gradient, right in zip("qkv", found, expected, strict=True):
        assert_close(name, gradient, right, 1e-5, rows=False)


def test_vmap():
    q, k, v = (jnp.stack([t, 2 * t]) for t in qkv())
    tables = normal(2, 4, 9)

    def call(q, k, v, lengths, table):
        mask, bias = KeyLengths(lengths), ALiBi(jnp.ones(4))
        if table is not None:
            bias = bias + RelativeBias(table)
        return attention(q, k, v, mask=mask, bias=bias)

    def loss(*arrays):
        return (call(*arrays) ** 2).sum()

    lengths = jnp.asarray([[15, 3], [7, 0]])
    for table, wanted in ((None, (0, 1)), (tables, (0, 4))):
        axes = (0, 0, 0, 0, None if table is None else 0)
        found = jax.jit(jax.vmap(jax.grad(loss, argnums=wanted), in_axes=axes))(
            q, k, v, lengths, table
        )
        for n in range(2):
            own = (q[n], k[n], v[n], lengths[n], None if table is None else table[n])
            right = jax.grad(loss, argnums=wanted)(*own)
            for gradient, expected in zip(found, right, strict=True):
                assert_close("gradient", gradient[n], expected, 1e-5, rows=False)


def test_arrays_of_the_cpu_beside_a_gpu():
    """A traced call does not know where it will run."""
    with jax.default_device(jax.devices("cpu")[0]):
        inputs = qkv()
    gradient = jax.grad(lambda q, k, v: attention(q, k, v).sum())(*inputs)
    assert {device.platform for device in gradient.devices()} == {"cpu"}
    expected = jax.grad(lambda q, k, v: attention(q, k, v).sum())(*map(jnp.array, inputs))
    assert_close("query", gradient, expected, 1e-4)


def test_block_sparse_and_dense_gradient():
    q, k, v = qkv(q_len=256, kv_len=256, head_dim=64, dtype=jnp.float16)
    blocks = np.random.default_rng(0).random((2, 4, 4, 4)) < 0.5
    mask = BlockSparse(jnp.asarray(blocks), 64, 64)
    check(q, k, v, mask=mask, bias=DenseBias(normal(1, 4, 256, 256)))


def milliseconds(run, *inputs) -> float:
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(*inputs) for _ in range(10)])
        times.append((time.perf_counter() - start) * 100)
    return float(np.median(times))


def test_faster_than_xla_at_4096():
    q, k, v = (normal(2, 4096, 16, 64, dtype=jnp.bfloat16, seed=n) for n in range(3))

    def step(implementation):
        own = limelight.jax.dot_product_attention
        call = jax.nn.dot_product_attention if implementation else own

        def loss(q, k, v):
            out = call(q, k, v, is_causal=True, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    ours, xla = step(None), step("xla")
    for name, found, right in zip("qkv", ours(q, k, v), xla(q, k, v), strict=True):
        assert_close(name, found, right, 3e-2, rows=False)
    times = {name: milliseconds(run, q, k, v) for name, run in (("ours", ours), ("xla", xla))}
    print(times, "cudnn", milliseconds(step("cudnn"), q, k, v))
    assert times["ours"] < times["xla"]
