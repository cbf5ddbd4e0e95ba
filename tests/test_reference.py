"""The oracle against facts of others: torch's float64 autograd of a plain composition, differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from limelight import ALiBi, Causal, DenseBias, DenseMask, KeyLengths, reference

B, H, G, M, N, D, E = 2, 4, 2, 5, 7, 3, 6
START = 2


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=(B, H, M, D)),
        rng.normal(size=(B, G, N, D)),
        rng.normal(size=(B, G, N, E)),
    )
    return q, k, v, rng.normal(size=H), rng.normal(size=H), rng.normal(size=(M, N))


def plain(q, k, v, sinks, slopes, dense, *, scale, softcap, visible, keep):
    """The same in torch, from the papers' formulas; none of limelight's code."""
    k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    scores = scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (torch.arange(M)[:, None] + START - torch.arange(N)).abs()
    scores = scores - slopes[:, None, None] * distance + dense
    scores = scores.masked_fill(~visible, -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(B, H, M, 1)], dim=-1)
    weights = with_sink.softmax(dim=-1)[..., :-1]
    return (weights * keep) @ v, with_sink.logsumexp(dim=-1)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("scale", [None, -0.4])
@pytest.mark.parametrize("masked", [False, True])
def test_against_torch(softcap, scale, masked):
    inputs = arrays()
    q, k, v, sinks, slopes, dense = inputs
    mask, visible = None, torch.ones(B, 1, M, N, dtype=torch.bool)
    if masked:
        mask = Causal() & KeyLengths(np.array([7, 3]))
        causal = torch.ones(M, N).tril(START).bool()
        visible = causal & (torch.arange(N) < torch.tensor([7, 3])[:, None])[:, None, None]
    rng = np.random.default_rng(1)
    d_out, d_lse = rng.normal(size=(B, H, M, E)), rng.normal(size=(B, H, M))
    found = reference.attention(
        q, k, v, mask=mask, bias=ALiBi(slopes) + DenseBias(dense), query_start=START, scale=scale,
        softcap=softcap, sinks=sinks, d_out=d_out, d_lse=d_lse,
    )  # fmt: skip
    tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
    numbers = {"scale": D**-0.5 if scale is None else scale, "softcap": softcap}
    out, lse = plain(*tensors, **numbers, visible=visible, keep=1.0)
    np.testing.assert_allclose(found.out, out.detach(), atol=1e-13)
    np.testing.assert_allclose(found.lse, lse.detach(), atol=1e-13)
    arriving = [torch.tensor(d_out), torch.tensor(d_lse)]
    right = torch.autograd.grad([out, lse], tensors, arriving)
    gradients = (*found.gradients[:4], *found.gradients.bias)
    for gradient, expected in zip(gradients, right, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_without_any_option_against_torch_sdpa():
    q, k, v, *_ = arrays()
    found = reference.attention(q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (q, k, v)), enable_gqa=True
    )
    np.testing.assert_allclose(found.out, right, atol=1e-13)


def test_dropout_keeps_what_it_says():
    """By the pattern that one-hot values show, through torch."""
    q, k, v, sinks, slopes, dense = arrays()
    options = {"bias": ALiBi(slopes) + DenseBias(dense), "query_start": START, "sinks": sinks}
    eye = np.broadcast_to(np.eye(N), (B, G, N, N))
    weights = reference.attention(q, k, eye, **options).out
    dropped = reference.attention(q, k, eye, **options, dropout_p=0.4, seed=5).out
    keep = dropped / weights
    assert set(np.unique(keep.round(12))) == {0.0, round(1 / 0.6, 12)}
    tensors = [torch.tensor(array, requires_grad=True) for array in (q, k, v, sinks, slopes, dense)]
    out, _ = plain(
        *tensors,
        scale=D**-0.5,
        softcap=None,
        visible=torch.ones(M, N).bool(),
        keep=torch.tensor(keep),
    )
    d_out = np.random.default_rng(1).normal(size=(B, H, M, E))
    found = reference.attention(q, k, v, **options, dropout_p=0.4, seed=5, d_out=d_out)
    np.testing.assert_allclose(found.out, out.detach(), atol=1e-13)
    right = torch.autograd.grad(out, tensors, torch.tensor(d_out))
    for gradient, expected in zip(
        (*found.gradients[:4], *found.gradients.bias), right, strict=True
    ):
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("which", range(6))
def test_gradients_are_finite_differences(which):
    inputs = arrays()
    rng = np.random.default_rng(2)
    d_out, d_lse = rng.normal(size=(B, H, M, E)), rng.normal(size=(B, H, M))
    direction = rng.normal(size=inputs[which].shape)

    def run(step):
        moved = [a + step * direction if n == which else a for n, a in enumerate(inputs)]
        q, k, v, sinks, slopes, dense = moved
        return reference.attention(
            q, k, v, mask=Causal(), bias=ALiBi(slopes) + DenseBias(dense), query_start=START,
            softcap=0.8, sinks=sinks, dropout_p=0.3, seed=9, d_out=d_out, d_lse=d_lse,
        )  # fmt: skip

    def total(step):
        result = run(step)
        return (result.out * d_out).sum() + (result.lse * d_lse).sum()

    gradients = run(0.0).gradients
    gradient = (*gradients[:4], *gradients.bias)[which]
    difference = (total(1e-5) - total(-1e-5)) / 2e-5
    assert (gradient * direction).sum() == pytest.approx(difference, rel=1e-7)


def test_rows_that_see_nothing_by_hand():
    q = k = v = np.ones((1, 1, 2, 1))
    mask = DenseMask(np.array([[True, True], [False, False]]))
    found = reference.attention(q, k, v, mask=mask, d_out=np.ones_like(v), d_lse=np.ones((1, 1, 2)))
    assert found.out.ravel().tolist() == pytest.approx([1.0, 0.0])
    assert found.lse.ravel().tolist() == pytest.approx([1 + math.log(2), -math.inf])
    assert found.gradients.query.ravel()[1] == 0.0
    with_sink = reference.attention(q, k, v, mask=mask, sinks=np.array([0.5]))
    assert with_sink.lse.ravel()[1] == 0.5
    assert with_sink.out.ravel()[1] == 0.0


def test_bad_numbers_that_nobody_sees():
    q, k, v, *_ = arrays()
    right = reference.attention(q, k[:, :, :4], v[:, :, :4], d_out=np.ones((B, H, M, E)))
    k[:, :, 4:], v[:, :, 4:] = np.nan, np.inf
    found = reference.attention(
        q, k, v, mask=KeyLengths(np.array([4, 4])), d_out=np.ones((B, H, M, E))
    )
    np.testing.assert_allclose(found.out, right.out)
    np.testing.assert_allclose(found.gradients.query, right.gradients.query)
    np.testing.assert_allclose(found.gradients.key[:, :, :4], right.gradients.key)
    assert (found.gradients.key[:, :, 4:] == 0).all()
    assert (found.gradients.value[:, :, 4:] == 0).all()


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_empty_sizes(m, n):
    found = reference.attention(
        np.ones((1, 2, m, 3)),
        np.ones((1, 2, n, 3)),
        np.ones((1, 2, n, 4)),
        d_out=np.ones((1, 2, m, 4)),
    )
    assert found.out.shape == (1, 2, m, 4)
    assert (found.out == 0).all()
    assert np.isneginf(found.lse).all()
    assert found.gradients.key.shape == (1, 2, n, 3)
