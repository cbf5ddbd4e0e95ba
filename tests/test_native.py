"""Backends that autograd follows by itself: what limelight adds to that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from inputs import qkv
from torch.fx.experimental.proxy_tensor import make_fx

from limelight import attention, backends, dispatch, record, scaled_dot_product_attention
from limelight.adapters.torch import native
from limelight.adapters.torch.adapter import ADAPTER
from limelight.adapters.torch.shortcuts import Shortcuts
from limelight.backends.base import Reason
from limelight.backends.torch_cpu import TorchCPU
from limelight.testing import check

operator = torch._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture(autouse=True)
def native_on_the_cpu(monkeypatch):
    """`torch_cpu` as the backends for CUDA are: the bare operator."""

    def run(call, query, key, value):
        causal = call.mask is not None
        return operator(query, key, value, 0.0, causal, scale=call.scale)

    def shortcut(self, call):
        return lambda query, key, value: run(call, query, key, value)[0]

    refusals = TorchCPU.why_not

    def why_not(self, problem):
        learned = problem.return_lse and problem.gradients
        return refusals(self, problem) + [Reason("has no gradient of the LSE", "", "")] * bool(
            learned
        )

    monkeypatch.setattr(TorchCPU, "why_not", why_not)
    monkeypatch.setattr(TorchCPU, "native", True)
    monkeypatch.setattr(TorchCPU, "shortcut", shortcut)
    monkeypatch.setattr(
        TorchCPU, "forward", lambda self, call: run(call, call.query, call.key, call.value)
    )
    monkeypatch.setattr(ADAPTER, "_choices", {})
    monkeypatch.setattr(ADAPTER, "_shortcuts", Shortcuts())
    dispatch.decide.cache_clear()
    with backends("torch_cpu"):
        yield
    dispatch.decide.cache_clear()


def test_no_function_of_ours_stands_between():
    q, k, v = qkv()
    for _ in range(3):  # planned, then by the shortcut
        assert "FlashAttentionForCpu" in attention(q, k, v).grad_fn.name()


def test_gradients():
    q, k, v = qkv(q_len=33, kv_len=40, dtype=torch.float64)
    for _ in range(3):
        check(q, k, v)


def test_some_gradients():
    q, k, v = qkv(dtype=torch.float64)
    check(q, k.detach(), v)
    check(q.detach(), k.detach(), v)


@pytest.mark.parametrize("learned", ["qkv", "q", "kv"])
def test_a_second_derivative_is_that_of_tiled(learned):
    inputs = [
        tensor.requires_grad_(name in learned)
        for name, tensor in zip("qkv", qkv(dtype=torch.float64, grad=False), strict=True)
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = []
    for backend in ("torch_cpu", "tiled"):
        with backends(backend):
            out = attention(*inputs)
            first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
            penalty = sum(gradient.square().sum() for gradient in first)
            found.append((*first, *torch.autograd.grad(penalty, wanted)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_graph_that_is_kept_is_run_again():
    q, k, v = qkv(dtype=torch.float64)
    out = attention(q, k, v).square().sum()
    first = torch.autograd.grad(out, q, create_graph=True)[0]
    again = torch.autograd.grad(out, q, retain_graph=True)[0]
    torch.testing.assert_close(first, again)
    assert first.grad_fn is not None
    assert again.grad_fn is None


def test_an_odd_gradient_is_laid_out_again(monkeypatch):
    seen = []
    regular = native.regular
    monkeypatch.setattr(native, "regular", lambda d_out: seen.append(d_out) or regular(d_out))
    q, k, v = qkv()
    out = attention(q, k, v)
    out.sum().backward()
    assert seen[0].stride() == (0, 0, 0, 0)
    assert regular(seen[0]).is_contiguous()


def test_record_sees_every_stage():
    q, k, v = qkv()
    with record() as calls:
        for _ in range(2):
            attention(q, k, v).sum().backward()
        first = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)[0]
        first.sum().backward()
    stages = [call.stage for call in calls]
    assert stages[:4] == ["forward", "backward"] * 2
    assert stages[4:7] == ["forward", "backward", "double backward"]


def test_nothing_keeps_the_tensors_alive():
    """A hook that held a tensor of the graph would hold the graph, and nobody would free it."""
    import gc
    import weakref

    q, k, v = qkv()
    hidden = q * 2
    out = attention(hidden, k, v)
    dead = [weakref.ref(hidden), weakref.ref(out)]
    gc.disable()
    try:
        del hidden, out
        assert [each() for each in dead] == [None, None]
    finally:
        gc.enable()


def test_a_call_that_looks_different_takes_no_shortcut():
    """Whatever differs, by turns, so that each finds the others among the calls of before."""
    q, k, v = (t.detach() for t in qkv(q_len=12, kv_len=16))
    kinds = {
        "plain": (q, k, v),
        "shorter": (q[:, :, :7], k, v),
        "fewer keys": (q, k[:, :, :5], v[:, :, :5]),
        "fewer heads": (q[:, :2], k[:, :2], v[:, :2]),
        "other strides": tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)),
        "float64": (q.double(), k.double(), v.double()),
        "learned": (q.clone().requires_grad_(), k, v),
        "narrow": (q[..., :4], k[..., :4], v[..., :4]),
        "off by 4 bytes": tuple(
            torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (q, k, v)
        ),
    }
    for _ in range(4):
        for name, (query, key, value) in kinds.items():
            for scale in (None, 0.5):
                out = scaled_dot_product_attention(query, key, value, scale=scale)
                want = F.scaled_dot_product_attention(query, key, value, scale=scale)
                torch.testing.assert_close(out, want, msg=lambda text, name=name: f"{name}: {text}")
                assert out.requires_grad == (name == "learned")
                again = attention(query, key, value, scale=scale, query_start=0)
                torch.testing.assert_close(again, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_shortcut_is_not_for_another_state_of_the_thread():
    q, k, v = qkv()
    for _ in range(4):
        with torch.no_grad():
            assert not scaled_dot_product_attention(q, k, v).requires_grad
        out = scaled_dot_product_attention(q, k, v)
        assert out.requires_grad
        out.sum().backward()  # by the hook that lays a gradient out again
    nested = [torch.nested.nested_tensor([t.detach()[0], t.detach()[1]]) for t in (q, k, v)]
    with pytest.raises(TypeError, match="a nested tensor"):
        attention(*nested)
    with pytest.raises((TypeError, ValueError), match="scale"):
        scaled_dot_product_attention(q, k, v, scale=np.ones(2))


def test_a_shortcut_is_not_for_a_trace():
    q, k, v = (t.detach() for t in qkv())
    for _ in range(4):
        scaled_dot_product_attention(q, k, v)
    traced = make_fx(lambda *inputs: scaled_dot_product_attention(*inputs))(q, k, v)
    assert any("limelight.attention" in str(node.target) for node in traced.graph.nodes)


def test_a_flag_in_a_tensor_is_read_each_time():
    q, k, v = (t.detach() for t in qkv())
    flag = torch.tensor(True)
    for causal in (True, True, True, False, True):
        flag.fill_(causal)
        out = scaled_dot_product_attention(q, k, v, is_causal=flag)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
