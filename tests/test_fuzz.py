"""Random calls, every backend that takes them against the oracle, row by row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DecomposedBias,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    PrefixLM,
    RelativeBias,
    ShawRelative,
    SlidingWindow,
    T5Bias,
    TransformerXLBias,
    attention,
    attention_vjp,
    backends,
    explain,
    record,
)
from limelight.backends import BACKENDS
from limelight.testing import STEP, TOLERANCES, as_float64, assert_close, check, oracle, poisoned

DTYPES = st.sampled_from(
    [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]
)
# Small, and a few that cross the tiles' edges.
LENGTHS = st.integers(0, 20) | st.sampled_from([255, 256, 257, 300, 511, 513, 520])


@st.composite
def sizes(draw, lengths=LENGTHS):
    q_len, kv_len = draw(lengths), draw(lengths)
    if draw(st.booleans()):
        kv_len = q_len
    few = max(q_len, kv_len) > 20
    kv_heads = draw(st.integers(1, 1 if few else 3))
    return {
        "batch": draw(st.integers(0 if not few else 1, 2 if few else 3)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": draw(st.integers(1, 17) | st.sampled_from([32, 64, 80])),
        "value_dim": draw(st.integers(1, 17) | st.sampled_from([32, 64])),
    }


class Drawn:
    """Tensors drawn with one generator, some as strange views."""

    def __init__(self, draw, dtype=torch.float32):
        self.draw, self.dtype = draw, dtype
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(self, *shape, dtype=None, grad=None):
        grad = self.draw(st.booleans()) if grad is None else grad
        tensor = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return tensor.to(dtype or self.dtype).requires_grad_(grad)

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype)

    def booleans(self, *shape):
        share = self.draw(st.sampled_from([0.05, 0.5, 0.95]))
        return torch.rand(*shape, generator=self.generator) < share

    def heads(self, batch, heads, length, dim):
        """(batch, heads, length, dim) in one of several layouts."""
        grad = self.draw(st.booleans())
        kind = self.draw(
            st.sampled_from(["plain", "plain", "transposed", "sliced", "spread", "shared"])
        )
        if kind == "transposed":
            return self.normal(batch, length, heads, dim, grad=grad).transpose(1, 2)
        if kind == "sliced":
            return self.normal(batch, heads + 1, length, dim + 3, grad=grad)[:, 1:, :, 1 : dim + 1]
        if kind == "spread":
            return self.normal(batch, heads, length, 2 * dim, grad=grad)[..., ::2]
        if kind == "shared":
            return self.normal(batch, 1, length, dim, grad=grad).expand(batch, heads, length, dim)
        return self.normal(batch, heads, length, dim, grad=grad)

    def broadcast_shape(self, full):
        """A shape of two to four dimensions that broadcasts to `full`."""
        shape = [size if self.draw(st.booleans()) else 1 for size in full]
        return tuple(shape[self.draw(st.integers(0, 2)) :])


@st.composite
def one_mask(draw, drawn, s):
    batch, q_len, kv_len = s["batch"], s["q_len"], s["kv_len"]
    width = st.none() | st.integers(0, 30)
    kinds = ["causal", "window", "prefix", "lengths", "dense", "blocks", "query documents"]
    kinds += ["query packed"] if q_len > kv_len else ["query packed", "packed", "documents"]
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return Causal()
    if kind == "window":
        return SlidingWindow(draw(width), draw(width))
    if kind == "lengths":
        dtype = draw(st.sampled_from([torch.int64, torch.int32]))
        return KeyLengths(drawn.integers(-2, kv_len + 2, batch, dtype=dtype))
    if kind == "dense":
        full = (batch, s["heads"], q_len, kv_len)
        return DenseMask(drawn.booleans(*drawn.broadcast_shape(full)))
    lead = (batch,) if draw(st.booleans()) else ()
    if kind == "prefix":
        return PrefixLM(draw(st.integers(0, 20)) if lead else drawn.integers(-2, kv_len + 2, batch))
    if kind == "blocks":
        q_block, kv_block = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        full = (*lead, s["heads"] if lead else 1, -(-q_len // q_block), -(-kv_len // kv_block))
        return BlockSparse(drawn.booleans(*full), q_block, kv_block)
    if "packed" in kind:
        count = draw(st.integers(1, 4))
        bounds = drawn.integers(0, kv_len, *lead, count).sort(dim=-1).values
        if kind == "packed":
            return Packed(bounds)
        return Packed(bounds, drawn.integers(0, q_len, *lead, count).sort(dim=-1).values.int())
    ids = drawn.integers(-1, 2, *lead, kv_len)
    ids = ids.sort(dim=-1).values if draw(st.booleans()) else ids
    if kind == "documents":
        return Documents(ids)
    return Documents(ids, drawn.integers(-1, 2, *((batch,) if draw(st.booleans()) else ()), q_len))


@st.composite
def one_bias(draw, drawn, s):
    dtype = draw(st.sampled_from([drawn.dtype, torch.float32]))
    kinds = ["alibi", "batched alibi", "dense", "dense with gaps", "relative", "t5", "shaw"]
    kinds.append("transformer xl")
    if s["kv_len"] > 0:
        kinds.append("decomposed")
    if drawn.dtype != torch.float64:
        kinds.append("paper")  # whose slopes are float32
    kind = draw(st.sampled_from(kinds))
    if kind == "paper":
        return ALiBi()
    if kind.endswith("alibi"):
        lead = (s["batch"],) if kind == "batched alibi" else ()
        return ALiBi(drawn.normal(*lead, s["heads"], dtype=dtype))
    heads = draw(st.sampled_from([1, s["heads"]]))
    if kind == "relative":
        first = draw(st.integers(-40, 10))
        return RelativeBias(drawn.normal(heads, draw(st.integers(1, 60)), dtype=dtype), first)
    if kind == "t5":
        table = drawn.normal(draw(st.integers(4, 32)), heads, dtype=dtype)
        return T5Bias(table, draw(st.booleans()), draw(st.integers(17, 150)))
    if kind == "decomposed":
        columns = draw(st.integers(1, s["kv_len"]))
        lines = draw(st.integers(1, s["kv_len"] // columns))
        row = (s["batch"], s["heads"], s["q_len"])
        return DecomposedBias(
            drawn.normal(*row, lines, dtype=dtype),
            drawn.normal(*row, columns, dtype=dtype),
            draw(st.integers(0, s["kv_len"] - lines * columns)),
        )
    if kind in ("shaw", "transformer xl"):
        offsets, first = draw(st.integers(1, 60)), draw(st.integers(-60, 20))
        lead = (draw(st.sampled_from([1, s["heads"]])),)
        table = drawn.normal(*lead, offsets, s["head_dim"], dtype=dtype)
        if kind == "shaw":
            return ShawRelative(table[0].detach().requires_grad_(), first)
        scores = drawn.normal(*lead, offsets, dtype=dtype) if draw(st.booleans()) else None
        return TransformerXLBias(table, scores, first)
    shape = drawn.broadcast_shape((s["batch"], s["heads"], s["q_len"], s["kv_len"]))
    tensor = drawn.normal(*shape, dtype=dtype, grad=False)
    if kind == "dense with gaps":
        tensor = tensor.masked_fill(drawn.booleans(*shape), -torch.inf)
    return DenseBias(tensor.requires_grad_(draw(st.booleans())))


@st.composite
def calls(draw, dtypes=DTYPES, lengths=LENGTHS):
    s = draw(sizes(lengths))
    drawn = Drawn(draw, draw(dtypes))
    q = drawn.heads(s["batch"], s["heads"], s["q_len"], s["head_dim"])
    k = drawn.heads(s["batch"], s["kv_heads"], s["kv_len"], s["head_dim"])
    v = drawn.heads(s["batch"], s["kv_heads"], s["kv_len"], s["value_dim"])
    options = {}
    if draw(st.booleans()):
        mask = draw(one_mask(drawn, s))
        for _ in range(draw(st.integers(0, 2))):
            other = draw(one_mask(drawn, s))
            mask = mask & other if draw(st.booleans()) else mask | other
        options["mask"] = mask
    if draw(st.booleans()):
        options["bias"] = draw(one_bias(drawn, s))
        if draw(st.booleans()):
            options["bias"] = options["bias"] + draw(one_bias(drawn, s))
    start = draw(st.sampled_from(["zero", "number", "end", "each"]))
    options["query_start"] = {
        "zero": 0,
        "number": draw(st.integers(-10, 30)),
        "end": "end",
        "each": drawn.integers(-10, 30, s["batch"]),
    }[start]
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.5, 0.2, 1.0]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.booleans()):
        options["sinks"] = drawn.normal(s["heads"])
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        options["seed"] = draw(st.integers(-(2**63), 2**63 - 1))
    return (q, k, v), options


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(calls())
def test_every_backend_agrees_with_the_oracle(call):
    inputs, options = call
    ran = []
    for backend in BACKENDS:
        with backends(backend.name):
            if explain(*inputs, **options).backend is None:
                continue
            note(f"backend {backend.name}")
            with poisoned():
                check(*inputs, **options)
            ran.append(backend.name)
    assert "math" in ran


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(
    calls(
        dtypes=st.sampled_from([torch.float32, torch.float64, torch.float16]),
        lengths=st.integers(0, 12),
    )
)
def test_numpy_agrees_with_the_oracle(call):
    inputs, options = call
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            options[name] = options[name].map_tensors(lambda t: t.detach().numpy())
    for name in ("sinks", "query_start"):
        if isinstance(options.get(name), torch.Tensor):
            options[name] = options[name].detach().numpy()
    q, k, v = (t.detach().numpy() for t in inputs)
    (out, lse), pullback = attention_vjp(q, k, v, return_lse=True, **options)
    tolerance = TOLERANCES[q.dtype.name]
    expected = oracle(q, k, v, **options)
    largest = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=0.0)
    tolerance += (2.0**-52 if q.dtype.name == "float64" else 2.0**-23) * largest
    assert_close("out", out, expected.out, tolerance, slack=STEP[q.dtype.name])
    assert_close("lse", lse, expected.lse, tolerance, rows=False)
    if q.dtype.name != "float64":
        return  # the gradients' slack is the torch tests' matter
    d_out, d_lse = as_float64(out) + 1, np.full(lse.shape, 0.5)
    found = pullback(d_out, d_lse)
    right = oracle(q, k, v, d_out=d_out, d_lse=d_lse, **options).gradients
    pairs = zip((*found[:4], *found.bias), (*right[:4], *right.bias), strict=True)
    assert len(found.bias) == len(right.bias)
    for n, (gradient, theirs) in enumerate(pairs):
        if theirs is not None:
            assert_close(f"gradient {n}", gradient, theirs, 1e-6, slack=1e-11)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(calls(dtypes=st.just(torch.float32), lengths=st.integers(0, 12)))
def test_what_runs_is_what_explain_says(call):
    inputs, options = call
    with record() as ran:
        attention(*inputs, **options)
    choice = explain(*inputs, **options)
    assert ran[0].choice == choice
    assert ran[0].backend == choice.backend
