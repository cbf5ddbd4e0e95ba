"""Bad input: the error names the argument, what was found and what is needed, before any launch."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from inputs import qkv

import limelight
from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    PrefixLM,
    Problem,
    RelativeBias,
    RelativeBias2D,
    SlidingWindow,
    T5Bias,
    attention,
    explain,
    record,
)


def inputs(**sizes):
    return qkv(**{"heads": 4, "q_len": 7, "kv_len": 9, "grad": False, **sizes})


def with_query(change):
    q, k, v = inputs()
    return (change(q), k, v), {}


def with_key(change):
    q, k, v = inputs()
    return (q, change(k), v), {}


def with_value(change):
    q, k, v = inputs()
    return (q, k, change(v)), {}


def with_all(change):
    return tuple(change(t) for t in inputs()), {}


def given(**options):
    return inputs(), options


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# name of the case: (arguments, kind of error, what its message must say)
CASES = {
    # Tensors.
    "query of three dimensions": (
        lambda: with_query(lambda q: q[0]), ValueError, "query: found shape (4, 7, 8), needed four dim",
    ),
    "query of five dimensions": (lambda: with_query(lambda q: q[None]), ValueError, "query: found shape"),
    "query of no dimension": (lambda: with_query(lambda q: q.sum()), ValueError, "query: found shape ()"),
    "key of three dimensions": (lambda: with_key(lambda k: k[0]), ValueError, "key: found shape"),
    "value of three dimensions": (lambda: with_value(lambda v: v[0]), ValueError, "value: found shape"),
    "no heads": (lambda: with_all(lambda t: t[:, :0]), ValueError, "query: found 0 heads"),
    "key without heads": (lambda: with_key(lambda k: k[:, :0]), ValueError, "key: found 0 heads"),
    "heads that do not divide": (
        lambda: (tuple(t[:, :3] if n else t for n, t in enumerate(inputs())), {}),
        ValueError, "key: found 3 heads, needed a number that divides the 4 heads of query",
    ),
    "more key heads than query heads": (
        lambda: (tuple(t if n else t[:, :2] for n, t in enumerate(inputs())), {}),
        ValueError, "key: found 4 heads",
    ),
    "value heads": (lambda: with_value(lambda v: v[:, :2]), ValueError, "value: found heads 2, needed"),
    "value length": (
        lambda: with_value(lambda v: v[:, :, :8]), ValueError, "value: found length 8, needed that of key, 9",
    ),
    "batch of key": (lambda: with_key(lambda k: k[:1]), ValueError, "key: found batch 1"),
    "batch of value": (lambda: with_value(lambda v: v[:1]), ValueError, "value: found batch 1"),
    "head_dim of key": (
        lambda: with_key(lambda k: k[..., :7]), ValueError, "key: found head_dim 7, needed that of query, 8",
    ),
    "head_dim 0": (lambda: with_all(lambda t: t[..., :0]), ValueError, "query: found head_dim 0"),
    "value_dim 0": (lambda: with_value(lambda v: v[..., :0]), ValueError, "value: found"),
    "head_dim 257": (
        lambda: (inputs(head_dim=257), {}), ValueError, "query: found head_dim 257, needed 1 to 256",
    ),
    "value_dim 257": (lambda: (inputs(value_dim=257), {}), ValueError, "value: found"),
    # Dtypes.
    "key of another dtype": (
        lambda: with_key(torch.Tensor.half), TypeError, "key: found dtype float16, needed that of query",
    ),
    "value of another dtype": (lambda: with_value(torch.Tensor.double), TypeError, "value: found dtype"),
    "integers": (lambda: with_all(torch.Tensor.long), TypeError, "query: found dtype int64, needed one of"),
    "booleans": (lambda: with_all(torch.Tensor.bool), TypeError, "query: found dtype bool"),
    "complex": (lambda: with_all(lambda t: t + 0j), TypeError, "query: found dtype complex64"),
    "float8": (
        lambda: with_all(lambda t: t.to(torch.float8_e4m3fn)), TypeError, "query: found dtype float8_e4m3fn",
    ),
    # Libraries, devices, layouts.
    "a list as query": (lambda: with_query(torch.Tensor.tolist), TypeError, "query: found list, needed"),
    "None as query": (lambda: with_query(lambda _: None), TypeError, "query: found NoneType"),
    "None as key": (lambda: with_key(lambda _: None), TypeError, "key: found NoneType"),
    "a number as value": (lambda: with_value(lambda _: 1.0), TypeError, "value: found float"),
    "key of NumPy": (lambda: with_key(torch.Tensor.numpy), TypeError, "key: found ndarray, needed a torch"),
    "query of NumPy": (lambda: with_query(torch.Tensor.numpy), TypeError, "key: found Tensor, needed a NumPy"),
    "key on another device": (
        lambda: with_key(lambda k: k.to("meta")), ValueError, "key: found a tensor on meta, needed one on cpu",
    ),
    "value on another device": (lambda: with_value(lambda v: v.to("meta")), ValueError, "value: found"),
    "mask on another device": (
        lambda: given(mask=KeyLengths(ints(1, 2).to("meta"))), ValueError, "mask",
    ),
    "sinks on another device": (lambda: given(sinks=torch.zeros(4, device="meta")), ValueError, "sinks"),
    "sparse query": (
        lambda: with_query(torch.Tensor.to_sparse), TypeError, "query: found a tensor of layout torch.sparse",
    ),
    "sparse value": (lambda: with_value(torch.Tensor.to_sparse), TypeError, "value: found a tensor of layout"),
    "sparse bias": (
        lambda: given(bias=DenseBias(torch.ones(7, 9).to_sparse())), (TypeError, ValueError), "bias.*found",
    ),
    "sparse mask": (
        lambda: given(mask=DenseMask(torch.ones(7, 9).bool().to_sparse())), (TypeError, ValueError), "mask.*found",
    ),
    # Masks.
    "raw tensor as mask": (
        lambda: given(mask=torch.ones(7, 9).bool()), TypeError, "mask: found Tensor.*limelight.DenseMask",
    ),
    "raw array as mask": (lambda: given(mask=np.ones((7, 9), bool)), TypeError, "mask: found ndarray"),
    "True as mask": (lambda: given(mask=True), TypeError, "mask: found bool"),
    "text as mask": (lambda: given(mask="causal"), TypeError, "mask: found str"),
    "a mask's class": (lambda: given(mask=Causal, query_start=0), TypeError, "mask: found"),
    "a bias as mask": (lambda: given(mask=ALiBi()), TypeError, "mask: found ALiBi"),
    "dense mask of a wrong shape": (
        lambda: given(mask=DenseMask(torch.ones(9, 7).bool())), ValueError,
        "mask DenseMask tensor: found shape (9, 7), needed a shape that broadcasts to",
    ),
    "dense mask of one dimension": (lambda: given(mask=DenseMask(torch.ones(9).bool())), ValueError, "DenseMask"),
    "dense mask of five dimensions": (
        lambda: given(mask=DenseMask(torch.ones(1, 1, 1, 7, 9).bool())), ValueError, "DenseMask tensor: found",
    ),
    "dense mask of kv_heads": (
        lambda: (inputs(kv_heads=2), {"mask": DenseMask(torch.ones(2, 7, 9).bool())}), ValueError, "DenseMask",
    ),
    "dense mask of floats": (
        lambda: given(mask=DenseMask(torch.ones(7, 9))), (TypeError, ValueError),
        "mask DenseMask tensor: found dtype float32, needed bool",
    ),
    "dense mask of integers": (
        lambda: given(mask=DenseMask(torch.ones(7, 9).int())), (TypeError, ValueError), "needed bool",
    ),
    "dense mask of None": (lambda: given(mask=DenseMask(None)), (TypeError, ValueError), "mask"),
    "lengths of a wrong number": (
        lambda: given(mask=KeyLengths([1, 2, 3])), ValueError, "mask KeyLengths lengths: found shape (3,)",
    ),
    "one length for all": (lambda: given(mask=KeyLengths(5)), ValueError, "KeyLengths lengths: found shape ()"),
    "lengths of floats": (
        lambda: given(mask=KeyLengths(torch.ones(2))), (TypeError, ValueError), "KeyLengths lengths: found dtype",
    ),
    "lengths of booleans": (
        lambda: given(mask=KeyLengths(ints(1, 0).bool())), (TypeError, ValueError), "KeyLengths lengths",
    ),
    "lengths inside a composite": (
        lambda: given(mask=Causal() & KeyLengths([1]), query_start=0), ValueError, "KeyLengths lengths",
    ),
    "document ids of a wrong length": (
        lambda: given(mask=Documents(ints(0, 0, 1))), ValueError, "mask Documents ids: found shape (3,)",
    ),
    "document ids of floats": (
        lambda: given(mask=Documents(torch.zeros(9))), (TypeError, ValueError), "mask Documents ids: found dtype",
    ),
    "query ids of a wrong length": (
        lambda: given(mask=Documents(torch.zeros(9).int(), torch.zeros(9).int())), ValueError,
        "mask Documents query_ids: found shape (9,), needed shape (7,) or (2, 7)",
    ),
    "fewer documents than queries": (
        lambda: (inputs(q_len=12), {"mask": Documents(torch.zeros(9).int())}), ValueError, "Documents query_ids",
    ),
    "prefixes of a wrong number": (
        lambda: given(mask=PrefixLM([1, 2, 3]), query_start=0), ValueError,
        "mask PrefixLM prefix_lengths: found shape (3,), needed an integer, or one per batch element, shape (2,)",
    ),
    "prefixes of floats": (
        lambda: given(mask=PrefixLM(torch.ones(2)), query_start=0), (TypeError, ValueError),
        "mask PrefixLM prefix_lengths: found dtype",
    ),
    "cumulative lengths of floats": (
        lambda: given(mask=Packed(torch.ones(2))), (TypeError, ValueError), "mask Packed cu_seqlens: found dtype",
    ),
    "cumulative lengths of another batch": (
        lambda: given(mask=Packed(torch.zeros(3, 4).int())), ValueError,
        "mask Packed cu_seqlens: found shape (3, 4), needed shape (documents + 1,) or (2, documents + 1)",
    ),
    "no cumulative lengths": (
        lambda: given(mask=Packed(torch.zeros(0).int())), ValueError, "mask Packed cu_seqlens: found shape (0,)",
    ),
    "more documents of queries": (
        lambda: given(mask=Packed(ints(0, 9), ints(0, 3, 7))), ValueError,
        "mask Packed query_cu_seqlens: found 2 documents, needed as many as cu_seqlens has, 1",
    ),
    "fewer packed keys than queries": (
        lambda: (inputs(q_len=12), {"mask": Packed(ints(0, 9))}), ValueError, "Packed query_cu_seqlens: found None",
    ),
    "block mask of a wrong shape": (
        lambda: given(mask=BlockSparse(torch.ones(2, 2).bool(), 4, 4)), ValueError,
        "mask BlockSparse block_mask: found shape (2, 2), needed (batch or 1, q_heads or 1, q_blocks, kv_blocks) of",
    ),
    "block mask of numbers": (
        lambda: given(mask=BlockSparse(torch.ones(2, 3), 4, 4)), (TypeError, ValueError), "needed bool",
    ),
    # Biases.
    "raw tensor as bias": (lambda: given(bias=torch.ones(7, 9)), TypeError, "bias: found Tensor.*DenseBias"),
    "a number as bias": (lambda: given(bias=1.0), TypeError, "bias: found float"),
    "a mask as bias": (lambda: given(bias=KeyLengths([1, 2])), TypeError, "bias: found KeyLengths"),
    "dense bias of a wrong shape": (lambda: given(bias=DenseBias(torch.ones(7, 8))), ValueError, "DenseBias tensor"),
    "dense bias of integers": (
        lambda: given(bias=DenseBias(torch.ones(7, 9).int())), (TypeError, ValueError), "DenseBias tensor: found dtype",
    ),
    "dense bias of booleans": (
        lambda: given(bias=DenseBias(torch.ones(7, 9).bool())), (TypeError, ValueError), "DenseBias tensor",
    ),
    "dense bias of complex": (
        lambda: given(bias=DenseBias(torch.ones(7, 9) + 0j)), (TypeError, ValueError), "DenseBias tensor",
    ),
    "dense bias of float8": (
        lambda: given(bias=DenseBias(torch.ones(7, 9).to(torch.float8_e4m3fn))), (TypeError, ValueError), "DenseBias",
    ),
    "slopes of a wrong number": (
        lambda: given(bias=ALiBi(torch.ones(3))), ValueError, "bias ALiBi slopes: found shape (3,), needed one slope",
    ),
    "slopes of integers": (
        lambda: given(bias=ALiBi(torch.ones(4).int())), (TypeError, ValueError), "bias ALiBi slopes: found dtype",
    ),
    "relative table of a wrong number of heads": (
        lambda: given(bias=RelativeBias(torch.ones(3, 5))), ValueError,
        "bias RelativeBias table: found shape (3, 5), needed shape (4 or 1, entries)",
    ),
    "relative table without a middle": (
        lambda: given(bias=RelativeBias(torch.ones(4, 6))), ValueError,
        "bias RelativeBias table: found 6 entries, needed an odd number of entries, or .*`first`",
    ),
    "relative table of integers": (
        lambda: given(bias=RelativeBias(torch.ones(4, 5).int())), ValueError, "RelativeBias table: found dtype",
    ),
    "relative table of three dimensions": (
        lambda: given(bias=RelativeBias(torch.ones(1, 4, 5))), ValueError, "RelativeBias table: found shape",
    ),
    "relative table without entries": (
        lambda: given(bias=RelativeBias(torch.ones(4, 0), 1)), ValueError, "RelativeBias table: found shape",
    ),
    "t5 table of a wrong number of heads": (
        lambda: given(bias=T5Bias(torch.ones(4, 8))), ValueError,
        "bias T5Bias table: found shape (4, 8), needed shape (entries, 4 or 1)",
    ),
    "t5 with too few buckets": (
        lambda: given(bias=T5Bias(torch.ones(3, 4))), ValueError, "bias T5Bias table: found 3 buckets, needed 4 or more",
    ),
    "t5 with a distance that is too near": (
        lambda: given(bias=T5Bias(torch.ones(32, 4), max_distance=8)), ValueError,
        "bias T5Bias max_distance: found 8, needed more than 8",
    ),
    "window's table of a wrong size": (
        lambda: given(bias=RelativeBias2D(torch.ones(24, 4), 3, 3)), ValueError,
        "bias RelativeBias2D table: found 24 entries, needed 25",
    ),
    "keys that do not fill a window": (
        lambda: given(bias=RelativeBias2D(torch.ones(21, 4), 2, 4)), ValueError,
        "bias RelativeBias2D: found 9 keys, needed 8, for a window of 2 x 4",
    ),
    # Numbers.
    "scale NaN": (lambda: given(scale=float("nan")), ValueError, "scale: found nan, needed a finite number"),
    "scale infinite": (lambda: given(scale=float("inf")), ValueError, "scale: found inf"),
    "scale text": (lambda: given(scale="1"), TypeError, "scale: found str, needed a number"),
    "scale True": (lambda: given(scale=True), TypeError, "scale: found bool"),
    "scale a list": (lambda: given(scale=[1.0]), TypeError, "scale: found list"),
    "scale a tensor": (lambda: given(scale=torch.tensor(1.0)), TypeError, "scale: found Tensor"),
    "scale complex": (lambda: given(scale=1j), TypeError, "scale: found complex"),
    "softcap zero": (lambda: given(softcap=0.0), ValueError, "softcap: found 0.0, needed a positive number"),
    "softcap negative": (lambda: given(softcap=-1), ValueError, "softcap: found -1"),
    "softcap NaN": (lambda: given(softcap=float("nan")), ValueError, "softcap: found nan"),
    "softcap infinite": (lambda: given(softcap=float("inf")), ValueError, "softcap: found inf"),
    "softcap a dictionary": (lambda: given(softcap={}), TypeError, "softcap: found dict"),
    "dropout negative": (lambda: given(dropout_p=-0.1), ValueError, "dropout_p: found -0.1, needed a probability"),
    "dropout above one": (lambda: given(dropout_p=1.1), ValueError, "dropout_p: found 1.1"),
    "dropout NaN": (lambda: given(dropout_p=float("nan")), ValueError, "dropout_p: found nan"),
    "dropout text": (lambda: given(dropout_p="0.1"), TypeError, "dropout_p: found str"),
    "dropout None": (lambda: given(dropout_p=None), TypeError, "dropout_p: found NoneType"),
    "dropout True": (lambda: given(dropout_p=True), TypeError, "dropout_p: found bool"),
    "dropout a tensor": (lambda: given(dropout_p=torch.tensor(0.5)), TypeError, "dropout_p: found Tensor"),
    # Sinks.
    "sinks of a wrong number": (
        lambda: given(sinks=torch.zeros(3)), ValueError, "sinks: found shape (3,), needed one logit per query head",
    ),
    "sinks of kv_heads": (lambda: (inputs(kv_heads=2), {"sinks": torch.zeros(2)}), ValueError, "sinks: found"),
    "sinks of two dimensions": (lambda: given(sinks=torch.zeros(1, 4)), ValueError, "sinks: found shape (1, 4)"),
    "sinks a number": (lambda: given(sinks=1.0), (TypeError, ValueError), "sinks: found"),
    "sinks of integers": (lambda: given(sinks=torch.zeros(4).int()), TypeError, "sinks: found dtype int32"),
    "sinks text": (lambda: given(sinks="abc"), (TypeError, ValueError), "sinks: found"),
    "sinks a dictionary": (lambda: given(sinks={}), (TypeError, ValueError), "sinks: found"),
    # Where the queries stand.
    "causal of unequal lengths": (
        lambda: given(mask=Causal()), ValueError,
        "query_start: found None, with 7 queries, 9 keys.*query_start=0.*top-left.*\"end\".*bottom-right",
    ),
    "window of unequal lengths": (lambda: given(mask=SlidingWindow(1)), ValueError, "query_start: found None"),
    "causal inside a composite": (
        lambda: given(mask=KeyLengths([1, 2]) | (Causal() & KeyLengths([3, 4]))), ValueError, "query_start",
    ),
    "query_start text": (lambda: given(query_start="middle"), TypeError, "query_start: found 'middle', needed"),
    "query_start True": (lambda: given(query_start=True), TypeError, "query_start: found True"),
    "query_start fraction": (lambda: given(query_start=1.5), TypeError, "query_start: found"),
    "query_start of a wrong number": (
        lambda: given(query_start=[1, 2, 3]), ValueError, "query_start: found shape (3,), needed one position per",
    ),
    "query_start of floats": (lambda: given(query_start=torch.ones(2)), TypeError, "query_start: found dtype"),
    "query_start of booleans": (
        lambda: given(query_start=torch.ones(2).bool()), TypeError, "query_start: found dtype bool",
    ),
    "query_start a dictionary": (lambda: given(query_start={}), TypeError, "query_start: found"),
    # Seeds.
    "seed text": (lambda: given(dropout_p=0.5, seed="a"), TypeError, "seed: found"),
    "seed fraction": (lambda: given(dropout_p=0.5, seed=1.5), TypeError, "seed: found"),
    "seed True": (lambda: given(dropout_p=0.5, seed=True), TypeError, "seed: found"),
    "seed of floats": (lambda: given(dropout_p=0.5, seed=torch.ones(1)), (TypeError, ValueError), "seed: found"),
    "seed of two": (lambda: given(dropout_p=0.5, seed=ints(1, 2)), ValueError, "seed: found shape"),
    "seed of nine, as many as keys": (
        lambda: given(dropout_p=0.5, seed=torch.arange(9)), ValueError, "seed: found shape",
    ),
    "seed of int32": (
        lambda: given(dropout_p=0.5, seed=ints(1, dtype=torch.int32)), (TypeError, ValueError), "seed: found",
    ),
    "seed on another device": (
        lambda: given(dropout_p=0.5, seed=ints(1).to("meta")), ValueError, "seed: found",
    ),
    "seed beyond 64 bits": (lambda: given(dropout_p=0.5, seed=2**64), ValueError, "seed: found"),
    "seed text without dropout": (lambda: given(seed="a"), TypeError, "seed: found"),
    # Switches.
    "deterministic text": (lambda: given(deterministic="no"), TypeError, "deterministic: found"),
    "return_lse text": (lambda: given(return_lse="no"), TypeError, "return_lse: found"),
}  # fmt: skip


def pattern(text):
    """The text, in which only `.*` is special."""
    return ".*".join(re.escape(part) for part in text.split(".*"))


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    make, kind, text = CASES[name]
    args, options = make()
    with record() as calls, pytest.raises(kind, match=f"(?s){pattern(text)}") as raised:
        attention(*args, **options)
    assert "needed" in str(raised.value), "says what is needed"
    assert not len(calls), "raised before anything ran"


NOT_DESCRIBED = ("seed", "return_lse")  # what no kernel depends on


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(NOT_DESCRIBED)])
def test_explain_refuses_the_same(name):
    make, kind, text = CASES[name]
    args, options = make()
    with pytest.raises(kind, match=f"(?s){pattern(text)}"):
        explain(*args, **options)


@pytest.mark.parametrize("first", [1, 1.0])
@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p", "query_start"])
def test_a_call_that_was_right_does_not_let_a_wrong_one_pass(name, first):
    """True == 1: whatever remembers calls has to tell them apart."""
    first = int(first) if name == "query_start" else first
    attention(*inputs(), **{name: first})
    with pytest.raises(TypeError, match=name):
        attention(*inputs(), **{name: True})


def test_masks_of_every_kind_in_numpy_are_refused_too():
    q, k, v = (t.numpy() for t in inputs())
    for options, kind, text in (
        ({"mask": np.ones((7, 9), bool)}, TypeError, "mask: found ndarray"),
        ({"mask": KeyLengths([1, 2, 3])}, ValueError, "KeyLengths"),
        ({"bias": np.ones((7, 9))}, TypeError, "bias: found ndarray"),
        ({"mask": Causal()}, ValueError, "query_start"),
        ({"scale": [1]}, TypeError, "scale"),
        ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed"),
        ({"dropout_p": 0.5, "seed": "a"}, TypeError, "seed"),
        ({"query_start": 1.5}, TypeError, "query_start"),
    ):
        with pytest.raises(kind, match=text):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match="query: found dtype int64"):
        attention(*(t.astype(np.int64) for t in (q, k, v)))
    with pytest.raises(TypeError, match="key: found dtype"):
        attention(q, k.astype(np.float64), v)


def test_nested_tensors_are_refused():
    for layout in (torch.strided, torch.jagged):
        with (
            pytest.warns(UserWarning, match="nested") if layout == torch.strided else _no_warning()
        ):
            nested = torch.nested.nested_tensor(
                [torch.ones(4, 3, 8), torch.ones(4, 3, 8)], layout=layout
            )
        with pytest.raises(
            TypeError, match="query: found a .*nested|query: found a tensor of layout torch.jagged"
        ):
            attention(nested, nested, nested)


def _no_warning():
    import contextlib

    return contextlib.nullcontext()


def test_a_device_that_cannot_compute_says_so():
    """On "meta" there is nothing to compute: a shape, or an error that says why."""
    try:
        out = attention(*(t.to("meta") for t in inputs()))
    except (TypeError, ValueError, limelight.NoBackendError) as error:
        assert "meta" in str(error)  # noqa: PT017
    else:
        assert out.shape == (2, 4, 7, 8)
        assert out.device.type == "meta"


def test_numbers_of_numpy_are_numbers():
    q, k, v = inputs()
    right = attention(q, k, v, scale=0.5, softcap=2.0, query_start=3, mask=Causal())
    found = attention(
        q,
        k,
        v,
        scale=np.float32(0.5),
        softcap=np.float64(2.0),
        query_start=np.int64(3),
        mask=Causal(),
    )
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_a_seed_of_numpy_is_a_seed():
    q, k, v = qkv()
    right = attention(q, k, v, dropout_p=0.5, seed=3)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, seed=np.int64(3)), right)


def test_unknown_and_positional_options_are_refused():
    with pytest.raises(TypeError, match="is_causal"):
        attention(*inputs(), is_causal=True)
    with pytest.raises(TypeError):
        attention(*inputs(), Causal())
    with pytest.raises(TypeError, match="is_causal"):
        explain(*inputs(), is_causal=True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"head_dim": 300}, "query: found head_dim 300"),
        ({"heads": 6, "kv_heads": 4}, "key: found 4 heads"),
        ({"dtype": "int8"}, "query: found dtype int8"),
        ({"dtype": "bf16"}, "query: found dtype bf16"),
        ({"scale": float("nan")}, "scale: found nan"),
        ({"mask": "causal"}, "mask: found str"),
        ({"mask": Causal(), "kv_len": 7}, "query_start"),
        ({"q_len": -1}, "q_len: found -1"),
        ({"batch": 1.5}, "batch: found 1.5"),
        ({"gradients": "query"}, "gradients: found 'query'"),
        ({"gradients": ("query", "bias.0")}, "gradients: found .*bias.0"),
    ],
)
def test_a_problem_by_hand_is_checked_too(fields, text):
    with pytest.raises((TypeError, ValueError), match=text):
        Problem.of(**fields)


def test_an_unknown_device_lists_those_that_are_known():
    with pytest.raises(ValueError, match="device: found 'RTX 9999', needed one of GTX 1080.*H200"):
        explain(*inputs(), device="RTX 9999")


def test_explain_takes_a_problem_alone():
    with pytest.raises(TypeError, match="query: found a Problem with further arguments"):
        explain(Problem.of(), mask=Causal())


# scaled_dot_product_attention: the same, by its own arguments' names.


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"attn_mask": torch.ones(7, 9).bool(), "is_causal": True}, ValueError, "is_causal: found True with an attn_mask"),
        ({"attn_mask": Causal()}, TypeError, "attn_mask: found Causal"),
        ({"attn_mask": [[True]]}, TypeError, "attn_mask: found list"),
        ({"attn_mask": torch.ones(9, 7).bool()}, ValueError, "attn_mask"),
        ({"attn_mask": torch.ones(7, 9).int()}, (TypeError, ValueError), "attn_mask"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p: found 2.0"),
        ({"scale": float("nan")}, ValueError, "scale: found nan"),
        ({"query": torch.ones(8)}, ValueError, "query: found shape (8,)"),
        ({"key": torch.ones(2, 3, 9, 8)}, ValueError, "leading dimensions"),
        ({"key": torch.ones(2, 2, 9, 8), "value": torch.ones(2, 2, 9, 8)}, ValueError, "enable_gqa"),
        ({"key": torch.ones(2, 3, 9, 8), "value": torch.ones(2, 3, 9, 8), "enable_gqa": True}, ValueError, "key: found 3 heads"),
        ({"key": None}, TypeError, "key: found NoneType"),
        ({"key": torch.ones(2, 4, 9, 8).numpy()}, TypeError, "key: found ndarray"),
    ],
)  # fmt: skip
def test_bad_input_of_scaled_dot_product_attention(change, kind, text):
    q, k, v = inputs()
    call = {"query": q, "key": k, "value": v} | change
    with pytest.raises(kind, match=pattern(text)):
        limelight.scaled_dot_product_attention(**call)
