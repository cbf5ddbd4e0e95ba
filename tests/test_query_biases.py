"""Biases with a row of numbers for each query, given or as products with the query: on every backend,
with every mask, against the formulas of those who use them."""

from __future__ import annotations

import pytest
import torch
from inputs import normal, qkv

from limelight import (
    ALiBi,
    Causal,
    DecomposedBias,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    ShawRelative,
    SlidingWindow,
    TransformerXLBias,
    attention,
    backends,
    explain,
)
from limelight.testing import check

BATCH, HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 11, 14, 8


def made(name, device="cpu", dtype=torch.float32):
    """One of each, with gradients, for the sizes above."""

    def tensor(*shape):
        return normal(*shape, device=device, dtype=dtype)

    row = (BATCH, HEADS, Q_LEN)
    return {
        "decomposed": lambda: DecomposedBias(tensor(*row, 2), tensor(*row, 7)),
        "decomposed with class tokens": lambda: DecomposedBias(tensor(*row, 4), tensor(*row, 3), 1),
        "shaw": lambda: ShawRelative(tensor(7, DIM)),
        "shaw to the left": lambda: ShawRelative(tensor(6, DIM), first=-5),
        "transformer xl": lambda: TransformerXLBias(
            tensor(HEADS, Q_LEN + KV_LEN - 1, DIM),
            tensor(HEADS, Q_LEN + KV_LEN - 1),
            first=1 - Q_LEN,
        ),
        "transformer xl, shared and short": lambda: TransformerXLBias(tensor(1, 5, DIM)),
        "sum": lambda: (
            ShawRelative(tensor(7, DIM))
            + DecomposedBias(tensor(*row, 2), tensor(*row, 7))
            + TransformerXLBias(tensor(HEADS, 9, DIM), tensor(1, 9))
            + ALiBi(tensor(HEADS))
        ),
    }[name]()


BIASES = (
    "decomposed", "decomposed with class tokens", "shaw", "shaw to the left", "transformer xl",
    "transformer xl, shared and short", "sum",
)  # fmt: skip
FEW = ("decomposed with class tokens", "shaw", "transformer xl", "sum")
MASKS = {
    "none": lambda device: None,
    "causal": lambda device: Causal(),
    "window": lambda device: SlidingWindow(3, 2),
    "lengths": lambda device: KeyLengths(torch.tensor([9, 0], device=device)),
    "documents": lambda device: Documents(torch.arange(KV_LEN, device=device) // 5),
    "dense": lambda device: DenseMask(
        torch.rand(BATCH, 1, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(0)).to(device)
        > 0.5
    ),
    "joined": lambda device: Causal() & (SlidingWindow(2) | KeyLengths([3, 5])),
}


def inputs(device="cpu", **sizes):
    sizes = {"kv_heads": 2, "q_len": Q_LEN, "kv_len": KV_LEN, "head_dim": DIM, **sizes}
    return qkv(batch=BATCH, heads=HEADS, device=device, **sizes)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", FEW)
def test_with_every_mask(backend, device, bias, mask):
    q, k, v = inputs(device)
    options = {"bias": made(bias, device), "mask": MASKS[mask](device), "query_start": 2}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": -0.7, "softcap": 1.5},
        {"dropout_p": 0.3, "seed": 5},
        {"query_start": "end", "mask": Causal()},
        {"query_start": [5, -3]},
        {"query_start": -40, "scale": 0.0},
        {"query_start": 60},
    ],
    ids=str,
)
def test_with_the_other_options(backend, device, bias, options):
    q, k, v = inputs(device)
    options = {**options, "bias": made(bias, device), "sinks": normal(HEADS, device=device)}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("bias", ["decomposed", "shaw", "transformer xl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_in_half_precision(backend, device, bias, dtype, parameters):
    q, k, v = inputs(device, dtype=dtype)
    own = dtype if parameters == "half" else torch.float32
    options = {"bias": made(bias, device, own), "query_start": 3}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("length", [129, 300])
def test_over_many_tiles(backend, device, nan_memory, length):
    """More than one of tiled's tiles: 10 lines of 12 columns after a class token, and clipped ends."""
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, q_len=length - 9, kv_len=length, device=device)
    row = (1, 2, length - 9)
    bias = (
        DecomposedBias(normal(*row, 10, device=device), normal(*row, 12, device=device), 1)
        + ShawRelative(normal(33, 8, device=device))
        + TransformerXLBias(normal(2, 401, 8, device=device), normal(2, 401, device=device), -300)
    )
    options = {"bias": bias, "query_start": "end", "mask": KeyLengths([length - 2])}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("bias", ["decomposed", "transformer xl"])
def test_any_subset_of_gradients(backend, device, bias):
    q, k, v = inputs(device)
    made_bias = made(bias, device)
    tensors = [q, k, v, *made_bias.tensors()]
    for n, tensor in enumerate(tensors):
        for other in tensors:
            other.requires_grad_(other is tensor)
        backend.runs(q, k, v, bias=made_bias)
        check(q, k, v, bias=made_bias)
        assert tensor.requires_grad, n


@pytest.mark.parametrize("bias", BIASES)
def test_what_nobody_sees_may_hold_anything(backend, device, bias):
    """Keys past their length, and queries that see no key."""
    q, k, v = inputs(device)
    mask = KeyLengths(torch.tensor([9, 0], device=device))
    with torch.no_grad():
        k[0, :, 9:], v[0, :, 9:], q[1], k[1], v[1] = (torch.nan,) * 5
    options = {"bias": made(bias, device), "mask": mask}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("bias", FEW)
def test_gradcheck(bias):
    q, k, v = inputs(dtype=torch.float64)
    bias = made(bias, dtype=torch.float64)

    def run(q, k, v, *tensors):
        with backends("math"):
            return attention(q, k, v, bias=bias.with_tensors(iter(tensors)), query_start=1)

    q, k, v = (t[:1].detach().requires_grad_() for t in (q, k, v))
    tensors = [t[:1] if t.ndim == 4 else t for t in bias.tensors()]
    tensors = [t.detach().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(run, (q, k, v, *tensors), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, *tensors), fast_mode=True)


@pytest.mark.parametrize("bias", ["decomposed", "shaw", "transformer xl"])
def test_compiled(bias):
    q, k, v = inputs()
    bias = made(bias)
    tensors = (q, k, v, *bias.tensors())

    def run(q, k, v, *tensors):
        return attention(q, k, v, bias=bias.with_tensors(iter(tensors)))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    d_out = normal(*q.shape, grad=False)
    for found, expected in zip(
        torch.autograd.grad(compiled(*tensors), tensors, d_out),
        torch.autograd.grad(run(*tensors), tensors, d_out),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


# Third parties' formulas.


def test_conformers_relative_positions():
    """The function of transformers' Wav2Vec2-Conformer, u and v included, and its gradients."""
    module = pytest.importorskip(
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer"
    )
    batch, heads, length, dim = 2, 3, 13, 8
    q, k, v = qkv(batch=batch, heads=heads, q_len=length, dtype=torch.float64)
    own = torch.nn.Module()
    own.head_size, own.scaling = dim, dim**-0.5
    own.linear_pos = torch.nn.Linear(heads * dim, heads * dim, bias=False, dtype=torch.float64)
    own.pos_bias_u = torch.nn.Parameter(normal(heads, dim, dtype=torch.float64))
    own.pos_bias_v = torch.nn.Parameter(normal(heads, dim, dtype=torch.float64))
    config = module.Wav2Vec2ConformerConfig(hidden_size=heads * dim)
    embedding = module.Wav2Vec2ConformerRelPositionalEmbedding(config)
    positions = embedding(torch.zeros(1, length, heads * dim, dtype=torch.float64))

    moved, added = module._apply_relative_position_encoding(own, q, k, positions)
    theirs = (moved @ k.mT * own.scaling + added).softmax(dim=-1) @ v

    # Their positions run from the offset length - 1 to the left to length - 1 to the right.
    keys = own.linear_pos(positions[0]).view(2 * length - 1, heads, dim).transpose(0, 1)
    query, bias = TransformerXLBias.of(q, keys, own.pos_bias_u, own.pos_bias_v)
    ours = attention(query, k, v, bias=bias)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    wanted = [q, k, v, own.pos_bias_u, own.pos_bias_v, own.linear_pos.weight]
    d_out = normal(*ours.shape, dtype=torch.float64, grad=False)
    for found, expected in zip(
        torch.autograd.grad(ours, wanted, d_out),
        torch.autograd.grad(theirs, wanted, d_out),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_segment_anythings_relative_positions():
    """transformers' SAM: the whole bias as it makes it, of a grid that is no square."""
    module = pytest.importorskip("transformers.models.sam.modeling_sam")
    lines, columns = 3, 5
    q, k, v = qkv(batch=2, heads=1, q_len=lines * columns, dtype=torch.float64)
    own = module.SamVisionAttention.__new__(module.SamVisionAttention)
    torch.nn.Module.__init__(own)
    table_h, table_w = (normal(2 * n - 1, 8, dtype=torch.float64) for n in (lines, columns))
    theirs = own.get_decomposed_rel_pos(
        q[:, 0], table_h, table_w, (lines, columns), (lines, columns)
    )
    theirs = theirs.reshape(2, 1, lines * columns, lines * columns)

    grid = q.reshape(2, 1, lines, columns, 8)
    by_line, by_column = (
        own.get_rel_pos(n, n, table) for n, table in ((lines, table_h), (columns, table_w))
    )
    rel_h = torch.einsum("bnhwc,hkc->bnhwk", grid, by_line).flatten(2, 3)
    rel_w = torch.einsum("bnhwc,wkc->bnhwk", grid, by_column).flatten(2, 3)
    ours = attention(q, k, v, bias=DecomposedBias(rel_h, rel_w))
    dense = attention(q, k, v, bias=DenseBias(theirs))
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    wanted = [q, k, v, table_h, table_w]
    d_out = normal(*ours.shape, dtype=torch.float64, grad=False)
    for found, expected in zip(
        torch.autograd.grad(ours, wanted, d_out),
        torch.autograd.grad(dense, wanted, d_out),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("distance", [1, 3, 40])
def test_shaws_relative_keys(distance):
    """Equation 5, a vector for every pair."""
    q, k, v = qkv(q_len=9, kv_len=12, dtype=torch.float64)
    table = normal(2 * distance + 1, 8, dtype=torch.float64)
    offset = torch.arange(12)[None] - torch.arange(9)[:, None]
    pairs = table[offset.clamp(-distance, distance) + distance]  # [9, 12, 8]
    scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, pairs)) / 8**0.5
    theirs = scores.softmax(dim=-1) @ v
    ours = attention(q, k, v, bias=ShawRelative(table))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for found, expected in zip(
        torch.autograd.grad(ours.square().sum(), (q, k, table)),
        torch.autograd.grad(theirs.square().sum(), (q, k, table)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


# What is refused.


def rows(*shape, dtype=torch.float32):
    return torch.zeros(BATCH, HEADS, Q_LEN, *shape, dtype=dtype)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (lambda: DecomposedBias(rows(3)[0], rows(4)), r"rel_h: found shape \(4, 11, 3\)"),
        (lambda: DecomposedBias(rows(3), rows(4)[:, :1]), r"rel_w: found shape .* columns of the"),
        (lambda: DecomposedBias(rows(3), rows(0)), "rel_w: found shape .* at least 1"),
        (lambda: DecomposedBias(rows(3), rows(5)), "a grid of 3 x 5 keys .* within the 14 keys"),
        (lambda: DecomposedBias(rows(3), rows(4), 3), "a grid of 3 x 4 keys from key 3 on"),
        (lambda: DecomposedBias(rows(3), rows(4), -1), "first_key: found -1"),
        (lambda: DecomposedBias(rows(3), rows(4), 1.0), "first_key: found 1.0"),
        (lambda: DecomposedBias(rows(3, dtype=torch.int64), rows(4)), "rel_h: found dtype int64"),
        (lambda: ShawRelative(torch.ones(5)), r"key_table: found shape \(5,\)"),
        (lambda: ShawRelative(torch.ones(0, DIM), 0), r"key_table: found shape \(0, 8\)"),
        (
            lambda: ShawRelative(torch.ones(4, DIM)),
            "4 offsets and no `first`, needed an odd number",
        ),
        (lambda: ShawRelative(torch.ones(5, 9)), "last dimension of 9, needed the head_dim"),
        (lambda: ShawRelative(torch.ones(5, DIM), first=0.5), "first: found 0.5"),
        (lambda: ShawRelative(torch.ones(5, DIM).int()), "key_table: found dtype int32"),
        (lambda: TransformerXLBias(torch.ones(5, DIM)), r"position_keys: found shape \(5, 8\)"),
        (lambda: TransformerXLBias(torch.ones(2, 5, DIM)), r"position_keys: found shape \(2, 5, 8"),
        (
            lambda: TransformerXLBias(torch.ones(1, 5, DIM), torch.ones(HEADS, 4)),
            r"position_scores: found shape \(4, 4\), needed \(4 query heads or 1, 5 offsets\)",
        ),
        (
            lambda: DenseBias(torch.ones(1, 1)) + TransformerXLBias(torch.ones(1, 4, DIM)),
            "4 offsets and no `first`",
        ),
    ],
)
def test_what_does_not_fit_is_refused(bias, message):
    q, k, v = inputs()
    with pytest.raises((ValueError, TypeError), match=message):
        attention(q, k, v, bias=bias())


def test_explain_and_attention_agree():
    q, k, v = inputs()
    for name in BIASES:
        assert explain(q, k, v, bias=made(name)).backend == "tiled"
