"""What an adversary found once: each stays found."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from inputs import qkv

from limelight import (
    Bias,
    Causal,
    DenseBias,
    DenseMask,
    KeyLengths,
    Mask,
    NoBackendError,
    Problem,
    SlidingWindow,
    attention,
    backends,
    explain,
    record,
)
from limelight.dispatch import allowed
from limelight.testing import check


def test_left_padding_with_fewer_keys_than_queries():
    q, k, v = qkv(q_len=50, kv_len=50)
    padding = DenseMask(torch.arange(50).reshape(1, 1, 1, 50) > 1)
    check(q, k, v, mask=Causal() & padding & KeyLengths(torch.tensor([40, 50])))
    q, k, v = qkv(q_len=50, kv_len=40)
    check(q, k, v, mask=Causal() & DenseMask(padding.tensor[..., :40]), query_start=0)


def test_an_empty_batch_with_a_causal_dense_mask():
    q, k, v = qkv(batch=0)
    check(q, k, v, mask=Causal() & DenseMask(torch.ones(0, 1, 1, 9, dtype=torch.bool)))


@pytest.mark.parametrize("extra", [Causal(), KeyLengths([3, 3])], ids=["causal", "lengths"])
def test_nan_that_two_masks_hide_together(extra):
    q, k, v = qkv(q_len=4, kv_len=4)
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[3, 3] = False  # the other mask hides key 3 from the queries before
    v.data[:, :, 3] = float("nan")
    check(q, k, v, mask=extra & DenseMask(visible))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bias_that_is_bad_where_causality_hides(bad):
    q, k, v = qkv(q_len=8, kv_len=8)
    bias = torch.zeros(8, 8)
    bias[0, 7] = bad
    out = attention(q, k, v, mask=Causal(), bias=DenseBias(bias))
    assert torch.equal(out, attention(q, k, v, mask=Causal(), bias=DenseBias(torch.zeros(8, 8))))


def test_the_newer_switch_for_tf32():
    q, k, v = qkv()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        check(q, k, v)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_and_transforms_are_refused():
    q, k, v = qkv(grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward"):
            attention(dual, k, v)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    attention(q, k, v, sinks=torch.zeros(4))  # a later call that looks like it skips its checks
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda k: attention(q, k, v).sum())(k)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(lambda sinks: attention(q, k, v, sinks=sinks))(torch.zeros(2, 4))


@pytest.mark.parametrize("width", [np.uint8(3), np.uint64(3), np.int32(3)], ids=repr)
def test_widths_of_numpy(width):
    assert SlidingWindow(width) == SlidingWindow(3)
    assert type(SlidingWindow(width).left) is int


def test_masked_arrays_are_refused():
    plain = np.ones((1, 1, 4, 4), np.float32)
    with pytest.raises(TypeError, match="value: found a masked array"):
        attention(plain, plain, np.ma.MaskedArray(plain))


def test_the_default_dtype_does_not_round_lists():
    q, k, v = qkv(grad=False)
    right = attention(q, k, v, sinks=[0.1, 0.2, 0.3, 0.4])
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attention(q, k, v, sinks=[0.1, 0.2, 0.3, 0.4])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_unsigned_arrays_are_taken_as_tensors_are(dtype):
    q, k, v = qkv(grad=False)
    lengths = np.array([9, 4], dtype)
    found = attention(q, k, v, mask=KeyLengths(lengths))
    assert torch.equal(found, attention(q, k, v, mask=KeyLengths(torch.tensor([9, 4]))))


def test_arrays_given_as_lengths_are_copied():
    q, k, v = qkv()
    lengths = np.array([9, 9])
    out = attention(q, k, v, mask=KeyLengths(lengths))
    lengths[:] = 2
    (found,) = torch.autograd.grad(out.sum(), v)
    (right,) = torch.autograd.grad(attention(q, k, v, mask=KeyLengths([9, 9])).sum(), v)
    assert torch.equal(found, right)


def _distance(factor):
    @dataclass(frozen=True)
    class Distance(Bias):
        def values(self, at, xp):
            return xp.astype(at.k_pos - at.q_pos, at.dtype) * factor

    return Distance()


def test_two_classes_of_one_name_under_compile():
    q, k, v = qkv(grad=False)
    first, second = _distance(0.1), _distance(5.0)
    assert first.spec() != second.spec()
    run = torch.compile(lambda q: attention(q, k, v, bias=first), backend="aot_eager")
    torch.testing.assert_close(run(q), attention(q, k, v, bias=first))


def test_a_field_that_is_in_no_list_is_refused():
    @dataclass(frozen=True)
    class Strided(Mask):
        step: int

        def values(self, at, xp):
            return (at.q_pos - at.k_pos) % self.step == 0

    with pytest.raises(TypeError, match=r"Strided: found the fields step"):
        attention(*qkv(grad=False), mask=Strided(2))


@pytest.mark.parametrize(
    "values",
    [None, True, torch.ones(9, 9, dtype=torch.bool), torch.ones(1, 1, 9, 9)],
    ids=["nothing", "a bool", "two dimensions", "floats"],
)
@pytest.mark.parametrize("backend", ["tiled", "math"])
def test_values_that_are_none_are_refused_with_the_class(values, backend):
    class Odd(Mask):
        def values(self, at, xp):
            return values

    with backends(backend), pytest.raises(TypeError, match=r"Odd\.values: found"):
        attention(*qkv(grad=False), mask=Odd())


@pytest.mark.parametrize("value", ['"', "\\", "a\nb", float("inf"), -float("inf"), 1e-300, True])
def test_plain_fields_come_back(value):
    from limelight.terms import from_spec

    @dataclass(frozen=True)
    class Named(Mask):
        name: object
        plain_fields = ("name",)

    assert from_spec(Named(value).spec(), iter(())) == Named(value)


def test_restrictions_that_overlap_end():
    first, second = backends("math"), backends("tiled")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert allowed() == ("tiled",)
    second.__exit__(None, None, None)
    assert allowed() is None


def test_records_of_many_threads_end():
    from limelight import dispatch

    def work():
        for _ in range(300):
            with record():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dispatch._records == ()


def test_errors_and_problems_survive_pickling():
    with backends("flash"), pytest.raises(NoBackendError) as caught:
        attention(*qkv(grad=False))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    problem = explain(Problem.of()).problem
    hash(problem)
    assert "_hash" not in problem.__getstate__()
    assert pickle.loads(pickle.dumps(problem)) in {problem}


def test_composites_of_the_wrong_kind():
    from limelight.masks import And

    with pytest.raises(TypeError, match="And: found Distance"):
        And((Causal(), _distance(1.0)))  # type: ignore[arg-type]
