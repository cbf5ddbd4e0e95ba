"""Sizes and memory layouts: head_dim 1 to 256, lengths around tiles, views of every kind."""

from __future__ import annotations

import pytest
import torch
from inputs import normal, qkv

from limelight import ALiBi, Causal, DenseBias, DenseMask, KeyLengths, attention, explain
from limelight.testing import check

pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.mark.parametrize(
    "head_dim", [1, 2, 3, 5, 8, 16, 31, 33, 64, 65, 96, 127, 128, 192, 255, 256]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_dim(backend, device, head_dim, dtype):
    q, k, v = qkv(device=device, heads=2, q_len=17, kv_len=19, head_dim=head_dim, dtype=dtype)
    backend.runs(q, k, v)
    check(q, k, v)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(8, 1), (1, 8), (64, 128), (128, 64), (192, 128), (7, 13), (256, 3)]
)
def test_value_dim_differs(backend, device, head_dim, value_dim):
    q, k, v = qkv(device=device, kv_heads=2, head_dim=head_dim, value_dim=value_dim, kv_len=12)
    backend.runs(q, k, v, mask=Causal(), query_start=0)
    check(q, k, v, mask=Causal(), query_start=0)


LENGTHS = [1, 7, 127, 129, 255, 256, 257, 511, 512, 513, 1000]


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [
        *((n, n) for n in LENGTHS),
        *((n, 257) for n in LENGTHS),
        *((129, n) for n in LENGTHS),
        (1, 1000),
    ],
)
def test_lengths(backend, device, q_len, kv_len):
    q, k, v = qkv(device=device, batch=1, heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len)
    options = {"mask": Causal(), "query_start": "end"}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_more_heads_and_batch_than_one_chunk(backend, device):
    """Many small matrices: batch elements and heads are worked on together, and cut apart again."""
    q, k, v = qkv(device=device, batch=5, heads=14, kv_heads=7, q_len=130, kv_len=140, head_dim=4)
    lengths = torch.tensor([140, 3, 0, 77, 139], device=device)
    options = {
        "mask": KeyLengths(lengths),
        "bias": DenseBias(normal(5, 14, 1, 140, device=device)),
        "sinks": normal(14, device=device),
        "query_start": torch.tensor([0, 5, -5, 1, 9], device=device),
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


# Views. Each function makes (q, k, v) of shape (2, 4, 9, 8), leaves of a graph or views of one.


def transposed(device):
    return tuple(normal(2, 9, 4, 8, device=device).transpose(1, 2) for _ in range(3))


def packed(device):
    return normal(2, 9, 3, 4, 8, device=device).permute(2, 0, 3, 1, 4).unbind(0)


def packed_by_heads(device):
    return normal(2, 9, 12, 8, device=device).transpose(1, 2).split(4, dim=1)


def packed_last(device):
    return normal(2, 4, 9, 24, device=device).split(8, dim=3)


def sliced(device):
    q = normal(3, 5, 20, 11, device=device)[1:, :4, 2:20:2, 1:9]
    k = normal(2, 8, 30, 9, device=device)[:, ::2, 5:14, 1:]
    return q, k, normal(4, 4, 9, 8, device=device)[::2]


def offset(device):
    return tuple(normal(2 * 4 * 9 * 8 + n, device=device)[n:].view(2, 4, 9, 8) for n in (1, 3, 5))


def batch_inside(device):
    return tuple(normal(9, 4, 8, 2, device=device).permute(3, 1, 0, 2) for _ in range(3))


def last_stride_two(device):
    return tuple(normal(2, 4, 9, 16, device=device)[..., ::2] for _ in range(3))


def last_two_swapped(device):
    return tuple(normal(2, 4, 8, 9, device=device).mT for _ in range(3))


def expanded_batch(device):
    q = normal(2, 4, 9, 8, device=device)
    return q, *(normal(1, 4, 9, 8, device=device).expand(2, 4, 9, 8) for _ in range(2))


def expanded_heads(device):
    q = normal(2, 4, 9, 8, device=device)
    return q, *(normal(2, 1, 9, 8, device=device).expand(2, 4, 9, 8) for _ in range(2))


def expanded_length(device):
    q = normal(2, 4, 1, 8, device=device).expand(2, 4, 9, 8)
    return q, *(normal(2, 4, 1, 8, device=device).expand(2, 4, 9, 8) for _ in range(2))


def expanded_last(device):
    return tuple(normal(2, 4, 9, 1, device=device).expand(2, 4, 9, 8) for _ in range(3))


def expanded_number(device):
    return tuple(normal(1, 1, 1, 1, device=device).expand(2, 4, 9, 8) for _ in range(3))


def overlapping(device):
    """Windows over a sequence: rows share memory."""
    return tuple(
        normal(200, device=device).as_strided((2, 4, 9, 8), (60, 12, 3, 1)) for _ in range(3)
    )


VIEWS = [
    transposed,
    packed,
    packed_by_heads,
    packed_last,
    sliced,
    offset,
    batch_inside,
    last_stride_two,
    last_two_swapped,
    expanded_batch,
    expanded_heads,
    expanded_length,
    expanded_last,
    expanded_number,
    overlapping,
]


def _tolerance(backend):
    """PyTorch's kernel loses more where equal keys cancel."""
    return 4e-5 if str(backend) == "torch_efficient" else None


@pytest.mark.parametrize("view", VIEWS)
def test_views(backend, device, view):
    q, k, v = view(device)
    backend.runs(q, k, v, mask=Causal())
    check(q, k, v, mask=Causal(), tolerance=_tolerance(backend))


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_leaves(backend, device, view):
    """An optimiser's parameter may itself be a strange view."""
    q, k, v = (t.detach().requires_grad_() for t in view(device))
    backend.runs(q, k, v)
    check(q, k, v, tolerance=_tolerance(backend))
    if view in (overlapping, expanded_number):
        return  # PyTorch cannot add a gradient in place into shared memory
    attention(q, k, v).sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("view", [last_stride_two, last_two_swapped, batch_inside, expanded_last])
def test_a_copy_is_announced(view):
    q, k, v = view("cpu")
    contiguous = torch.zeros(2, 4, 9, 8)
    note = explain(contiguous, k, v).notes[0]
    assert "key and value" in note
    assert "copy" in note
    assert "query" in explain(q, contiguous, contiguous).notes[0]


@pytest.mark.parametrize("view", [transposed, packed, sliced, offset, expanded_heads])
def test_no_copy_is_announced_where_none_is_made(view):
    assert not [
        note for note in explain(*(t.detach() for t in view("cpu"))).notes if "copy" in note
    ]


def test_the_inputs_are_left_as_they_were(backend, device):
    q, k, v = qkv(device=device, kv_heads=2, q_len=300, kv_len=300)
    bias, sinks = normal(300, 300, device=device), normal(4, device=device)
    mask = torch.rand(300, 300, device=device) > 0.5
    options = {"bias": DenseBias(bias), "sinks": sinks, "mask": DenseMask(mask), "scale": 2.0}
    backend.runs(q, k, v, **options)
    before = [t.detach().clone() for t in (q, k, v, bias, sinks, mask)]
    out, lse = attention(q, k, v, return_lse=True, **options)
    kept = out.detach().clone(), lse.detach().clone()
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    arrived = d_out.clone(), d_lse.clone()
    torch.autograd.grad([out, lse], [q, k, v, bias, sinks], [d_out, d_lse])
    for found, expected in zip((q, k, v, bias, sinks, mask), before, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip((out, lse, d_out, d_lse), (*kept, *arrived), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced", "offset"])
def test_layout_of_a_dense_bias_and_mask(backend, device, view):
    q, k, v = qkv(device=device)
    bias = {
        "transposed": lambda: normal(9, 9, device=device).T,
        "expanded": lambda: normal(1, 9, device=device).expand(2, 4, 9, 9),
        "sliced": lambda: normal(4, 18, 12, device=device)[:, ::2, 3:],
        "offset": lambda: normal(82, device=device)[1:].view(9, 9),
    }[view]()
    options = {"bias": DenseBias(bias), "mask": DenseMask(bias.detach() > -1)}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_strided_sinks_slopes_and_lengths(backend, device):
    q, k, v = qkv(device=device)
    options = {
        "sinks": normal(8, device=device)[::2],
        "bias": ALiBi(normal(1, device=device).expand(4)),
        "mask": KeyLengths(torch.tensor([9, 0, 4, 0], device=device)[::2]),
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_heads_rejoin_without_a_copy(backend, device):
    """(batch, heads, length, dim) is laid out as (batch, length, heads, dim)."""
    q, k, v = qkv(device=device, grad=False)
    backend.runs(q, k, v)
    if backend.name == "math":
        pytest.skip("math: no promise of a layout")
    assert attention(q, k, v).transpose(1, 2).is_contiguous()
