"""The fused kernels themselves, in Triton's interpreter, against the float64 oracle.

Tiles are 16 to 32 wide here, so that lengths of a few dozen have empty, partial and full ones.
bfloat16 is left to the GPU: the interpreter's products of it are wrong.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import interpreter
from exported import Exported

import limelight as ll
from limelight import reference
from limelight._jit import jit, tl
from limelight.call import Call, Gradients
from limelight.kernels import configs
from limelight.kernels.configs import Config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    # Triton 3.6's interpreter makes numbers of arrays of one element, which NumPy will refuse soon.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

BUDGET = {torch.float32: 1e-5, torch.float16: 2e-3}
EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 2, 1, 37, 53


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ("forward", "key_gradients", "query_gradient", "dense_gradient", "offset_gradient")
    for name in (*tables, "query_gradient_of_offsets", "reading"):
        monkeypatch.setattr(configs, name, lambda *_: Config(16, 16, 4, 1))
    monkeypatch.setattr(configs, "ROW_NUMBERS", Config(32, 1, 4, 1))


def case(
    dtype: Any = torch.float32,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    q_len: int = Q_LEN,
    kv_len: int = KV_LEN,
    head_dim: int = 16,
    value_dim: int = 16,
    **others: Any,
) -> Call:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    generator = torch.Generator().manual_seed(0)
    absent = {
        "problem": None,
        "mask": None,
        "bias": None,
        "sinks": None,
        "softcap": None,
        "seed": None,
    }
    call = Call(
        query=normal(batch, heads, q_len, head_dim),
        key=normal(batch, kv_heads, kv_len, head_dim),
        value=normal(batch, kv_heads, kv_len, value_dim),
        query_start=0,
        scale=head_dim**-0.5,
        dropout_p=0.0,
        **absent,
    )
    return replace(call, **others)


def check(call: Call, budget: float | None = None, capability: int = 80) -> None:
    """Output, log-sum-exp and every gradient."""
    budget = budget or BUDGET[call.query.dtype]
    out, lse = interpreter.forward(call, capability)
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    d_lse = torch.randn(lse.shape, generator=generator)
    start = call.query_start if isinstance(call.query_start, int) else call.query_start.numpy()
    expected = reference.attention(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        bias=call.bias,
        query_start=start,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout_p=call.dropout_p,
        seed=call.seed if call.seed is None else int(call.seed),
        d_out=d_out,
        d_lse=d_lse,
    )
    assert_close("out", out, expected.out, budget)
    empty = np.isneginf(expected.lse)
    assert np.array_equal(np.isneginf(lse.numpy()), empty)
    assert np.abs(lse.double().numpy() - expected.lse)[~empty].max(initial=0.0) < 10 * budget
    parameters = call.bias.tensors() if call.bias is not None else ()
    wanted = Gradients(True, True, True, call.sinks is not None, (True,) * len(parameters))
    found = interpreter.backward(call, out, lse, d_out, d_lse, wanted, capability)
    for name, gradient, wish in zip(
        Gradients._fields, found[:4], expected.gradients[:4], strict=False
    ):
        if gradient is not None:
            assert_close(f"d_{name}", gradient, wish, budget)
    for n, (gradient, wish) in enumerate(zip(found.bias, expected.gradients.bias, strict=True)):
        assert_close(f"d_bias.{n}", gradient, wish, budget)


def assert_close(name: str, found: torch.Tensor, expected: np.ndarray, budget: float) -> None:
    """Relative error of the whole, and of its worst row; a zero reference must be met exactly."""
    error = found.double().numpy() - expected
    norm = np.linalg.norm(expected)
    if norm == 0:
        assert not error.any(), f"{name}: should be zero"
        return
    assert np.linalg.norm(error) <= budget * norm, f"{name}: {np.linalg.norm(error) / norm:.1e}"
    rows = np.linalg.norm(np.atleast_2d(expected), axis=-1)
    limit = 10 * budget * np.maximum(rows, np.sqrt((rows**2).mean()))
    worst = (np.linalg.norm(np.atleast_2d(error), axis=-1) / limit).max()
    assert worst <= 1, f"{name}: worst row {worst:.1f} times over its budget"


def lengths(*values: int) -> ll.KeyLengths:
    return ll.KeyLengths(torch.tensor(values))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def ids(*shape: int, documents: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-1, documents, shape, generator=generator)


def gaps() -> torch.Tensor:
    """A dense mask with an empty row, and keys that no query sees."""
    visible = random(BATCH, 1, Q_LEN, KV_LEN) > 0
    visible[:, :, 5] = False
    visible[..., 20:40] = False
    return visible


def blocks(q_block: int, kv_block: int, *lead: int, share: float = 0.5) -> ll.BlockSparse:
    shape = (*lead, -(-Q_LEN // q_block), -(-KV_LEN // kv_block))
    generator = torch.Generator().manual_seed(4)
    return ll.BlockSparse(torch.rand(shape, generator=generator) < share, q_block, kv_block)


def packed(keys: list[Any], queries: list[Any] | None = None) -> ll.Packed:
    bounds = None if queries is None else torch.tensor(queries)
    return ll.Packed(torch.tensor(keys), bounds)


ROW = (BATCH, HEADS, Q_LEN)
MASKS = {
    "causal": ll.Causal(),
    "window": ll.SlidingWindow(9, 4),
    "window to the left": ll.SlidingWindow(9, None),
    "window to the right": ll.SlidingWindow(None, 3),
    "lengths": lengths(20, 0),
    "lengths beyond": lengths(-3, 99),
    "documents": ll.Documents(ids(BATCH, KV_LEN)),
    "documents in order": ll.Documents(torch.arange(KV_LEN) // 20),
    "documents of queries": ll.Documents(ids(KV_LEN), ids(BATCH, Q_LEN)),
    "prefix": ll.PrefixLM(20),
    "prefixes": ll.PrefixLM(torch.tensor([33, -1], dtype=torch.int32)),
    "packed": packed([0, 3, 3, 19, 50]),
    "packed per batch": packed([[0, 17, 53, 53], [5, 20, 21, 32]]),
    "packed queries": packed([0, 5, 20, 30, 53], [0, 16, 16, 33, 35]),
    "blocks of tiles": blocks(16, 16, BATCH, HEADS, share=0.3),
    "large blocks": blocks(32, 48, 1, HEADS),
    "odd blocks": blocks(11, 9),
    "no block": blocks(16, 16, share=0.0),
    "dense": ll.DenseMask(gaps()),
    "dense padding": ll.DenseMask(random(BATCH, 1, 1, KV_LEN) > 0),
    "causal window lengths": ll.Causal() & ll.SlidingWindow(9) & lengths(20, 50),
    "causal documents": ll.Causal() & ll.Documents(torch.arange(KV_LEN) // 20),
    "or": ll.SlidingWindow(5, 2) | lengths(10, 0),
    "or of and": (ll.Causal() & ll.SlidingWindow(4)) | (lengths(9, 3) & ll.Causal()),
    "and of or": ll.Causal() & (ll.SlidingWindow(4) | lengths(9, 3)),
    "causal packed window": ll.Causal() & packed([0, 3, 19, 50]) & ll.SlidingWindow(6),
    "packed or prefix": packed([0, 10, 40], [0, 30, 37]) | ll.PrefixLM(3),
    "causal blocks": ll.Causal() & blocks(16, 16, BATCH, 1),
    "blocks or window": blocks(16, 16, 1, HEADS, share=0.2) | ll.SlidingWindow(4),
    "blocks in both": (blocks(32, 16) | ll.SlidingWindow(2))
    & (blocks(16, 64) & ll.Causal() | lengths(9, 3)),
}

BIASES = {
    "alibi": ll.ALiBi(torch.rand(HEADS)),
    "alibi per batch": ll.ALiBi(torch.rand(BATCH, HEADS)),
    "dense": ll.DenseBias(random(BATCH, HEADS, Q_LEN, KV_LEN)),
    "dense per head": ll.DenseBias(random(1, HEADS, Q_LEN, KV_LEN)),
    "dense shared": ll.DenseBias(random(Q_LEN, KV_LEN)),
    "dense of keys": ll.DenseBias(random(BATCH, 1, 1, KV_LEN)),
    "dense of queries": ll.DenseBias(random(HEADS, Q_LEN, 1)),
    "one number": ll.DenseBias(random(1, 1)),
    "dense that hides": ll.DenseBias(
        random(1, 1, Q_LEN, KV_LEN).masked_fill(~gaps()[:1], -math.inf)
    ),
    "sum": ll.DenseBias(random(HEADS, 1, KV_LEN)) + ll.ALiBi(torch.rand(HEADS)),
    "relative": ll.RelativeBias(random(HEADS, 31)),
    "relative, one for all heads": ll.RelativeBias(random(1, 20), first=-30),
    "t5": ll.T5Bias(random(16, HEADS), max_distance=20),
    "t5 decoder": ll.T5Bias(random(9, HEADS), bidirectional=False, max_distance=20),
    "relative, steep": ll.RelativeBias(6 * torch.arange(9.0)[None]),
    "relative and t5": ll.RelativeBias(random(HEADS, 5)) + ll.T5Bias(random(8, 1)),
    "decomposed": ll.DecomposedBias(random(*ROW, 6), random(*ROW, 7), first_key=3),
    "decomposed, long lines": ll.DecomposedBias(random(*ROW, 2), random(*ROW, 16), first_key=16),
    "decomposed, longer lines": ll.DecomposedBias(random(*ROW, 1), random(*ROW, 48)),
    "shaw": ll.ShawRelative(random(7, 16)),
    "shaw to the left": ll.ShawRelative(random(6, 16), first=-30),
    "transformer xl": ll.TransformerXLBias(random(HEADS, 89, 16), random(HEADS, 89), first=-36),
    "transformer xl, shared": ll.TransformerXLBias(random(1, 33, 16)),
    "two slopes": ll.ALiBi(torch.rand(HEADS)) + ll.ALiBi(torch.rand(BATCH, HEADS)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask: ll.Mask) -> None:
    check(case(mask=mask))


@jit
def _hides_nothing(scores, at, own):
    return tl.where(at.k_pos < at.kv_len, scores, float("-inf"))


class SkippedBlocks(ll.BlockSparse):
    """Blocks that nothing but their tiles' states hides."""

    def on_device(self) -> Any:
        return super().on_device()._replace(fragment=_hides_nothing)


@pytest.mark.parametrize("other", [None, ll.SlidingWindow(None, 20)])
def test_tiles_that_are_empty_are_skipped(other: ll.Mask | None) -> None:
    visible = torch.rand(BATCH, HEADS, 3, 4, generator=torch.Generator().manual_seed(4)) < 0.5
    blocks = SkippedBlocks(visible, 16, 16)
    check(case(mask=blocks if other is None else blocks & other))


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_biases(bias: ll.Bias) -> None:
    check(case(bias=bias))


@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        ("causal", "sum"),
        ("lengths", "dense per head"),
        ("or", "alibi"),
        ("dense", "dense of keys"),
        ("causal", "relative and t5"),
        ("documents in order", "t5"),
        ("window", "relative, steep"),
        ("causal documents", "decomposed"),
        ("window", "shaw"),
        ("lengths", "transformer xl"),
    ],
)
def test_masks_with_biases(mask: str, bias: str) -> None:
    check(case(mask=MASKS[mask], bias=BIASES[bias], softcap=4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 1, "kv_len": 1},
        {"q_len": 1, "kv_len": 50, "query_start": 49, "mask": ll.Causal()},
        {"q_len": 32, "kv_len": 48},
        {"q_len": 33, "kv_len": 31, "kv_heads": 2},
        {"q_len": 17, "kv_len": 16, "heads": 4},
        {"head_dim": 40, "value_dim": 24},
        {"head_dim": 1, "value_dim": 3},
        {"q_len": 20, "kv_len": 0},
    ],
    ids=str,
)
def test_sizes(dtype: Any, sizes: dict[str, Any]) -> None:
    check(case(dtype, **sizes))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2])
def test_scales(scale: float) -> None:
    check(case(scale=scale, mask=ll.Causal()))


@pytest.mark.parametrize("start", [-5, torch.tensor([-5, 16])], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "packed", "blocks or window"])
def test_query_start(mask: str, start: Any) -> None:
    check(case(mask=MASKS[mask], query_start=start))


@pytest.mark.parametrize(
    ("height", "width", "q_len", "start"),
    [(5, 5, 25, 0), (3, 6, 11, 4), (3, 6, 11, torch.tensor([-2, 8, 0]))],
    ids=str,
)
def test_windows(height: int, width: int, q_len: int, start: Any) -> None:
    table = random((2 * height - 1) * (2 * width - 1), HEADS)
    bias = ll.RelativeBias2D(table, height, width)
    check(case(batch=3, q_len=q_len, kv_len=height * width, query_start=start, bias=bias))


@pytest.mark.parametrize("bias", ["shaw", "transformer xl", "decomposed"])
def test_query_start_under_biases_of_rows(bias: str) -> None:
    start = torch.tensor([-5, 16])
    check(case(query_start=start, bias=BIASES[bias], mask=MASKS["causal"]))


@pytest.mark.parametrize(
    "bias",
    [
        ll.DecomposedBias(random(BATCH, 4, 33, 3), random(BATCH, 4, 33, 9)),
        ll.ShawRelative(random(70, 40), first=-40),
        ll.TransformerXLBias(random(4, 3, 40), random(1, 3)) + ll.ALiBi(torch.rand(4)),
    ],
    ids=["decomposed", "shaw", "transformer xl"],
)
def test_biases_of_rows_in_half_precision(bias: ll.Bias) -> None:
    call = case(torch.float16, q_len=33, kv_len=31, heads=4, kv_heads=2, head_dim=40, value_dim=24)
    check(replace(call, bias=bias))


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 0},
        {"kv_len": 0},
        {"batch": 0},
        {"q_len": 0, "kv_len": 9},
        {"q_len": 3, "kv_len": 0},
    ],
    ids=str,
)
def test_offsets_of_nothing(sizes: dict[str, Any]) -> None:
    keys = ll.TransformerXLBias(random(HEADS, 5, 16), random(HEADS, 5))
    check(case(**sizes, bias=keys + ll.RelativeBias(random(HEADS, 5))))


STEEP = ll.RelativeBias(6 * torch.arange(9.0)[None])


@pytest.mark.parametrize(
    "bias",
    [
        ll.ShawRelative(random(5, 16)) + ll.T5Bias(random(8, HEADS), max_distance=20),
        ll.DecomposedBias(random(*ROW, 1), random(*ROW, 32)) + ll.RelativeBias(random(1, 9)),
        ll.DecomposedBias(random(*ROW, 1), random(*ROW, 32)) + STEEP,
    ],
    ids=["shaw and t5", "decomposed and relative", "decomposed and steep"],
)
def test_walks_of_tiles_before_the_first_key(
    bias: ll.Bias, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "offset_gradient", lambda *_: Config(16, 32, 4, 1))
    check(case(bias=bias))


def test_softcap() -> None:
    check(case(softcap=2.0))


def test_sinks() -> None:
    check(case(sinks=random(HEADS), mask=lengths(20, 0)))


@pytest.mark.parametrize(
    ("dropout_p", "seed"), [(1.0, -(2**63) + 12345), (0.3, torch.tensor([2**40 + 1]))], ids=str
)
def test_dropout(dropout_p: float, seed: Any) -> None:
    check(case(dropout_p=dropout_p, seed=seed, mask=ll.Causal(), bias=BIASES["dense per head"]))


def test_strided_views() -> None:
    call = case()
    packed = torch.cat([call.query, call.query], dim=3).transpose(1, 2).contiguous().transpose(1, 2)
    query = packed[..., 16:]
    key = call.key.transpose(1, 2).contiguous().transpose(1, 2).flip(0)
    value = torch.stack([call.value, call.value], dim=2)[:, :, 1]
    bias = ll.DenseBias(random(KV_LEN, Q_LEN).T)
    check(replace(call, query=query, key=key, value=value, bias=bias))


@pytest.mark.parametrize(
    "hidden",
    [
        {"mask": lengths(20, 33)},
        {"mask": ll.Causal()},
        {"mask": ll.DenseMask(gaps())},
        {"mask": ll.SlidingWindow(3) & ll.DenseMask(gaps())},
        {"mask": packed([[0, 17, 40], [3, 20, 20]])},
        {"mask": blocks(64, 16, share=0.4)},
        {"bias": BIASES["dense that hides"]},
    ],
    ids=str,
)
def test_keys_that_nobody_sees_may_hold_anything(hidden: dict[str, Any]) -> None:
    call = case(kv_heads=HEADS, **hidden)
    visible = _visible(call)
    unseen = ~visible.any(axis=2)
    assert unseen.any()
    for tensor in (call.key, call.value):
        tensor[torch.from_numpy(unseen)] = math.nan
    check(call)


def _visible(call: Call) -> np.ndarray:
    from limelight.tile import Positions

    at = Positions.of(
        np, size=call.size, dtype=np.float64, device="cpu", query_start=call.query_start
    ).whole()
    visible = np.ones(tuple(call.size), bool)
    if call.mask is not None:
        visible &= call.mask.map_tensors(np.asarray).values(at, np)
    if call.bias is not None:
        visible &= ~np.isneginf(call.bias.map_tensors(np.asarray).values(at, np))
    return visible


@pytest.mark.parametrize("want", ["query", "key", "value"])
def test_a_single_gradient(want: str) -> None:
    call = case(mask=ll.Causal())
    out, lse = interpreter.forward(call)
    d_out = random(*out.shape)
    every = interpreter.backward(call, out, lse, d_out, None, Gradients(1, 1, 1, 0, ()))
    names = Gradients._fields[:3]
    wanted = Gradients(*(name == want for name in names), False, ())
    found = interpreter.backward(call, out, lse, d_out, None, wanted)
    for name, gradient, same in zip(names, found, every, strict=False):
        assert (gradient is not None) == (name == want)
        assert gradient is None or torch.equal(gradient, same)


def test_batches_of_nothing() -> None:
    for sizes in ({"batch": 0}, {"q_len": 0}):
        call = case(**sizes)
        out, lse = interpreter.forward(call)
        wanted = Gradients(1, 1, 1, 0, ())
        found = interpreter.backward(call, out, lse, torch.zeros_like(out), None, wanted)
        assert not any(gradient.any() for gradient in found[:3])


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Has float32 split into halves at small sizes too, and gets the "units" of what was split."""
    memory: dict[str, torch.Tensor] = {}
    scratch = interpreter._scratch

    def kept(needed: Any) -> dict[str, torch.Tensor]:
        memory.clear()
        memory.update(scratch(needed))
        return memory

    monkeypatch.setattr(interpreter, "_scratch", kept)
    monkeypatch.setattr(configs, "HALVES_FROM", 1)
    monkeypatch.setattr(configs, "SPLIT", Config(16, 1, 4, 1))
    return memory


IN_HALVES = {
    "causal, grouped heads": {
        "mask": ll.Causal(),
        "query_start": 15,
        "batch": 1,
        "heads": 4,
        "kv_heads": 2,
        "q_len": 20,
        "kv_len": 35,
    },
    "gaps and slopes": {"mask": MASKS["dense"], "bias": BIASES["alibi"]},
    "softcap, dropout": {"softcap": 2.0, "dropout_p": 0.3, "seed": 5, "head_dim": 24, "q_len": 20},
}


@pytest.mark.parametrize("others", IN_HALVES.values(), ids=IN_HALVES.keys())
def test_halves(units: dict[str, torch.Tensor], others: dict[str, Any]) -> None:
    check(case(**others), capability=90)
    assert (units["units"] > 0).all()


def channels(factor: float) -> torch.Tensor:
    """Every other channel so much larger."""
    return torch.tensor([factor, 1.0]).repeat(8)


def spread(call: Call) -> Call:
    """Numbers between 1e-6 and 1e6, all as likely."""
    tensors = {}
    for n, name in enumerate(("query", "key", "value")):
        tensor = getattr(call, name)
        draw = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(n))
        tensors[name] = tensor.sign() * 10 ** (12 * draw - 6)
    return replace(call, **tensors, scale=1e-12)


AWKWARD = {
    "mean": (lambda c: replace(c, value=c.value + 100), True),
    "tiny and huge": (lambda c: replace(c, query=c.query * 1e-12, key=c.key * 1e12), True),
    "channels": (lambda c: replace(c, key=c.key * channels(1e5), value=c.value / 9e9), True),
    "channels that balance": (
        lambda c: replace(c, query=c.query * channels(1e6), key=c.key / channels(1e6)),
        True,
    ),
    "channels too far apart": (
        lambda c: replace(c, query=c.query * channels(1e9), key=c.key / channels(1e9)),
        False,
    ),
    "spread": (spread, True),
}


@pytest.mark.parametrize(("change", "fits"), AWKWARD.values(), ids=AWKWARD.keys())
def test_halves_of_awkward_numbers(units: dict[str, torch.Tensor], change: Any, fits: bool) -> None:
    """At most twice the error of IEEE products, or of rounding, whichever launch takes a head."""
    call = change(case(batch=1, q_len=32, kv_len=16))
    d_out = random(*call.query.shape)
    expected = reference.attention(call.query, call.key, call.value, scale=call.scale, d_out=d_out)
    errors = []
    for capability in (90, 60):
        out, lse = interpreter.forward(call, capability)
        wanted = Gradients(True, True, True, False, ())
        found = interpreter.backward(call, out, lse, d_out, None, wanted, capability)
        if capability == 90:
            assert (units["units"] > 0).all() == fits
        pairs = zip((out, *found[:3]), (expected.out, *expected.gradients[:3]), strict=True)
        errors.append(
            [np.linalg.norm(a.double().numpy() - b) / np.linalg.norm(b) for a, b in pairs]
        )
    for ours, ieee in zip(*errors, strict=True):
        assert ours <= 2 * max(ieee, 2**-24)


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_halves_beside_hidden_keys(units: dict[str, torch.Tensor], poison: float) -> None:
    """They may hold anything: such a head is not split."""
    call = case(mask=lengths(20, 53))
    for tensor in (call.key, call.value):
        tensor[0, :, 20:] = poison
    check(call, capability=90)
    assert (units["units"] > 0).all(dim=2).flatten().tolist() == [False, True]


def test_biases_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    own = importlib.import_module("own_bias")
    bias = own.PeriodicBias(random(1, 5)) + own.LogDistance(torch.rand(HEADS))
    check(case(bias=bias, mask=ll.Causal(), query_start=3))


EXPORTED = {
    "alibi": (Exported("causal", "alibi"), {"mask": ll.Causal(), "bias": ll.ALiBi(random(HEADS))}),
    "dense, one query": (
        Exported(bias="dense_bias"),
        {"bias": ll.DenseBias(random(1, HEADS, 1, KV_LEN)), "q_len": 1, "batch": 1},
    ),
    "table of one head": (
        Exported("key_lengths", "relative_bias"),
        {"mask": lengths(53, 20), "bias": ll.RelativeBias(random(1, 21)), "heads": 1},
    ),
    "table, one key": (
        Exported(bias="t5_bias"),
        {"bias": ll.T5Bias(random(32, HEADS)), "kv_len": 1, "query_start": 20},
    ),
    "sinks": (Exported(), {"sinks": random(HEADS)}),
}


@pytest.mark.parametrize(("exported", "others"), EXPORTED.values(), ids=EXPORTED.keys())
def test_exported_variants(
    exported: Exported, others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is 1 long, and compiled in as such at a call, is a number like others in an export."""
    monkeypatch.setattr(interpreter, "forward", exported.forward)
    monkeypatch.setattr(interpreter, "backward", exported.backward)
    check(case(torch.float16, **others))


def test_an_export_leaves_out_what_nobody_wants() -> None:
    call = case(torch.float16, bias=ll.ALiBi(random(HEADS)))
    out, lse = Exported(bias="alibi").forward(call)
    everything = Gradients(True, True, True, False, (True,))
    gradients = (call, out, lse, torch.ones_like(out), torch.zeros_like(lse))
    full = Exported(bias="alibi").backward(*gradients, everything)
    slopes = Exported(bias="alibi").backward(
        *gradients, Gradients(False, False, False, False, (True,))
    )
    assert torch.equal(slopes.bias[0], full.bias[0])
    query = Exported(bias="alibi").backward(
        *gradients, Gradients(True, False, False, False, (False,))
    )
    assert torch.equal(query.query, full.query)
