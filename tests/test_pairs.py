"""Every mask with every bias, and every two masks, on every backend that takes them."""

from __future__ import annotations

import itertools

import pytest
import torch
from inputs import qkv
from test_terms import HEAD_DIM, SIZE, biases, kind, masks

from limelight.testing import check

MASKS = masks()
BIASES = biases()
NAMED = [pytest.param(n, id=f"{n}-{kind(mask)}") for n, mask in enumerate(MASKS)]


def inputs(device, grad=True):
    batch, heads, q_len, kv_len = SIZE
    return qkv(
        batch=batch,
        heads=heads,
        kv_heads=2,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=HEAD_DIM,
        device=device,
        grad=grad,
    )


@pytest.mark.parametrize("mask", NAMED)
def test_a_mask_with_each_bias(backend, device, mask):
    q, k, v = inputs(device)
    ran = 0
    # On a GPU each pair is a kernel to compile: one bias, another for every mask.
    for bias in BIASES if device == "cpu" else [BIASES[mask % len(BIASES)]]:
        options = {
            "mask": MASKS[mask].map_tensors(lambda t: torch.as_tensor(t, device=device)),
            "bias": bias.map_tensors(
                lambda t: torch.as_tensor(t, device=device, dtype=q.dtype).requires_grad_()
            ),
            "query_start": 2,
        }
        if backend.takes(q, k, v, **options):
            check(q, k, v, **options)
            ran += 1
    if not ran:
        pytest.skip(f"{backend} refuses these problems")


@pytest.mark.parametrize("mask", NAMED)
def test_a_mask_with_each_before_it(backend, device, mask):
    q, k, v = inputs(device, grad=device != "cpu")
    ran = 0
    others = MASKS[: mask + 1] if device == "cpu" else [MASKS[mask - 1]]
    for other, join in itertools.product(others, ("__and__", "__or__")):
        joined = getattr(MASKS[mask], join)(other)
        joined = joined.map_tensors(lambda t: torch.as_tensor(t, device=device))
        if backend.takes(q, k, v, mask=joined, query_start=1):
            check(q, k, v, mask=joined, query_start=1)
            ran += 1
    if not ran:
        pytest.skip(f"{backend} refuses these problems")
