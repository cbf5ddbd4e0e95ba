"""The `hopper` backend on a GPU, where its kernels have many tiles, items and odd ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from limelight import attention, backends
from limelight.biases import ALiBi
from limelight.masks import Causal, KeyLengths, PrefixLM, SlidingWindow
from limelight.testing import check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper_only():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    with backends("hopper"):
        yield


def inputs(
    q_len: int,
    kv_len: int,
    *,
    dim: int = 64,
    value_dim: int | None = None,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    q_heads, kv_heads = heads
    shapes = [
        (batch, q_heads, q_len, dim),
        (batch, kv_heads, kv_len, dim),
        (batch, kv_heads, kv_len, value_dim or dim),
    ]
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def lengths(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


MASKS: dict[str, Any] = {
    "none": lambda: {},
    "causal": lambda: {"mask": Causal(), "query_start": 0},
    "causal from the end": lambda: {"mask": Causal(), "query_start": "end"},
    "rows that see nothing": lambda: {"mask": Causal(), "query_start": -100},
    "window": lambda: {"mask": SlidingWindow(70, 3), "query_start": 5},
    "causal window": lambda: {"mask": Causal() & SlidingWindow(150), "query_start": 0},
    "lengths": lambda: {"mask": KeyLengths(lengths(70, 0))},
    "prefix": lambda: {"mask": PrefixLM(lengths(20, 200)), "query_start": 0},
    "softcap": lambda: {"softcap": 3.0},
    "ALiBi": lambda: {
        "bias": ALiBi(torch.rand(4, device="cuda")),
        "mask": Causal(),
        "query_start": 0,
    },
    "scale": lambda: {"scale": -0.3},
    "sinks": lambda: {"sinks": torch.randn(4, device="cuda").requires_grad_()},
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_gradients(name: str, dim: int) -> None:
    check(*inputs(300, 333, dim=dim), **MASKS[name]())


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 40, "dtype": torch.float16},
        {"dim": 96, "heads": (3, 3)},
        {"dim": 128, "value_dim": 64, "heads": (6, 1)},
        {"dim": 64, "value_dim": 128, "dtype": torch.float16},
        {"dim": 192, "value_dim": 128},  # the backward is flash's
    ],
)
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_shapes(options: dict[str, Any], mask: Any) -> None:
    check(*inputs(260, 260, **options), mask=mask)


@pytest.mark.parametrize("dim", [64, 128])
def test_random_lengths(dim: int) -> None:
    """Fewer and more tiles than stages, items and programs."""
    draw = random.Random(dim)
    for _ in range(12):
        q_len, kv_len = draw.randint(1, 700), draw.randint(1, 700)
        group = draw.choice([1, 2, 4])
        kv_heads = draw.choice([1, 3])
        mask = draw.choice([None, Causal(), Causal() & SlidingWindow(draw.randint(0, 300))])
        given = inputs(q_len, kv_len, dim=dim, batch=1, heads=(group * kv_heads, kv_heads))
        check(*given, mask=mask, query_start=draw.choice([0, "end", 17, -30]))


def gradients(given: list[torch.Tensor], d_out: torch.Tensor, **options: Any) -> list[Any]:
    out = attention(*given, **options)
    return [out, *torch.autograd.grad(out, given, d_out)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_repeats(dim: int, mask: Any) -> None:
    """All but the query's gradient, which is added up in any order, repeats bit for bit."""
    given = inputs(2000, 2000, dim=dim, heads=(16, 16))
    d_out = torch.randn_like(given[0])
    first = gradients(given, d_out, mask=mask)
    for _ in range(100):
        out, d_query, *rest = gradients(given, d_out, mask=mask)
        assert all(map(torch.equal, (out, *rest), (first[0], *first[2:])))
        torch.testing.assert_close(d_query, first[1])


@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_repeats(dim: int) -> None:
    given = inputs(1000, 1000, dim=dim)
    d_out = torch.randn_like(given[0])
    first = gradients(given, d_out, mask=Causal(), deterministic=True)
    for _ in range(100):
        again = gradients(given, d_out, mask=Causal(), deterministic=True)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("dim", [64, 128])
def test_bad_numbers_at_keys_that_nobody_sees(dim: int) -> None:
    q, k, v = inputs(300, 333, dim=dim)
    with torch.no_grad():
        for tensor in (k, v):
            tensor[0, :, 70:] = torch.nan
            tensor[1, :, 200:] = torch.inf
    mask = KeyLengths(lengths(70, 200))
    out = attention(q, k, v, mask=mask)
    for gradient in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["rows first", "expanded", "odd rows"])
def test_layout_of_the_arriving_gradient(kind: str) -> None:
    """Layouts that the copy engine cannot describe are copied first."""
    given = inputs(300, 300)
    out = attention(*given)
    made = {
        "rows first": lambda: torch.randn(2, 300, 4, 64, device="cuda").transpose(1, 2),
        "expanded": lambda: torch.randn(2, 1, 1, 64, device="cuda").expand(2, 4, 300, 64),
        "odd rows": lambda: torch.randn(2, 4, 300, 67, device="cuda")[..., :64],
    }
    d_out = made[kind]().to(out.dtype)
    right = torch.autograd.grad(attention(*given), given, d_out.contiguous())
    for one, other in zip(torch.autograd.grad(out, given, d_out), right, strict=True):
        torch.testing.assert_close(one, other)


def test_graph_capture() -> None:
    given = inputs(500, 500)
    d_out = torch.randn_like(given[0])
    right = gradients(given, d_out, mask=Causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(given, d_out, mask=Causal())
    graph.replay()
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
