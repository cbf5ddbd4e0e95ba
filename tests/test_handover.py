"""What is handed over to PyTorch's CUDA kernels, and what is not; which backend goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from limelight import (
    ALiBi,
    Causal,
    DenseMask,
    Device,
    KeyLengths,
    Problem,
    dispatch,
    explain,
    preference,
)
from limelight.backends import BACKENDS
from limelight.devices import NAMED
from limelight.preference import PREFERENCES, order
from limelight.problem import Layout

HANDED = ("torch_cudnn", "torch_flash", "torch_efficient")
KNOWN = {backend.name: backend for backend in BACKENDS}
H200 = Device.named("H200")
NAMES = tuple(KNOWN)


def problem(**options):
    sizes = {"batch": 2, "q_len": 128, "dtype": "float16", "library_version": "2.13.0"}
    return Problem.of(**{**sizes, "device": H200, "cudnn_version": 92000, **options})


def why_not(name, **options):
    return [reason.rule for reason in KNOWN[name].why_not(problem(**options))]


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"training": True},
        {"mask": Causal()},
        {"mask": Causal(), "training": True, "head_dim": 128},
        {"mask": Causal(), "q_len": 1, "kv_len": 300, "query_start": "end"},
        {"return_lse": True},
        {"q_len": 100, "kv_len": 300, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_plain_and_causal_problems_are_taken(name, options):
    assert why_not(name, **options) == []


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mask": KeyLengths(Layout.contiguous((2,), "int64"))}, "Causal alone"),
        ({"mask": DenseMask(Layout.contiguous((128, 128), "bool"))}, "Causal alone"),
        ({"bias": ALiBi()}, "no bias"),
        ({"softcap": 2.0}, "softcap"),
        ({"sinks": Layout.contiguous((8,), "float32")}, "sinks"),
        ({"dropout_p": 0.125}, "weights"),
        ({"scale": 0.0}, "scale of 0"),
        ({"scale": -1.0}, "scale of 0"),
        ({"return_lse": True, "training": True}, "gradient of the LSE"),
        ({"deterministic": True, "training": True}, "repeat"),
        ({"batch": 0}, "at least one"),
        ({"q_len": 0}, "at least one"),
        ({"kv_len": 0}, "at least one"),
        ({"dtype": "float64"}, "float16"),
        ({"library": "numpy"}, "PyTorch tensors"),
        ({"device": Device.named("CPU")}, "NVIDIA"),
        ({"device": Device.named("GTX 1080")}, "machine code"),
        ({"batch": 70_000, "heads": 1, "q_len": 2}, "65535"),
        ({"head_dim": 98}, "head_dim"),
    ],
    ids=str,
)
def test_what_would_come_out_different_is_refused(name, options, word):
    if options.get("head_dim") == 98:
        if name == "torch_flash":
            pytest.skip("pads head_dim")
        word = "multiples" if name == "torch_efficient" else word
    assert any(word in rule for rule in why_not(name, **options)), why_not(name, **options)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "start", "taking"),
    [
        (128, 128, 0, set(HANDED)),
        (100, 128, 0, set(HANDED)),  # keys that no query sees are left out
        (128, 100, 0, {"torch_cudnn", "torch_efficient"}),  # flash aligns to the bottom right
        (100, 128, "end", {"torch_flash"}),
        (128, 100, "end", set()),  # rows that see no key
        (100, 128, 5, set()),
    ],
)
def test_each_kernel_takes_the_corner_that_it_aligns_to(q_len, kv_len, start, taking):
    options = {"mask": Causal(), "q_len": q_len, "kv_len": kv_len, "query_start": start}
    assert {name for name in HANDED if not why_not(name, **options)} == taking


def _changed(strides=None, alignment=16, shape=(2, 8, 128, 64)):
    plain = Layout.contiguous(shape, "float16")
    return replace(plain, strides=strides or plain.strides, alignment=alignment)


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize(
    "key",
    [
        _changed(alignment=8),
        _changed(strides=(8 * 128 * 64, 0, 64, 1)),
        _changed(strides=(8 * 128 * 68, 128 * 68, 68, 1), alignment=8),
    ],
)
def test_rows_off_16_bytes_and_expanded_dimensions_are_refused(name, key):
    found = KNOWN[name].why_not(replace(problem(), key=key))
    assert any("16 bytes" in reason.rule and reason.found == "key" for reason in found)


@pytest.mark.parametrize("name", HANDED)
def test_a_singleton_dimension_with_an_odd_stride_is_refused(name):
    query = _changed(strides=(3, 128 * 64, 64, 1), shape=(1, 8, 128, 64))
    asked = replace(problem(batch=1), query=query)
    assert any("16 bytes" in reason.rule for reason in KNOWN[name].why_not(asked))


def test_the_fault_of_cudnn_ends_with_its_version():
    """pytorch/pytorch#196678: NaN gradients where kv_len is 64 modulo 128, before cuDNN 9.26."""
    wrong = {"q_len": 192, "training": True}
    assert any("64 modulo 128" in rule for rule in why_not("torch_cudnn", **wrong))
    assert why_not("torch_cudnn", **wrong, cudnn_version=92_600) == []
    assert why_not("torch_cudnn", q_len=192) == []
    assert why_not("torch_flash", **wrong) == []


def test_grouped_heads():
    for name, taken in (("torch_cudnn", True), ("torch_flash", True), ("torch_efficient", False)):
        assert (why_not(name, kv_heads=2) == []) == taken


# The order of preference.


@pytest.mark.parametrize("device", NAMED, ids=str)
def test_an_order_has_every_backend_once(device):
    for dtype in ("float16", "float32"):
        found = order(problem(device=device, dtype=dtype), NAMES)
        assert sorted(found.names) == sorted(NAMES)
        assert (found.source is None) == (found.names == NAMES)


def test_preferences_say_where_they_come_from():
    for each in PREFERENCES:
        assert {each.first, each.before} <= set(NAMES)
        assert "measured" in each.source


@pytest.fixture
def cudnn_first(monkeypatch):
    """A preference, as a measurement would give it."""
    first = preference.Preference(
        "torch_cudnn", "flash", ((9, 0),), lambda p: p.dtype != "float32", "measured for this test"
    )
    monkeypatch.setattr(preference, "PREFERENCES", (first,))
    dispatch.decide.cache_clear()
    yield
    dispatch.decide.cache_clear()


@pytest.mark.usefixtures("cudnn_first")
def test_explain_says_why_the_order_is_not_the_usual():
    choice = explain(problem())
    assert choice.backend == "torch_cudnn"
    assert choice.order.index("torch_cudnn") < choice.order.index("flash")
    assert choice.order_source in " ".join(str(choice).split())
    assert choice.to_dict()["order_source"] == choice.order_source
    assert explain(problem(dtype="float32")).order_source is None


@pytest.mark.usefixtures("cudnn_first")
def test_a_preferred_backend_that_cannot_run_gives_way():
    assert explain(problem(bias=ALiBi())).backend == "flash"
