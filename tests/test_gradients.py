"""Gradients: of any subset of inputs, of parameters that broadcast, of every order, repeatable."""

from __future__ import annotations

import itertools

import pytest
import torch
from inputs import normal, qkv
from torch.utils.checkpoint import checkpoint

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    DenseMask,
    KeyLengths,
    SlidingWindow,
    attention,
    record,
)
from limelight.testing import assert_close, check, oracle

pytestmark = pytest.mark.usefixtures("nan_memory")

INPUTS = ("query", "key", "value", "sinks", "slopes", "dense")


def everything(device, wanted=INPUTS, dtype=torch.float32, **sizes):
    """Inputs and options with every differentiable tensor; those in `wanted` want a gradient."""
    sizes = {"kv_heads": 2, "q_len": 7, "kv_len": 10, "head_dim": 4, **sizes}
    q, k, v = qkv(device=device, dtype=dtype, **sizes)
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    sinks, slopes = (normal(heads, device=device, dtype=dtype) for _ in range(2))
    dense = normal(q_len, kv_len, device=device, dtype=dtype)
    named = dict(zip(INPUTS, (q, k, v, sinks, slopes, dense), strict=True))
    for name, tensor in named.items():
        tensor.requires_grad_(name in wanted)
    options = {
        "sinks": sinks,
        "bias": ALiBi(slopes) + DenseBias(dense),
        "mask": Causal(),
        "query_start": "end",
        "softcap": 3.0,
    }
    return named, options


@pytest.mark.parametrize(
    "wanted",
    [c for n in range(7) for c in itertools.combinations(INPUTS, n)],
    ids=lambda wanted: "+".join(wanted) or "none",
)
def test_any_subset_of_inputs(backend, device, wanted):
    named, options = everything(device, wanted)
    q, k, v = named["query"], named["key"], named["value"]
    backend.runs(q, k, v, **options)
    out = attention(q, k, v, **options)
    assert out.requires_grad == bool(wanted)
    check(q, k, v, **options)
    for name, tensor in named.items():
        assert tensor.grad is None, name


def test_backward_leaves_gradients_only_where_they_are_wanted(backend, device):
    named, options = everything(device, wanted=("key", "dense"))
    q, k, v = named["query"], named["key"], named["value"]
    backend.runs(q, k, v, **options)
    attention(q, k, v, **options).sum().backward()
    assert {name for name, tensor in named.items() if tensor.grad is not None} == {"key", "dense"}


def test_no_grad_keeps_no_graph(backend, device):
    named, options = everything(device)
    q, k, v = named["query"], named["key"], named["value"]
    backend.runs(q, k, v, **options)
    with torch.no_grad():
        assert not attention(q, k, v, **options).requires_grad
    with torch.inference_mode():
        out = attention(q, k, v, **options)
    torch.testing.assert_close(out, attention(q, k, v, **options))


def test_gradients_add_up_over_two_backwards(backend, device):
    q, k, v = qkv(device=device)
    backend.runs(q, k, v)
    out = attention(q, k, v)
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(q.grad, 2 * once)


def test_one_tensor_as_query_key_and_value(backend, device):
    x, *_ = qkv(device=device)
    backend.runs(x, x, x, mask=Causal())
    gradient = torch.autograd.grad(attention(x, x, x, mask=Causal()).sum(), x)[0]
    parts = oracle(x, x, x, mask=Causal(), d_out=torch.ones_like(x)).gradients
    assert_close("d_x", gradient, sum(parts[:3]), 1e-5)


def test_an_input_that_changed_since_the_forward_is_refused(backend, device):
    """As PyTorch does for its own operators, instead of gradients of other numbers."""
    q, k, v = qkv(device=device)
    backend.runs(q, k, v)
    out = attention(q, k, v)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


SHAPES = [
    (4, 7, 10), (1, 7, 10), (4, 1, 10), (4, 7, 1), (1, 1, 10), (7, 10), (1, 10), (7, 1), (1, 1),
    (2, 4, 7, 10), (1, 4, 7, 10), (2, 1, 7, 10), (2, 1, 1, 10), (2, 4, 1, 1), (1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_a_bias_that_broadcasts(backend, device, shape, dtype):
    q, k, v = qkv(device=device, kv_heads=2, q_len=7, kv_len=10, dtype=dtype)
    bias = DenseBias(normal(*shape, device=device))
    backend.runs(q, k, v, bias=bias, mask=Causal(), query_start=3)
    check(q, k, v, bias=bias, mask=Causal(), query_start=3)


def test_gradient_of_a_bias_over_many_tiles(backend, device):
    q, k, v = qkv(device=device, batch=1, heads=1, q_len=259, kv_len=515)
    for shape in ((1, 1, 259, 515), (1, 515), (259, 1)):
        bias = DenseBias(normal(*shape, device=device)) + ALiBi(normal(1, 1, device=device) / 100)
        backend.runs(q, k, v, bias=bias)
        check(q, k, v, bias=bias)


def test_slopes_of_each_batch_element(backend, device):
    q, k, v = qkv(device=device)
    bias = ALiBi(normal(2, 4, device=device))
    backend.runs(q, k, v, bias=bias)
    check(q, k, v, bias=bias)


def test_one_tensor_in_two_biases_gets_both_gradients(backend, device):
    q, k, v = qkv(device=device)
    tensor = normal(9, 9, device=device)
    bias = DenseBias(tensor) + DenseBias(tensor)
    backend.runs(q, k, v, bias=bias)
    gradient = torch.autograd.grad(attention(q, k, v, bias=bias).sum(), tensor)[0]
    right = oracle(q, k, v, bias=bias, d_out=torch.ones_like(q)).gradients.bias
    assert_close("d_tensor", gradient, right[0] + right[1], 1e-5)


def test_bias_parameters_keep_their_dtype(backend, device):
    q, k, v = qkv(device=device, dtype=torch.float16)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        bias = DenseBias(normal(9, 9, device=device, dtype=dtype))
        sinks = normal(4, device=device, dtype=dtype)
        backend.runs(q, k, v, bias=bias, sinks=sinks)
        check(q, k, v, bias=bias, sinks=sinks)


# The gradient that arrives, in strange layouts.


def arriving(kind, out):
    if kind == "expanded number":
        return torch.ones((), device=out.device, dtype=out.dtype).expand_as(out)
    if kind == "expanded row":
        return torch.randn(out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    if kind == "transposed":
        return torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2)
    if kind == "last two swapped":
        return torch.randn_like(out.mT.contiguous()).mT
    if kind == "every other":
        return torch.randn(*out.shape[:3], 2 * out.shape[3], device=out.device)[..., ::2]
    assert kind == "offset"
    return torch.randn(out.numel() + 3, device=out.device)[3:].view(out.shape)


@pytest.mark.parametrize(
    "kind",
    ["expanded number", "expanded row", "transposed", "last two swapped", "every other", "offset"],
)
def test_layout_of_the_arriving_gradient(backend, device, kind):
    named, options = everything(device)
    q, k, v = named["query"], named["key"], named["value"]
    backend.runs(q, k, v, **options)
    d_out = arriving(kind, torch.empty(2, 4, 7, 4, device=device))
    d_lse = torch.ones((), device=device).expand(2, 4, 7)
    check(q, k, v, d_out=d_out, d_lse=d_lse, **options)


def test_sum_backward(backend, device):
    q, k, v = qkv(device=device, q_len=300)
    backend.runs(q, k, v)
    gradients = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    right = oracle(q, k, v, d_out=torch.ones_like(q)).gradients
    # The values' gradient is what a sum tells; that of query and key is a small difference.
    assert_close("d_value", gradients[2], right.value, 1e-5)
    assert_close("d_query", gradients[0], right.query, 1e-4)


# Derivatives of derivatives.


def function_of_all(options, value_of):
    def run(q, k, v, sinks, slopes, dense):
        bias = ALiBi(slopes) + DenseBias(dense)
        return value_of(attention(q, k, v, **options | {"sinks": sinks, "bias": bias}))

    return run


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck_and_gradgradcheck(backend, device, return_lse, dropout_p):
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 3, "kv_len": 4, "head_dim": 2}
    named, options = everything(device, dtype=torch.float64, **sizes)
    options |= {"dropout_p": dropout_p, "seed": 7, "return_lse": return_lse}
    inputs = tuple(named.values())
    backend.runs(*inputs[:3], **options)
    run = function_of_all(options, lambda out: out)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("device", ["cpu"])
def test_gradgradcheck_of_rows_that_see_nothing(backend, device):
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, q_len=3, head_dim=2, dtype=torch.float64)
    hidden = torch.zeros(3, 3, dtype=torch.float64)
    hidden[1] = -torch.inf
    options = {"mask": KeyLengths([3, 0]), "bias": DenseBias(hidden)}
    backend.runs(q, k, v, **options)
    run = lambda *x: attention(*x, **options)  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v), fast_mode=True)


def test_third_order(backend, device):
    q, k, v = qkv(
        batch=1, heads=2, q_len=3, kv_len=4, head_dim=2, dtype=torch.float64, device=device
    )
    backend.runs(q, k, v, mask=Causal(), query_start=1)

    def ours(q, k, v):
        return attention(q, k, v, mask=Causal(), query_start=1)

    def plain(q, k, v):
        hidden = torch.ones(3, 4, device=device, dtype=torch.bool).triu(2)
        scores = (q @ k.mT / 2**0.5).masked_fill(hidden, -torch.inf)
        return scores.softmax(dim=-1) @ v

    def third(function):
        first = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), k, create_graph=True)[0]
        return torch.autograd.grad(second.square().sum(), (q, k, v))

    torch.testing.assert_close(third(ours), third(plain), rtol=1e-9, atol=1e-9)


def test_gradient_penalty_trains_the_bias(backend, device):
    """A second derivative by parameters, through first derivatives by inputs (WGAN-GP)."""
    named, options = everything(device, dtype=torch.float64)
    q, k, v = named["query"], named["key"], named["value"]
    backend.runs(q, k, v, **options)
    first = torch.autograd.grad(attention(q, k, v, **options).sum(), (q, k), create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in first)
    penalty.backward()
    step = 1e-6
    for name in ("sinks", "slopes", "dense"):
        tensor = named[name]
        direction = torch.randn_like(tensor)
        values = []
        for sign in (1, -1):
            moved = {n: t.detach().clone().requires_grad_() for n, t in named.items()}
            moved[name] = (tensor + sign * step * direction).detach()
            given = options | {
                "sinks": moved["sinks"],
                "bias": ALiBi(moved["slopes"]) + DenseBias(moved["dense"]),
            }
            x = [moved["query"], moved["key"], moved["value"]]
            again = torch.autograd.grad(attention(*x, **given).sum(), x[:2])
            values.append(sum(gradient.square().sum() for gradient in again))
        expected = (values[0] - values[1]) / (2 * step)
        found = (tensor.grad * direction).sum()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_second_derivative_in_half_precision_is_finite(backend, device):
    q, k, v = qkv(device=device, dtype=torch.bfloat16)
    backend.runs(q, k, v, mask=Causal())
    out = attention(q, k, v, mask=Causal())
    first = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)[0]
    second = torch.autograd.grad(first.float().square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in second)
    assert all(gradient.dtype == torch.bfloat16 for gradient in second)


def test_second_derivative_with_bad_numbers_in_padding(backend, device):
    q, k, v = qkv(device=device, dtype=torch.float64, grad=False)
    k[:, :, 6:], v[:, :, 6:] = torch.nan, torch.inf
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = KeyLengths(torch.tensor([6, 6], device=device))
    backend.runs(q, k, v, mask=mask)
    out = attention(q, k, v, mask=mask)
    first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in second)


# Bitwise repeatable.


def run_once(named, options):
    inputs = [t.detach().clone().requires_grad_() for t in named.values()]
    q, k, v, sinks, slopes, dense = inputs
    given = options | {"sinks": sinks, "bias": ALiBi(slopes) + DenseBias(dense)}
    out, lse = attention(q, k, v, return_lse=True, **given)
    return (out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs))


@pytest.mark.parametrize("how", ["argument", "switch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_is_bitwise(backend, device, how, dtype, no_deterministic_switch):
    named, options = everything(device, dtype=dtype, q_len=260, kv_len=520)
    if how == "argument":
        options["deterministic"] = True
    else:
        torch.use_deterministic_algorithms(True)
    backend.runs(named["query"], named["key"], named["value"], **options)
    first, second = run_once(named, options), run_once(named, options)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("switch", [True, False])
def test_deterministic_follows_the_switch_only_where_not_given(
    given, switch, no_deterministic_switch
):
    q, k, v = qkv()
    torch.use_deterministic_algorithms(switch)
    with record() as calls:
        attention(q, k, v, deterministic=given)
    assert calls[0].choice.problem.deterministic is (switch if given is None else given)


# Inside larger programs.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout_again(backend, device, use_reentrant):
    q, k, v = qkv(device=device, q_len=30)
    backend.runs(q, k, v, dropout_p=0.5)

    def run(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(11)
    expected = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(11)
    out = checkpoint(run, q, k, v, use_reentrant=use_reentrant)
    out.square().sum().backward()
    for tensor, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(tensor.grad, right, rtol=0, atol=0)


def test_window_and_dense_mask_together(backend, device):
    q, k, v = qkv(device=device, q_len=20, kv_heads=1)
    mask = SlidingWindow(3, 1) & DenseMask(torch.rand(4, 20, 20, device=device) > 0.3)
    backend.runs(q, k, v, mask=mask)
    check(q, k, v, mask=mask)


@pytest.mark.parametrize("factor", [1.0, 1e9])
def test_long_float32(device, factor):
    """On Hopper such heads are split into halves, but for one whose channels are too far apart."""
    named, options = everything(device, batch=1, q_len=513, kv_len=530, head_dim=32)
    q, k, v = named["query"], named["key"], named["value"]
    with torch.no_grad():
        q[0, : q.shape[1] // k.shape[1], :, ::2] *= factor
        k[0, 0, :, ::2] /= factor
    check(q, k, v, **options)
