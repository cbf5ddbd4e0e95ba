"""The `hopper` backend without a GPU: what ptxas makes of its kernel, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from compile_matrix import run

from limelight.backends import BACKENDS
from limelight.biases import ALiBi, DenseBias
from limelight.devices import SHARED_MEMORY, Device
from limelight.masks import Causal, DenseMask, KeyLengths, SlidingWindow
from limelight.problem import Layout, Problem

H200 = Device.named("H200")
(HOPPER,) = (backend for backend in BACKENDS if backend.name == "hopper")


# stack: bytes of a thread, nearly all of it touched outside the loops. shared: of a block.
@pytest.mark.parametrize(
    ("dim", "stack", "shared"), [(64, 216, 123_380), (128, 8, 164_248), (256, 80, 197_016)]
)
def test_resources_are_as_recorded(dim: int, stack: int, shared: int) -> None:
    found = json.loads(run("compiling_hopper", dim).stdout)
    assert found["wgmma"] > 0
    assert found["registers"] * found["threads"] <= 65536
    assert found["stack"] <= stack
    assert found["shared"] <= shared <= SHARED_MEMORY[9, 0]


def layout(*strides: int, shape: tuple[int, ...] = (2, 8, 1024, 64), alignment: int = 16) -> Layout:
    return Layout(shape, strides, "bfloat16", alignment)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 192, "value_dim": 128, "dtype": "float16"},
        {"head_dim": 40, "kv_heads": 2, "q_len": 1},
        {"mask": Causal() & SlidingWindow(100), "softcap": 20.0, "query_start": -7},
        {"mask": KeyLengths(Layout.contiguous((1,), "int32"))},
        {"bias": ALiBi(Layout.contiguous((8,), "float32")), "training": True},
    ],
)
def test_takes(options: dict[str, Any]) -> None:
    assert HOPPER.why_not(Problem.of(device=H200, **options)) == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"device": Device.named("A100")}, "A100"),
        ({"device": Device.named("B200")}, "B200"),
        ({"dtype": "float32"}, "float32"),
        ({"dropout_p": 0.5}, "0.5"),
        ({"kv_len": 0}, "kv_len 0"),
        ({"head_dim": 20}, "query has rows at multiples of 8 bytes"),
        ({"head_dim": 12, "value_dim": 64}, "key has rows at multiples of 8 bytes"),
        ({"bias": DenseBias(Layout.contiguous((1024, 1024), "float32"))}, "DenseBias"),
        ({"mask": DenseMask(Layout.contiguous((1024, 1024), "bool"))}, "DenseMask"),
    ],
)
def test_says_why_not(options: dict[str, Any], found: str) -> None:
    (reason,) = HOPPER.why_not(Problem.of(**{"device": H200, **options}))
    assert found in reason.found


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (layout(8 * 1024 * 64, 1024 * 64, 64, 1), ""),
        (layout(3 * 8 * 1024 * 64, 64, 3 * 8 * 64, 1), ""),  # of a packed projection
        (layout(0, 1024 * 64, 64, 1), "key has strides (0, 65536, 64, 1)"),
        (layout(8 * 1024 * 64, 1024 * 64, 68, 1, alignment=8), "key has rows at multiples of 8"),
        (layout(8 * 1024 * 64, 1024 * 64, 1, 1024), ""),  # copied first
    ],
)
def test_layouts(key: Layout, found: str) -> None:
    query = layout(8 * 1024 * 64, 1024 * 64, 64, 1)
    reasons = HOPPER.why_not(Problem(query=query, key=key, value=query, device=H200))
    assert [found in reason.found for reason in reasons] == ([True] if found else [])


def test_a_copy_is_contiguous() -> None:
    """Rows that are copied first lie at multiples of their own length."""
    query = layout(1024 * 12 * 8, 1024 * 12, 1, 1024, shape=(2, 8, 1024, 12))
    reasons = HOPPER.why_not(Problem(query=query, key=query, value=query, device=H200))
    assert ["8 bytes" in reason.found for reason in reasons] == [True]
