"""NumPy arrays: without torch in the process, with pullbacks, lists, half precision, odd strides."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    NoBackendError,
    attention,
    attention_vjp,
    backends,
    explain,
    record,
)
from limelight.testing import TOLERANCES, assert_close, oracle


def arrays(dtype=np.float32, kv_heads=2, m=7, n=9):
    rng = np.random.default_rng(0)
    shapes = ((2, 4, m, 8), (2, kv_heads, n, 8), (2, kv_heads, n, 6))
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "jax", "triton", "cupy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import limelight as ll

q, k, v = (np.random.default_rng(n).normal(size=(2, 4, 6, 8)) for n in range(3))
options = dict(
    mask=ll.Causal() & ll.KeyLengths([6, 3]) | ll.SlidingWindow(1),
    bias=ll.ALiBi() + ll.DenseBias(np.ones((6, 6))),
    sinks=np.zeros(4), softcap=5.0, dropout_p=0.2, seed=1,
)
out, pullback = ll.attention_vjp(q, k, v, **options)
gradients = pullback(np.ones_like(out))
assert np.isfinite(out).all() and np.isfinite(gradients.key).all()
print(ll.explain(q, k, v, **options))
with ll.record() as calls:
    ll.attention(q, k, v)
    ll.scaled_dot_product_attention(q, k, v, is_causal=True)
print(calls)
from limelight import reference
right = reference.attention(q, k, v, **options)
assert np.allclose(out, right.out)
assert not {"torch", "jax", "triton"} & set(sys.modules)
print("fine")
"""


def test_without_torch():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "fine"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_pullback_against_the_oracle(dtype, options):
    q, k, v = arrays(dtype)
    rng = np.random.default_rng(5)
    given = {}
    if options == "all":
        given = {
            "mask": Causal() & KeyLengths(np.array([9, 4])),
            "query_start": "end",
            "bias": ALiBi(np.abs(rng.normal(size=4))) + DenseBias(rng.normal(size=(7, 1))),
            "sinks": rng.normal(size=4).astype(dtype),
            "softcap": 4.0,
            "dropout_p": 0.25,
            "seed": 11,
        }
    (out, lse), pullback = attention_vjp(q, k, v, return_lse=True, **given)
    d_out = rng.normal(size=out.shape).astype(dtype)
    d_lse = rng.normal(size=lse.shape).astype(lse.dtype)
    found = pullback(d_out, d_lse)
    right = oracle(q, k, v, d_out=d_out, d_lse=d_lse, **given)
    tolerance = TOLERANCES[np.dtype(dtype).name]
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_close("out", out, right.out, tolerance)
    assert_close("lse", lse, right.lse, tolerance, rows=False)
    pairs = zip(
        (*found[:4], *found.bias), (*right.gradients[:4], *right.gradients.bias), strict=True
    )
    for n, (gradient, expected) in enumerate(pairs):
        if expected is not None:
            assert_close(f"gradient {n}", gradient, expected, 3 * tolerance)
    assert [g.dtype for g in found[:3]] == [dtype] * 3


def test_pullback_of_the_output_alone():
    q, k, v = arrays(np.float64)
    out, pullback = attention_vjp(q, k, v)
    found = pullback(np.ones_like(out))
    right = oracle(q, k, v, d_out=np.ones_like(out)).gradients
    assert_close("d_key", found.key, right.key, 1e-9, slack=1e-12)
    assert_close("d_value", found.value, right.value, 1e-12)
    assert found.sinks is None
    assert found.bias == ()


def test_pullback_twice_gives_the_same():
    q, k, v = arrays()
    out, pullback = attention_vjp(q, k, v, dropout_p=0.5)
    first, second = pullback(np.ones_like(out)), pullback(np.ones_like(out))
    np.testing.assert_array_equal(first.value, second.value)


def test_pullback_of_torch_tensors():
    import torch

    q, k, v = (torch.from_numpy(array).requires_grad_() for array in arrays(np.float64))
    out, pullback = attention_vjp(q, k, v, mask=Causal(), query_start=0)
    found = pullback(torch.ones_like(out))
    right = oracle(q, k, v, mask=Causal(), query_start=0, d_out=torch.ones_like(out)).gradients
    assert_close("d_query", found.query, right.query, 1e-12)
    assert_close("d_key", found.key, right.key, 1e-12)


def test_the_forward_and_the_pullback_are_recorded():
    q, k, v = arrays()
    with record() as calls:
        out, pullback = attention_vjp(q, k, v)
        pullback(np.ones_like(out))
    assert [(call.stage, call.backend) for call in calls] == [
        ("forward", "math"),
        ("backward", "math"),
    ]


def test_lists_are_arrays_of_parameters():
    q, k, v = arrays()
    listed = attention(
        q, k, v, mask=KeyLengths([9, 4]) & Documents([0] * 5 + [1] * 4), bias=ALiBi([0.5, 0.25, 0.125, 1.0]),
        sinks=[0.0, 1.0, 2.0, 3.0], query_start=[0, 2],
    )  # fmt: skip
    given = attention(
        q, k, v, mask=KeyLengths(np.array([9, 4])) & Documents(np.array([0] * 5 + [1] * 4)),
        bias=ALiBi(np.array([0.5, 0.25, 0.125, 1.0])), sinks=np.arange(4.0), query_start=np.array([0, 2]),
    )  # fmt: skip
    assert_close("out", listed, given, 1e-6)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_integers_of_every_width(dtype):
    q, k, v = arrays(n=300)
    lengths = np.array([100, 3], dtype)
    options = {"mask": Causal() & KeyLengths(lengths), "query_start": "end"}
    right = {
        "mask": Causal() & KeyLengths(lengths.astype(np.int64)),
        "query_start": np.array([93, -4]),
    }
    assert_close("out", attention(q, k, v, **options), attention(q, k, v, **right), 1e-6)
    ids = np.repeat(np.arange(3), 100).astype(dtype)
    found = attention(q, k, v, mask=Documents(ids), query_start=295)
    assert_close(
        "out",
        found,
        attention(q, k, v, mask=Documents(ids.astype(np.int64)), query_start=295),
        1e-6,
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[:, :, ::-1],
        lambda a: a[..., ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a.astype(">f4"),
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (0, *a.strides[1:])),
        lambda a: _unaligned(a),
        lambda a: _read_only(a),
    ],
    ids=[
        "reversed",
        "last reversed",
        "Fortran",
        "big-endian",
        "broadcast",
        "stride 0",
        "unaligned",
        "read-only",
    ],
)
def test_views(view):
    q, k, v = (view(array) for array in arrays(kv_heads=4))
    found, pullback = attention_vjp(q, k, v, mask=Causal(), query_start=2)
    right = oracle(q, k, v, mask=Causal(), query_start=2, d_out=np.ones_like(found))
    assert_close("out", found, right.out, 1e-5)
    assert_close("d_value", pullback(np.ones_like(found)).value, right.gradients.value, 1e-5)


def _unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _read_only(array):
    array.flags.writeable = False
    return array


def test_the_inputs_are_left_as_they_were():
    q, k, v = arrays()
    bias, mask = np.ones((7, 9), np.float32), np.ones((7, 9), bool)
    before = [array.copy() for array in (q, k, v, bias, mask)]
    out, pullback = attention_vjp(q, k, v, bias=DenseBias(bias), mask=DenseMask(mask))
    pullback(np.ones_like(out))
    for found, expected in zip((q, k, v, bias, mask), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_only_math_runs_numpy():
    q, k, v = arrays()
    choice = explain(q, k, v)
    assert choice.backend == "math"
    assert any("torch" in reason.rule.lower() for reason in choice.reasons["tiled"])
    with backends("tiled"), pytest.raises(NoBackendError, match="numpy arrays"):
        attention(q, k, v)


def test_no_warning_of_hidden_rows_and_infinities():
    """Warnings are errors in this suite: dividing by zero or taking its log would show."""
    q, k, v = arrays()
    k[:, :, 5:], v[:, :, 5:] = np.nan, np.inf
    out, pullback = attention_vjp(q, k, v, mask=KeyLengths([5, 0]), return_lse=False)
    gradients = pullback(np.ones_like(out))
    assert np.isfinite(out).all()
    assert (out[1] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients[:3])


@pytest.mark.parametrize(("m", "n"), [(0, 9), (7, 0), (0, 0)])
def test_empty_sizes(m, n):
    q, k, v = arrays(m=m, n=n)
    (out, lse), pullback = attention_vjp(q, k, v, return_lse=True, mask=Causal(), query_start="end")
    assert out.shape == (2, 4, m, 6)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    gradients = pullback(np.ones_like(out), np.ones_like(lse))
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape]
