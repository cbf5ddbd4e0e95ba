"""CuPy arrays on a GPU: no torch, the caller's current stream, against the float64 oracle."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from limelight import attention, attention_vjp, explain
from limelight.testing import TOLERANCES, assert_close, oracle

cupy = pytest.importorskip("cupy")
from test_terms import HEAD_DIM, SIZE, biases, masks

from limelight import ALiBi, Causal, KeyLengths

pytestmark = pytest.mark.gpu
MASKS, BIASES = masks(), biases()
DTYPES = ["float16", "float32", "float64"]
CASES = {
    "sinks": {"mask": Causal(), "query_start": "end", "softcap": 3.0, "sinks": True},
    "tables": {"mask": MASKS[4], "bias": BIASES[6] + BIASES[0]},
    "dense": {"mask": MASKS[9], "bias": BIASES[2]},
    "dropout": {"mask": MASKS[12], "bias": BIASES[1], "dropout_p": 0.3, "seed": 5},
}


def inputs(dtype, seed=0):
    rng = np.random.default_rng(seed)
    batch, heads, q_len, kv_len = SIZE
    shapes = [(batch, q_len, heads, HEAD_DIM), *[(batch, kv_len, 2, HEAD_DIM)] * 2]
    # Strided, as heads come out of a projection.
    return [cupy.asarray(rng.normal(size=s), dtype).transpose(0, 2, 1, 3) for s in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case, dtype):
    q, k, v = inputs(dtype)
    options = {"query_start": 1, **CASES[case]}
    if options.pop("sinks", False):
        options["sinks"] = cupy.linspace(-1, 1, 4, dtype="float32")
    placed = dict(options)
    for name in ("mask", "bias"):
        if name in options:
            placed[name] = options[name].map_tensors(cupy.asarray)
    assert explain(q, k, v, **placed).backend == ("math" if dtype == "float64" else "flash")
    (out, lse), pullback = attention_vjp(q, k, v, return_lse=True, **placed)
    d_out = cupy.asarray(np.random.default_rng(1).normal(size=out.shape), dtype)
    d_lse = cupy.asarray(np.random.default_rng(2).normal(size=lse.shape), lse.dtype)
    found = pullback(d_out, d_lse)
    arrived = {"d_out": d_out.get().astype(float), "d_lse": d_lse.get().astype(float)}
    if "sinks" in options:
        options["sinks"] = options["sinks"].get()
    expected = oracle(*(t.get() for t in (q, k, v)), **arrived, **options)
    close = 5 * TOLERANCES[dtype]
    assert_close("out", out.get(), expected.out, close)
    assert_close("lse", lse.get(), expected.lse, close, rows=False)
    for name in ("query", "key", "value"):
        right = getattr(expected.gradients, name)
        assert_close(name, getattr(found, name).get(), right, close, rows=False)
    for gradient, right in zip(found.bias, expected.gradients.bias, strict=True):
        assert_close("bias", gradient.get(), right, max(close, 1e-5), rows=False)


def test_runs_in_the_current_stream():
    """Behind what the stream still has to do."""
    q, k, v = inputs("float32")
    expected = attention(q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.zeros_like(q)
        busy = cupy.ones((4096, 4096), "float32")
        for _ in range(20):
            busy = busy @ busy * 1e-4
        late += q + 0 * busy[0, 0]
        out = attention(late, k, v)
    stream.synchronize()
    assert_close("out", out.get(), expected.get(), 1e-6)


def test_a_drawn_seed_and_python_lists():
    q, k, v = inputs("float16")
    out = attention(q, k, v, dropout_p=0.5)
    assert out.shape == q.shape
    out = attention(q, k, v, mask=KeyLengths([15, 3]), bias=ALiBi(), query_start=[0, 2])
    assert cupy.isfinite(out).all()


def test_needs_no_torch():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import cupy, limelight
x = cupy.ones((1, 2, 32, 16), "float16")
out, pullback = limelight.attention_vjp(x, x, x, mask=limelight.Causal())
print(float(pullback(out).value.sum()), limelight.explain(x, x, x).backend)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1024.0", "flash"]
