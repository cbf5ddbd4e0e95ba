"""The table of semantics, row by row, on every backend that takes the problem, against the oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from inputs import DTYPES, normal, qkv

from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    SlidingWindow,
    attention,
)
from limelight.testing import (
    ROUNDING,
    TOLERANCES,
    as_float64,
    assert_close,
    check,
    error,
    magnitudes,
    oracle,
)

pytestmark = pytest.mark.usefixtures("nan_memory")
INF, NAN = math.inf, math.nan


# Scale, and the order: scale, softcap, bias, mask, softmax with sinks, dropout, values.


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 0.3, 2, 1e-30])
def test_scale(backend, device, scale):
    q, k, v = qkv(device=device, kv_len=13)
    backend.runs(q, k, v, scale=scale)
    check(q, k, v, scale=scale)


def test_default_scale_is_one_over_the_root_of_head_dim(backend, device):
    q, k, v = qkv(device=device, head_dim=16, value_dim=5, grad=False)
    backend.runs(q, k, v)
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, scale=0.25), rtol=0, atol=0)


def test_zero_scale_averages_the_values(backend, device):
    q, k, v = qkv(device=device, grad=False)
    backend.runs(q, k, v, scale=0.0)
    mean = v.mean(dim=2, keepdim=True).expand_as(v)
    torch.testing.assert_close(attention(q, k, v, scale=0.0), mean)


def test_order_by_hand(backend, device):
    """One query, three keys, numbers that only the right order gives."""
    q = torch.tensor([[[[2.0]]]], device=device)
    k = torch.tensor([[[[1.0], [-3.0], [50.0]]]], device=device)
    v = torch.tensor([[[[1.0], [10.0], [100.0]]]], device=device)
    bias = torch.tensor([[0.25, 4.0, 9.0]], device=device)
    mask = torch.tensor([[True, True, False]], device=device)
    options = {
        "scale": 0.5,
        "softcap": 2.0,
        "bias": DenseBias(bias),
        "mask": DenseMask(mask),
        "sinks": torch.tensor([0.75], device=device),
        "return_lse": True,
    }
    backend.runs(q, k, v, **options)
    first = math.exp(2 * math.tanh(0.5 * 2 * 1 / 2) + 0.25)
    second = math.exp(2 * math.tanh(0.5 * 2 * -3 / 2) + 4.0)
    total = first + second + math.exp(0.75)
    out, lse = attention(q, k, v, **options)
    assert out.item() == pytest.approx((first * 1 + second * 10) / total, rel=1e-5)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-5)


OPTIONS = ("softcap", "bias", "mask", "sinks", "dropout")


@pytest.mark.parametrize(
    "present", [c for n in range(6) for c in itertools.combinations(OPTIONS, n)], ids="+".join
)
def test_options_in_every_combination(backend, device, present):
    q, k, v = qkv(device=device, heads=4, kv_heads=2, q_len=11, kv_len=14)
    all_options = {
        "softcap": {"softcap": 1.5},
        "bias": {
            "bias": ALiBi(normal(4, device=device)) + DenseBias(normal(11, 14, device=device))
        },
        "mask": {"mask": Causal() | DenseMask(torch.rand(2, 1, 11, 14, device=device) > 0.6)},
        "sinks": {"sinks": normal(4, device=device)},
        "dropout": {"dropout_p": 0.3, "seed": 5},
    }
    options = {"query_start": 2, "scale": 0.9}
    for name in present:
        options |= all_options[name]
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_softcap_bounds_large_scores(backend, device):
    q, k, v = qkv(device=device)
    q, k = (100 * q).detach().requires_grad_(), (100 * k).detach().requires_grad_()
    backend.runs(q, k, v, softcap=20.0)
    check(q, k, v, softcap=20.0, tolerance=1e-4)  # tanh' of saturated scores is a difference from 1


def test_scores_of_thousands_do_not_overflow(backend, device):
    q, k, v = qkv(device=device)
    backend.runs(q, k, v, bias=DenseBias(normal(9, 9, device=device)))
    shift = torch.tensor([[-30000.0]], device=device)
    slope = torch.linspace(0, 3000, 9, device=device)[None]
    check(q, k, v, bias=DenseBias(shift) + DenseBias(slope), tolerance=1e-3)  # 30000 in float32


# Where the queries stand.


def seen_by(backend, device, q_len, kv_len, mask, **options):
    """Which keys each query sees, [batch, q_len, kv_len]: found with one-hot values."""
    batch = options.pop("batch", 1)
    q, k, _ = qkv(batch=batch, heads=1, q_len=q_len, kv_len=kv_len, device=device, grad=False)
    v = torch.eye(kv_len, device=device).expand(batch, 1, kv_len, kv_len)
    backend.runs(q, k, v, mask=mask, **options)
    return (attention(q, k, v, mask=mask, **options)[:, 0] > 0).int().tolist()


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, [[1, 0, 0, 0], [1, 1, 0, 0]]),
        (1, [[1, 1, 0, 0], [1, 1, 1, 0]]),
        (2, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ("end", [[1, 1, 1, 0], [1, 1, 1, 1]]),
        (-1, [[0, 0, 0, 0], [1, 0, 0, 0]]),
        (10, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ([1], [[1, 1, 0, 0], [1, 1, 1, 0]]),
    ],
)
def test_query_start_moves_the_diagonal(backend, device, start, expected):
    assert seen_by(backend, device, 2, 4, Causal(), query_start=start) == [expected]


def test_query_start_is_zero_by_default_for_equal_lengths(backend, device):
    assert seen_by(backend, device, 2, 2, Causal()) == [[[1, 0], [1, 1]]]


def test_query_start_end_with_more_queries_than_keys(backend, device):
    expected = [[[0, 0], [0, 0], [1, 0], [1, 1]]]
    assert seen_by(backend, device, 4, 2, Causal(), query_start="end") == expected


def test_query_start_for_each_batch_element(backend, device):
    starts = torch.tensor([0, 2], device=device)
    expected = [[[1, 0, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]]
    assert seen_by(backend, device, 2, 3, Causal(), query_start=starts, batch=2) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_query_start_end_counts_from_each_key_length(backend, device, dtype):
    """Lengths past the keys mean all of them; queries that stand before key 0 see nothing."""
    lengths = torch.tensor([3, 1, 0, 200], device=device).to(dtype)
    mask = Causal() & KeyLengths(lengths)
    assert seen_by(backend, device, 2, 4, mask, query_start="end", batch=4) == [
        [[1, 1, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 0, 0], [1, 0, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 0], [1, 1, 1, 1]],
    ]


def test_query_start_end_with_two_key_lengths_counts_from_the_shorter(backend, device):
    mask = SlidingWindow(0) & KeyLengths([3]) & KeyLengths([2])
    assert seen_by(backend, device, 1, 4, mask, query_start="end") == [[[0, 1, 0, 0]]]


def test_query_start_end_of_short_integers_with_many_keys(backend, device):
    """kv_len does not fit the dtype of the lengths."""
    q, k, v = qkv(batch=2, q_len=3, kv_len=300, device=device)
    for dtype in (torch.uint8, torch.int8):
        mask = Causal() & KeyLengths(torch.tensor([2, 100], dtype=dtype, device=device))
        backend.runs(q, k, v, mask=mask, query_start="end")
        check(q, k, v, mask=mask, query_start="end")


def test_key_lengths_outside_the_keys_mean_the_nearer_end(backend, device):
    mask = KeyLengths(torch.tensor([-5, 99], device=device))
    assert seen_by(backend, device, 1, 3, mask, batch=2) == [[[0, 0, 0]], [[1, 1, 1]]]


@pytest.mark.parametrize("start", [0, 3, -4, "end", [1, 5], "tensor"])
def test_query_start_with_every_ordered_term(backend, device, start):
    q, k, v = qkv(device=device, q_len=7, kv_len=12)
    start = torch.tensor([-2, 9], device=device) if start == "tensor" else start
    options = {
        "mask": (Causal() & SlidingWindow(3)) | SlidingWindow(0, 1),
        "bias": ALiBi(normal(4, device=device)),
        "query_start": start,
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


# Rows that see no key.


def hide_row_four(device):
    mask = torch.ones(9, 9, dtype=torch.bool, device=device)
    mask[4] = False
    return {"mask": DenseMask(mask)}


def hide_row_four_by_bias(device):
    bias = torch.zeros(9, 9, device=device)
    bias[4] = -INF
    return {"bias": DenseBias(bias.requires_grad_())}


def hide_row_four_by_both(device):
    bias = torch.zeros(9, 9, device=device)
    bias[4, :5] = -INF
    mask = torch.ones(9, 9, dtype=torch.bool, device=device)
    mask[4, 5:] = False
    return {"bias": DenseBias(bias.requires_grad_()), "mask": DenseMask(mask)}


@pytest.mark.parametrize("hide", [hide_row_four, hide_row_four_by_bias, hide_row_four_by_both])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_that_sees_nothing(backend, device, hide, dtype):
    q, k, v = qkv(device=device, dtype=dtype)
    options = hide(device)
    backend.runs(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert (out[:, :, 4] == 0).all()
    assert (lse[:, :, 4] == -INF).all()
    d_query = torch.autograd.grad(out.double().sum() + lse[:, :, :4].sum(), q)[0]
    assert (d_query[:, :, 4] == 0).all()
    check(q, k, v, **options)


@pytest.mark.parametrize("hide", [hide_row_four, hide_row_four_by_bias])
def test_row_that_sees_only_its_sink(backend, device, hide):
    q, k, v = qkv(device=device)
    options = hide(device) | {"sinks": normal(4, device=device)}
    backend.runs(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert (out[:, :, 4] == 0).all()
    torch.testing.assert_close(lse[:, :, 4], options["sinks"].expand(2, 4))
    check(q, k, v, **options)


def test_sink_of_minus_infinity_is_no_sink(backend, device):
    q, k, v = qkv(device=device, grad=False)
    sinks = torch.full((4,), -INF, device=device)
    options = hide_row_four(device)
    backend.runs(q, k, v, sinks=sinks, **options)
    with_sinks = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    without = attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(with_sinks, without)


@pytest.mark.parametrize("lengths", [[0, 9], [0, 0], [1, 0]])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_batch_element_of_length_zero(backend, device, lengths, with_sinks):
    q, k, v = qkv(device=device)
    options = {"mask": KeyLengths(torch.tensor(lengths, device=device))}
    if with_sinks:
        options["sinks"] = normal(4, device=device)
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_every_score_hidden_by_a_bias_of_one_number(backend, device):
    q, k, v = qkv(device=device)
    bias = DenseBias(torch.tensor([[-INF]], device=device, requires_grad=True))
    backend.runs(q, k, v, bias=bias)
    check(q, k, v, bias=bias)


# NaN and infinity.


def padded_by_lengths(device):
    return {"mask": KeyLengths(torch.tensor([7, 5], device=device))}, [(0, 7, 9), (1, 5, 9)]


def padded_by_documents(device):
    ids = torch.tensor(
        [[0, 0, 0, -1, -1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, -1, -1, -1]], device=device
    )
    return {"mask": Documents(ids)}, [(0, 3, 5), (1, 6, 9)]


def padded_by_packing(device):
    bounds = torch.tensor([[0, 3, 3, 7], [2, 5, 6, 8]], device=device)
    return {"mask": Packed(bounds)}, [(0, 7, 9), (1, 0, 2), (1, 8, 9)]


def hidden_blocks(device):
    blocks = torch.ones(2, 1, 5, 3, dtype=torch.bool, device=device)
    blocks[0, :, :, 1], blocks[1, :, :, 2] = False, False
    return {"mask": BlockSparse(blocks, 2, 4)}, [(0, 4, 8), (1, 8, 9)]


def gap_by_dense_mask(device):
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=device)
    mask[0, ..., 2:4], mask[1, ..., 8] = False, False
    return {"mask": DenseMask(mask)}, [(0, 2, 4), (1, 8, 9)]


def gap_by_dense_bias(device):
    bias = torch.zeros(2, 1, 1, 9, device=device)
    bias[0, ..., 2:4], bias[1, ..., 8] = -INF, -INF
    return {"bias": DenseBias(bias.requires_grad_())}, [(0, 2, 4), (1, 8, 9)]


def after_the_last_query(device):
    return {"mask": Causal(), "query_start": -3}, [(0, 6, 9), (1, 6, 9)]


def outside_the_window(device):
    return {"mask": SlidingWindow(1, 0), "query_start": 9}, [(0, 0, 8), (1, 0, 8)]


UNSEEN = [
    padded_by_lengths,
    padded_by_documents,
    padded_by_packing,
    hidden_blocks,
    gap_by_dense_mask,
    gap_by_dense_bias,
    after_the_last_query,
    outside_the_window,
]


@pytest.mark.parametrize("unseen", UNSEEN)
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "dropout"])
def test_bad_numbers_at_keys_that_no_query_sees(backend, device, unseen, bad, extra):
    q, k, v = qkv(device=device, kv_heads=2, grad=False)
    options, places = unseen(device)
    for batch, start, stop in places:
        k[batch, :, start:stop], v[batch, :, start:stop] = bad, bad
    for tensor in (q, k, v):
        tensor.requires_grad_()
    options |= {
        "plain": {},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": normal(4, device=device)},
        "dropout": {"dropout_p": 0.4, "seed": 3},
    }[extra]
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_bad_numbers_in_padding_of_several_tiles(backend, device):
    q, k, v = qkv(device=device, q_len=40, kv_len=1100, grad=False)
    for batch, length in ((0, 3), (1, 700)):
        k[batch, :, length:], v[batch, :, length:] = NAN, INF
    for tensor in (q, k, v):
        tensor.requires_grad_()
    options = {"mask": KeyLengths(torch.tensor([3, 700], device=device))}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_a_bias_of_nan_behind_a_mask_is_not_seen(backend, device):
    q, k, v = qkv(device=device)
    bias = torch.zeros(9, 9, device=device)
    bias[:, 5:] = NAN
    options = {
        "bias": DenseBias(bias.requires_grad_()),
        "mask": KeyLengths(torch.tensor([5, 5], device=device)),
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_that_is_seen_is_not_hidden(backend, device, which):
    q, k, v = qkv(device=device, grad=False)
    {"query": q, "key": k, "value": v}[which][0, 1, 2, 3] = NAN
    backend.runs(q, k, v)
    out = attention(q, k, v)
    rows = out[0, 1].isnan()
    assert rows[2].all() if which == "query" else rows.any(dim=-1).all()
    others = out.clone()
    others[0, 1] = 0
    assert not others.isnan().any()


def test_nan_in_the_only_visible_key_is_not_hidden(backend, device):
    q, k, v = qkv(device=device, grad=False)
    k[0, 0, 0] = NAN
    backend.runs(q, k, v, mask=Causal())
    out, lse = attention(q, k, v, mask=Causal(), return_lse=True)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert not out[1].isnan().any()


# Heads and empty sizes.


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (5, 1), (8, 2)]
)
def test_grouped_heads(backend, device, heads, kv_heads):
    q, k, v = qkv(device=device, heads=heads, kv_heads=kv_heads, q_len=10, kv_len=6)
    options = {"sinks": normal(heads, device=device), "bias": ALiBi(normal(heads, device=device))}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_consecutive_query_heads_share_a_key_head(backend, device):
    q, k, v = qkv(device=device, heads=6, kv_heads=2, grad=False)
    backend.runs(q, k, v)
    grouped = attention(q, k, v)
    repeated = attention(q, k[:, [0, 0, 0, 1, 1, 1]], v[:, [0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(grouped, repeated)


def test_grouped_heads_with_a_mask_of_each_query_head(backend, device):
    """A key hidden from one query head of a group is still seen by the others."""
    q, k, v = qkv(device=device, heads=4, kv_heads=2, grad=False)
    mask = torch.ones(1, 4, 1, 9, dtype=torch.bool, device=device)
    mask[0, 0, 0, 3], mask[0, 2:4, 0, 5] = False, False
    k[:, 1, 5], v[:, 1, 5] = NAN, NAN  # both heads of the second group are blind to key 5
    for tensor in (q, k, v):
        tensor.requires_grad_()
    backend.runs(q, k, v, mask=DenseMask(mask))
    check(q, k, v, mask=DenseMask(mask))


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 0, "kv_len": 5},
        {"q_len": 5, "kv_len": 0},
        {"q_len": 0, "kv_len": 0},
        {"batch": 0},
        {"batch": 0, "q_len": 0, "kv_len": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_empty_sizes(backend, device, sizes, options):
    q, k, v = qkv(device=device, kv_heads=2, **sizes)
    batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    given = {}
    if options == "all":
        given = {
            "mask": (Causal() & KeyLengths(torch.full((batch,), 3, device=device)))
            | SlidingWindow(2) & DenseMask(torch.ones(q_len, kv_len, device=device).bool()),
            "bias": ALiBi(normal(4, device=device))
            + DenseBias(normal(1, 1, q_len, kv_len, device=device)),
            "sinks": normal(4, device=device),
            "query_start": "end",
            "softcap": 3.0,
            "dropout_p": 0.5,
            "seed": 1,
        }
    backend.runs(q, k, v, **given)
    check(q, k, v, **given)


@pytest.mark.parametrize("start", ["end", "tensor"])
def test_no_batch_with_a_start_for_each_element(backend, device, start):
    q, k, v = qkv(device=device, batch=0)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    options = {
        "mask": Causal() & KeyLengths(none),
        "query_start": start if start == "end" else none,
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_no_keys_gives_zero_and_minus_infinity(backend, device):
    q, k, v = qkv(device=device, kv_len=0)
    backend.runs(q, k, v)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 9, 8)
    assert (out == 0).all()
    assert (lse == -INF).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((gradient == 0).all() for gradient in gradients)


# The log-sum-exp.


def test_lse_is_natural_and_holds_the_sinks(backend, device):
    q, k, v = qkv(device=device, grad=False)
    sinks = normal(4, device=device, grad=False)
    backend.runs(q, k, v, sinks=sinks)
    _, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    scores = q.double() @ k.double().mT / math.sqrt(8)
    with_sink = torch.cat([scores, sinks.double()[:, None, None].expand(2, 4, 9, 1)], dim=-1)
    torch.testing.assert_close(lse.double(), with_sink.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("only", ["out", "lse"])
def test_gradient_through_one_of_out_and_lse(backend, device, only):
    q, k, v = qkv(device=device)
    sinks = normal(4, device=device)
    bias = DenseBias(normal(9, 9, device=device))
    options = {"sinks": sinks, "bias": bias, "mask": Causal()}
    backend.runs(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    result = out if only == "out" else lse
    arriving = torch.randn_like(result)
    inputs = (q, k, v, sinks, bias.tensor)
    gradients = torch.autograd.grad(result, inputs, arriving, allow_unused=True)
    zeros = torch.zeros(2, 4, 9, 8)
    expected = oracle(
        q,
        k,
        v,
        d_out=arriving if only == "out" else zeros,
        d_lse=arriving if only == "lse" else None,
        **options,
    ).gradients
    for name, found, right in zip(
        ("query", "key", "value", "sinks", "bias"),
        gradients,
        (*expected[:4], *expected.bias),
        strict=True,
    ):
        found = torch.zeros(right.shape) if found is None else found
        assert_close(f"d_{name}", found, right, 1e-5)


def test_lse_joins_two_halves_of_the_keys(backend, device):
    """What return_lse is for: attention over parts, weighted by their share of the whole."""
    q, k, v = qkv(device=device, kv_len=20, grad=False)
    backend.runs(q, k, v)
    parts = [
        attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 7), slice(7, 20))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    joined = sum(out * (part - lse).exp()[..., None] for out, part in parts)
    torch.testing.assert_close(joined, attention(q, k, v))


# Precision.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(backend, device, dtype):
    q, k, v = qkv(device=device, dtype=dtype, kv_heads=2, q_len=130, kv_len=150, head_dim=32)
    options = {
        "mask": Causal(),
        "query_start": "end",
        "bias": ALiBi(normal(4, device=device)),
        "sinks": normal(4, device=device),
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def plain(q, k, v, d_out):
    """Attention as it is written without a library, in the inputs' precision."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    out = scores.softmax(dim=-1) @ v
    return out, *torch.autograd.grad(out, (q, k, v), d_out)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("size", [64, 400])
def test_no_worse_than_twice_a_plain_computation(backend, device, dtype, size):
    q, k, v = qkv(device=device, dtype=dtype, q_len=size, head_dim=64)
    backend.runs(q, k, v)
    times = 3 if str(backend) == "torch_efficient" else 2  # PyTorch's kernel is what it is
    d_out = torch.randn_like(q)
    out = attention(q, k, v)
    found = (out, *torch.autograd.grad(out, (q, k, v), d_out))
    right = oracle(q, k, v, d_out=d_out)
    for name, ours, theirs, expected in zip(
        ("out", "d_query", "d_key", "d_value"),
        found,
        plain(q, k, v, d_out),
        (right.out, *right.gradients[:3]),
        strict=True,
    ):
        rounding = error(torch.as_tensor(expected).to(dtype), expected)
        allowed = times * max(error(theirs, expected), rounding)
        assert error(ours, expected) <= allowed, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_accumulates_in_float32(backend, device, dtype):
    """4096 equal terms: a sum in half precision stops growing long before the end."""
    q = torch.zeros(1, 1, 4096, 8, device=device, dtype=dtype, requires_grad=True)
    k = torch.zeros(1, 1, 64, 8, device=device, dtype=dtype, requires_grad=True)
    v = torch.ones(1, 1, 64, 8, device=device, dtype=dtype, requires_grad=True)
    bias = DenseBias(torch.zeros(1, 64, device=device, dtype=dtype, requires_grad=True))
    sinks = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    backend.runs(q, k, v, bias=bias, sinks=sinks)
    d_out = torch.ones_like(q)
    d_lse = torch.ones(1, 1, 4096, device=device)
    check(q, k, v, bias=bias, sinks=sinks, d_out=d_out, d_lse=d_lse)


def test_half_precision_scores_beyond_its_range(backend, device):
    """q . k = 80,000 does not fit float16; the scores live in float32."""
    q = torch.full((1, 1, 4, 8), 100.0, device=device, dtype=torch.float16, requires_grad=True)
    k = torch.full((1, 1, 4, 8), 100.0, device=device, dtype=torch.float16, requires_grad=True)
    v = normal(1, 1, 4, 8, device=device, dtype=torch.float16)
    backend.runs(q, k, v, scale=0.5)
    check(q, k, v, scale=0.5)


def test_positions_beyond_half_precision(backend, device):
    """Positions over 2048 have no float16 of their own, nor has 257 a bfloat16."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = qkv(device=device, dtype=dtype, heads=1, batch=1, q_len=3, kv_len=2500)
        options = {"bias": ALiBi(torch.tensor([0.5], device=device)), "query_start": 2400}
        backend.runs(q, k, v, **options)
        check(q, k, v, **options)


def test_float64_takes_the_papers_slopes_in_float64(backend, device):
    q, k, v = qkv(device=device, heads=12, dtype=torch.float64)
    backend.runs(q, k, v, bias=ALiBi())
    check(q, k, v, bias=ALiBi())


# Autocast.


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_the_inputs_and_nothing_else(backend, device, low, given):
    q, k, v = qkv(device=device, q_len=150, dtype=given)
    slopes = normal(4, device=device)
    dense = normal(150, 150, device=device)
    sinks = normal(4, device=device)
    options = {"bias": ALiBi(slopes) + DenseBias(dense), "sinks": sinks, "mask": Causal()}
    with torch.autocast(device, dtype=low):
        backend.runs(q, k, v, **options)
        out, lse = attention(q, k, v, return_lse=True, **options)
    assert out.dtype == low
    assert lse.dtype == torch.float32
    d_out = torch.randn_like(out)
    inputs = (q, k, v, sinks, slopes, dense)
    gradients = torch.autograd.grad(out, inputs, d_out)
    cast = [t.detach().to(low) for t in (q, k, v)]
    right = oracle(*cast, d_out=d_out, **options)
    tolerance = TOLERANCES[str(low).removeprefix("torch.")]
    assert_close("out", out, right.out, tolerance)
    # As exact as a call without autocast: scores in half precision would show here.
    assert_close("lse", lse, right.lse, TOLERANCES["float32"], rows=False)
    d_lse = torch.zeros_like(lse)
    sizes = magnitudes(*cast, d_out, d_lse, **options)
    for name, tensor, gradient, expected in zip(
        ("query", "key", "value", "sinks", "bias.0", "bias.1"),
        inputs,
        gradients,
        (*right.gradients[:4], *right.gradients.bias),
        strict=True,
    ):
        assert gradient.dtype == tensor.dtype
        slack = 2 * ROUNDING[str(low).removeprefix("torch.")] * sizes.get(name, 0.0)
        assert_close(f"d_{name}", gradient, expected, tolerance, slack=slack)


def test_backward_inside_autocast_is_the_same(backend, device):
    q, k, v = qkv(device=device, q_len=40)
    backend.runs(q, k, v, mask=Causal())
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, v, mask=Causal())
        inside = torch.autograd.grad(out.float().square().sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


def test_autocast_leaves_float64_alone(backend, device):
    q, k, v = qkv(device=device, dtype=torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        backend.runs(q, k, v)
        check(q, k, v)


def test_autocast_that_is_off_does_nothing(backend, device):
    q, k, v = qkv(device=device, grad=False)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        backend.runs(q, k, v)
        assert attention(q, k, v).dtype == torch.float32
        assert as_float64(attention(q, k, v)).std() > 0
