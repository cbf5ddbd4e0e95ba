"""Biases from tables, with gradients, on every backend that takes them, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from inputs import normal, qkv

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    RelativeBias,
    RelativeBias2D,
    SlidingWindow,
    T5Bias,
    attention,
    explain,
)
from limelight.biases.table import TableBias
from limelight.testing import check

pytestmark = pytest.mark.usefixtures("nan_memory")

Q_LEN, HEIGHT, WIDTH = 37, 6, 9  # 54 keys

BIASES = {
    "relative": lambda device: RelativeBias(normal(4, 31, device=device)),
    "relative, one for all heads": lambda device: RelativeBias(normal(1, 8, device=device), -20),
    "relative, a view": lambda device: RelativeBias(normal(200, 4, device=device).T[:, ::2], -50),
    "t5": lambda device: T5Bias(normal(32, 4, device=device)),
    "t5 decoder": lambda device: T5Bias(normal(11, 1, device=device), False, max_distance=30),
    "window": lambda device: RelativeBias2D(normal(187, 4, device=device), HEIGHT, WIDTH),
    "relative and t5": lambda device: (
        RelativeBias(normal(4, 31, device=device)) + T5Bias(normal(32, 4, device=device))
    ),
    "windows": lambda device: (
        RelativeBias2D(normal(187, 1, device=device), HEIGHT, WIDTH)
        + RelativeBias2D(normal(187, 4, device=device), HEIGHT, WIDTH)
    ),
    "t5 and others": lambda device: (
        ALiBi(normal(4, device=device) / 9)
        + T5Bias(normal(32, 4, device=device))
        + DenseBias(normal(Q_LEN, 1, device=device))
    ),
}
MASKS = {
    "none": lambda device: None,
    "causal": lambda device: Causal(),
    "window": lambda device: SlidingWindow(9, 3),
    "lengths": lambda device: KeyLengths(torch.tensor([17, 0], device=device)),
    "documents": lambda device: Documents(torch.arange(54, device=device) // 20),
    "dense": lambda device: DenseMask(normal(Q_LEN, 54, device=device, grad=False) > 0),
    "or": lambda device: Causal() | KeyLengths(torch.tensor([3, 54], device=device)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_with_every_mask(backend, device, bias, mask):
    q, k, v = qkv(device=device, kv_heads=2, q_len=Q_LEN, kv_len=54)
    options = {"bias": BIASES[bias](device), "mask": MASKS[mask](device), "query_start": 5}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("start", [-9, "end", [3, -2]], ids=str)
@pytest.mark.parametrize("bias", BIASES)
def test_positions(backend, device, bias, start):
    q, k, v = qkv(device=device, q_len=Q_LEN, kv_len=54)
    start = torch.tensor(start, device=device) if isinstance(start, list) else start
    options = {"bias": BIASES[bias](device), "query_start": start}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("bias", ["relative", "t5", "window"])
def test_with_everything_else(backend, device, bias):
    q, k, v = qkv(device=device, kv_heads=2, q_len=Q_LEN, kv_len=54, dtype=torch.float16)
    options = {
        "bias": BIASES[bias](device),
        "mask": Causal(),
        "query_start": "end",
        "softcap": 3.0,
        "sinks": normal(4, device=device),
        "dropout_p": 0.3,
        "seed": 5,
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (130, 257), (300, 129)], ids=str)
def test_lengths_that_fill_no_tile(backend, device, sizes):
    q, k, v = qkv(device=device, batch=3, heads=2, q_len=sizes[0], kv_len=sizes[1])
    bias = T5Bias(normal(32, 2, device=device)) + RelativeBias(normal(2, 401, device=device))
    backend.runs(q, k, v, bias=bias)
    check(q, k, v, bias=bias)


@pytest.mark.parametrize("step", [1.5, -40.0])
def test_steep_tables(backend, device, step):
    """A bias that changes by more than a float32's range of exponents within a tile."""
    q, k, v = qkv(device=device, q_len=150)
    table = (step * torch.arange(299.0, device=device))[None].requires_grad_()
    backend.runs(q, k, v, bias=RelativeBias(table))
    check(q, k, v, bias=RelativeBias(table), tolerance=1e-4)  # scores of thousands in float32


def test_many_windows(backend, device):
    q, k, v = qkv(device=device, batch=70, heads=2, q_len=16)
    bias = RelativeBias2D(normal(49, 2, device=device), 4, 4)
    backend.runs(q, k, v, bias=bias)
    check(q, k, v, bias=bias)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("bias", ["relative", "relative, one for all heads", "t5", "window"])
def test_gradcheck_and_gradgradcheck(backend, device, bias):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 3, "kv_len": 54, "head_dim": 2}
    q, k, v = qkv(dtype=torch.float64, **sizes)
    bias = BIASES[bias](device).map_tensors(lambda table: table.detach().double())
    table = bias.tensors()[0].requires_grad_()
    backend.runs(q, k, v, bias=bias)
    run = lambda q, k, v, table: attention(q, k, v, bias=bias.with_tensors(iter([table])))  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v, table), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, table), fast_mode=True)


@dataclass(frozen=True)
class NoRule(TableBias):
    """A table without the kernels' half of its rule."""

    table: Any

    def entry(self, offset: Any, xp: Any) -> Any:
        return xp.abs(offset) % self.table.shape[1]


def test_a_table_without_a_rule_is_left_to_tiled():
    q, k, v = qkv()
    bias = NoRule(normal(4, 3))
    check(q, k, v, bias=bias)
    problem = explain(q, k, v, bias=bias, device="H200")
    reasons = [reason.rule for reason in problem.reasons["flash"]]
    assert "takes masks and biases that define a fragment (on_device)" in reasons


def test_gradients_repeat(backend, device):
    q, k, v = qkv(device=device, q_len=200)
    bias = T5Bias(normal(32, 4, device=device)) + RelativeBias(normal(1, 401, device=device))
    backend.runs(q, k, v, bias=bias, deterministic=True)
    out = attention(q, k, v, bias=bias, deterministic=True)
    inputs = (q, k, v, *bias.tensors())
    first, second = (
        torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
