"""scaled_dot_product_attention against torch.nn.functional's, over all its arguments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from inputs import normal
from torch.nn import functional

from limelight import backends, record, scaled_dot_product_attention
from limelight.testing import assert_close

pytestmark = pytest.mark.usefixtures("nan_memory")


def compare(q, k, v, mask=None, tolerance=1e-5, **options):
    """Output and every gradient, that of a float mask included, against PyTorch's."""
    ours = scaled_dot_product_attention(q, k, v, mask, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = functional.scaled_dot_product_attention(q, k, v, mask, **options)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert_close("out", ours, theirs, tolerance)
    leaves = [t for t in (q, k, v, mask) if t is not None and t.requires_grad]
    d_out = torch.randn_like(theirs)
    for found, right in zip(
        torch.autograd.grad(ours, leaves, d_out),
        torch.autograd.grad(theirs, leaves, d_out),
        strict=True,
    ):
        assert found.shape == right.shape
        # A bias that is the same for all of a query's keys has a gradient of zero, but for rounding.
        assert_close("gradient", found, right, 10 * tolerance, slack=tolerance)


MASKS = {
    "none": lambda: None,
    "bool": lambda: (torch.rand(7, 9) > 0.3) | torch.eye(7, 9).bool(),
    "bool, keys only": lambda: torch.rand(2, 1, 1, 9) > 0.3,
    "bool, whole": lambda: (torch.rand(2, 4, 7, 9) > 0.3) | torch.eye(7, 9).bool(),
    "float": lambda: normal(7, 9),
    "float, keys only": lambda: normal(1, 9),
    "float, queries only": lambda: normal(7, 1),
    "float, heads": lambda: normal(4, 7, 9),
    "float, batch": lambda: normal(2, 1, 7, 9),
    "float, whole": lambda: normal(2, 4, 7, 9),
    "float with -inf": lambda: (
        torch.zeros(7, 9).masked_fill(torch.rand(7, 9) < 0.3, -torch.inf).requires_grad_()
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3, -0.5])
@pytest.mark.parametrize("gqa", [False, True])
def test_masks_and_scales(mask, scale, gqa):
    torch.manual_seed(1)
    heads = 2 if gqa else 4
    q, k, v = normal(2, 4, 7, 8), normal(2, heads, 9, 8), normal(2, heads, 9, 8)
    compare(q, k, v, MASKS[mask](), scale=scale, enable_gqa=gqa)


@pytest.mark.parametrize(("m", "n"), [(7, 7), (7, 9), (9, 7), (1, 9), (9, 1)])
@pytest.mark.parametrize("gqa", [False, True])
def test_causal_is_top_left(m, n, gqa):
    heads = 1 if gqa else 4
    q, k, v = normal(2, 4, m, 8), normal(2, heads, n, 8), normal(2, heads, n, 8)
    compare(q, k, v, is_causal=True, enable_gqa=gqa)


LEADING = [
    ((), (), ()),
    ((3,), (3,), (3,)),
    ((1,), (3,), (3,)),
    ((3,), (1,), (1,)),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 3), (1, 3), (2, 1)),
    ((2, 3), (3,), (1,)),
    ((2, 1), (1, 3), (1, 3)),
    ((2, 3), (), ()),
    ((), (2, 3), (3,)),
    ((2, 2, 3), (2, 2, 3), (2, 2, 3)),
    ((2, 2, 3), (1, 2, 1), (3,)),
    ((1, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2)),
]


@pytest.mark.parametrize(("first", "second", "third"), LEADING)
@pytest.mark.parametrize("mask", [None, "bool", "float", "causal"])
def test_leading_dimensions_broadcast(first, second, third, mask):
    q, k, v = normal(*first, 5, 8), normal(*second, 6, 8), normal(*third, 6, 4)
    if mask == "causal":
        compare(q, k, v, is_causal=True)
    else:
        given = {"bool": torch.ones(5, 6).tril(1).bool(), "float": normal(5, 6)}.get(mask)
        compare(q, k, v, given)


@pytest.mark.parametrize(
    "shape", [(2, 2, 3, 5, 6), (1, 2, 1, 5, 6), (2, 3, 5, 6), (3, 1, 6), (1, 6)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_five_dimensions(shape, kind):
    q, k, v = normal(2, 2, 3, 5, 8), normal(2, 2, 3, 6, 8), normal(2, 2, 3, 6, 8)
    mask = normal(*shape)
    compare(q, k, v, mask.detach() > -1 if kind == "bool" else mask)


@pytest.mark.parametrize(
    ("first", "second"),
    [((4,), (2,)), ((2, 4), (2, 2)), ((2, 4), (1, 1)), ((2, 3, 4), (2, 3, 2)), ((2, 4), (2,))],
)
def test_grouped_heads_with_other_dimensions(first, second):
    q, k, v = normal(*first, 5, 8), normal(*second, 6, 8), normal(*second, 6, 8)
    groups = first[-1] // second[-1]
    repeated = [t.repeat_interleave(groups, dim=-3) for t in (k, v)]
    ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_close("out", ours, functional.scaled_dot_product_attention(q, *repeated), 1e-5)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 2), (0, 3), (0, 4))), ids=str)
def test_empty_sizes(sizes):
    batch, m, n = sizes
    compare(normal(batch, 2, m, 8), normal(batch, 2, n, 8), normal(batch, 2, n, 8))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing_are_zero(kind):
    mask = torch.ones(5, 6).bool()
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 6).masked_fill(~mask, -torch.inf).requires_grad_()
    q, k, v = (normal(2, 3, n, 8) for n in (5, 6, 6))
    out = scaled_dot_product_attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all()
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(gradient.isfinite().all() for gradient in gradients)
    theirs = functional.scaled_dot_product_attention(q, k, v, mask.detach())
    assert_close("out", out, theirs, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    q, k, v = (normal(2, 3, n, 8, dtype=dtype) for n in (5, 6, 6))
    tolerance = {torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    compare(q, k, v, normal(5, 6, dtype=dtype), tolerance=tolerance)


def test_arguments_by_position_and_by_name():
    q, k, v = (normal(2, 3, 5, 8, grad=False) for _ in range(3))
    mask = torch.ones(5, 5).tril().bool()
    by_position = scaled_dot_product_attention(q, k, v, mask, 0.0, False, 0.5, False)
    by_name = scaled_dot_product_attention(
        query=q,
        key=k,
        value=v,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        scale=0.5,
        enable_gqa=False,
    )
    theirs = functional.scaled_dot_product_attention(
        q, k, v, mask, 0.0, False, scale=0.5, enable_gqa=False
    )
    assert torch.equal(by_position, by_name)
    assert_close("out", by_name, theirs, 1e-5)


def test_mismatched_heads_need_enable_gqa():
    q, k = normal(2, 4, 5, 8), normal(2, 2, 5, 8)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, k)


def test_dropout_is_always_applied_and_follows_the_seed():
    q, k, v = (normal(2, 3, 50, 8, grad=False) for _ in range(3))
    torch.manual_seed(3)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, scaled_dot_product_attention(q, k, v))
    assert (scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()


def test_it_is_recorded_and_restricted_like_attention():
    q, k, v = (normal(2, 3, 5, 8, grad=False) for _ in range(3))
    with backends("math"), record() as calls:
        scaled_dot_product_attention(q, k, v, is_causal=True)
    assert calls.backends == {"math": 1}


def test_numpy():
    q, k, v = (normal(2, 3, n, 8, grad=False) for n in (5, 6, 6))
    mask = normal(5, 6, grad=False)
    ours = scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), mask.numpy())
    assert isinstance(ours, np.ndarray)
    assert_close("out", ours, functional.scaled_dot_product_attention(q, k, v, mask), 1e-5)
    ours = scaled_dot_product_attention(q[0, 0].numpy(), k.numpy(), v[:1].numpy(), is_causal=True)
    theirs = functional.scaled_dot_product_attention(
        q[0, 0].expand(2, 3, 5, 8), k, v[:1].expand_as(v), is_causal=True
    )
    assert_close("out", ours, theirs, 1e-5)
