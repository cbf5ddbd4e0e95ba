"""Choosing and explaining: one code path, every reason, restrictions, records."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest
import torch
from inputs import normal, qkv

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    Device,
    KeyLengths,
    NoBackendError,
    Problem,
    SlidingWindow,
    attention,
    attention_vjp,
    backends,
    explain,
    record,
)
from limelight.backends import BACKENDS, Backend, Reason
from limelight.devices import NAMED

NAMES = [backend.name for backend in BACKENDS]


def problems():
    """A sample of what can decide a backend."""
    terms = [
        {},
        {"mask": Causal()},
        {"bias": ALiBi()},
        {"mask": Causal() & SlidingWindow(8), "bias": ALiBi()},
    ]
    for dtype, term, training, dropout_p in itertools.product(
        ("float32", "bfloat16", "float16", "float64"), terms, (False, True), (0.0, 0.1)
    ):
        yield Problem.of(dtype=dtype, training=training, dropout_p=dropout_p, **term)
    for head_dim, value_dim in ((1, 1), (64, 32), (255, 256), (256, 256)):
        yield Problem.of(head_dim=head_dim, value_dim=value_dim)
    for sizes in (
        {"q_len": 0},
        {"kv_len": 0},
        {"batch": 0},
        {"q_len": 1, "kv_len": 5000},
        {"heads": 32, "kv_heads": 8},
    ):
        yield Problem.of(**sizes)
    for option in (
        {"softcap": 3.0},
        {"scale": 0.0},
        {"scale": -1.0},
        {"deterministic": True},
        {"library": "numpy"},
    ):
        yield Problem.of(**option)


@pytest.mark.parametrize("device", [None, *NAMED], ids=str)
def test_every_reason_is_listed(device):
    """What is refused says the rule, what was found and what would lift it; nothing else is refused."""
    for problem in problems():
        choice = explain(problem, device=device)
        text = str(choice).replace("\n", " ")
        assert sorted(choice.order) == sorted(NAMES)
        assert set(choice.reasons) == set(NAMES)
        for name, reasons in choice.reasons.items():
            assert bool(reasons) == (name != choice.backend)
            for reason in reasons:
                assert isinstance(reason, Reason)
                assert all(
                    isinstance(part, str) for part in (reason.rule, reason.found, reason.lift)
                )
                assert reason.rule
                assert reason.found
                assert reason.rule in text or len(reason.rule) > 60


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_why_not_is_pure(backend):
    for problem in problems():
        first, second = backend.why_not(problem), backend.why_not(problem)
        assert isinstance(first, list)
        assert first == second
        first.append(Reason("changed by the caller", "", ""))
        assert backend.why_not(problem) == second, "gives away a list of its own"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_is_named_and_summed_up(backend):
    assert isinstance(backend, Backend)
    assert backend.name
    assert backend.summary
    assert "\n" not in backend.summary


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_runs_something(backend):
    """Otherwise every test of it is skipped, and none of them fails."""
    runs = [p for p in problems() for d in (None, *NAMED) if not backend.why_not(on(p, d))]
    assert runs


def on(problem, device):
    return explain(problem, device=device).problem


def test_math_and_tiled_refuse_nothing_of_torch():
    for problem in problems():
        for backend in BACKENDS:
            if backend.name == "math" or (backend.name == "tiled" and problem.library == "torch"):
                assert backend.why_not(problem) == []


def test_a_problem_lists_all_reasons_not_only_the_first():
    with backends("math"):
        choice = explain(Problem.of(library="numpy"))
    assert len(choice.reasons["tiled"]) == 2


# What explain takes.


def test_explain_of_arrays_and_of_the_same_problem_by_hand():
    q, k, v = qkv(batch=1, heads=8, q_len=1024, head_dim=64, dtype=torch.bfloat16, grad=False)
    by_arrays = explain(q, k, v, mask=Causal(), scale=0.125)
    versions = {
        name: getattr(by_arrays.problem, name) for name in ("library_version", "triton_version")
    }
    by_hand = explain(Problem.of(mask=Causal(), scale=0.125, **versions))
    assert by_arrays.problem.size == by_hand.problem.size
    assert by_arrays.backend == by_hand.backend
    assert by_arrays == by_hand


@pytest.mark.parametrize("name", ["RTX 2080", "rtx2080", "RTX  2080", "Rtx 2080"])
def test_explain_for_a_named_device(name):
    choice = explain(Problem.of(), device=name)
    assert str(choice.problem.device) == "RTX 2080 (sm_75)"
    assert "RTX 2080 (sm_75)" in str(choice)
    assert choice.to_dict()["device"] == "RTX 2080 (sm_75)"


def test_explain_of_arrays_for_another_device():
    q, k, v = qkv()
    assert explain(q, k, v, device="H200").problem.device.compute_capability == (9, 0)
    assert explain(q, k, v).problem.device.kind == "cpu"
    assert (
        explain(q, k, v, device=Device.cuda("mine", (8, 6), sms=10)).problem.device.architecture
        == "sm_86"
    )


def test_explain_runs_nothing():
    with record() as calls:
        explain(*qkv(), mask=Causal())
    assert len(calls) == 0


def test_explain_knows_what_wants_gradients():
    q, k, v = qkv(grad=False)
    k.requires_grad_()
    slopes = normal(4)
    sinks = normal(4)
    problem = explain(
        q, k, v, bias=DenseBias(torch.zeros(9, 9)) + ALiBi(slopes), sinks=sinks
    ).problem
    assert problem.gradients == ("key", "sinks", "bias.1")
    with torch.no_grad():
        assert explain(q, k, v, sinks=sinks).problem.gradients == ()
    assert "key" in str(explain(q, k, v))


def test_a_pullback_is_planned_with_its_gradients():
    """Otherwise a backend without a backward could be chosen for it."""
    q, k, v = (t.numpy() for t in qkv(grad=False))
    with record() as calls:
        _, pullback = attention_vjp(q, k, v, bias=ALiBi(np.ones(4, np.float32)))
        pullback(np.ones_like(q))
    assert calls[0].choice.problem.gradients == ("query", "key", "value", "bias.0")


def test_explain_in_words():
    q, k, v = qkv()
    text = str(explain(q, k, v, mask=Causal() & KeyLengths([9, 9]), softcap=2.0, dropout_p=0.25))
    words = " ".join(text.split())  # columns are padded
    for word in ("float32 [2, 4, 9, 8]", "Causal()", "KeyLengths", "softcap 2.0", "dropout_p 0.25"):
        assert word in words
    assert all(name in words for name in NAMES)
    assert all(len(line) <= 250 for line in text.splitlines())


def test_notes_say_what_a_second_derivative_costs():
    assert any("second derivative re-runs math" in note for note in explain(*qkv()).notes)
    assert not explain(*qkv(grad=False)).notes


@pytest.mark.parametrize("device", [None, "RTX 2080"])
def test_to_dict_is_json(device):
    for problem in problems():
        choice = explain(problem, device=device)
        again = json.loads(json.dumps(choice.to_dict()))
        assert again == choice.to_dict()
        assert again["backend"] == choice.backend
        assert list(again["reasons"]) == list(choice.order) == again["order"]
        for name, reasons in again["reasons"].items():
            assert [r["rule"] for r in reasons] == [r.rule for r in choice.reasons[name]]


def test_to_dict_of_arrays_is_json():
    q, k, v = qkv()
    options = {
        "mask": KeyLengths(torch.tensor([1, 2])),
        "query_start": torch.tensor([0, 1]),
        "sinks": normal(4),
    }
    text = json.dumps(explain(q, k, v, **options).to_dict())
    assert "KeyLengths" in text


# Restrictions.


def test_backends_restricts_and_gives_back():
    q, k, v = qkv(grad=False)
    free = explain(q, k, v).backend
    with backends("math"):
        assert explain(q, k, v).backend == "math"
        assert any("not among the allowed" in r.rule for r in explain(q, k, v).reasons["tiled"])
    assert explain(q, k, v).backend == free


def test_backends_keeps_the_order_of_preference():
    q, k, v = qkv(grad=False)
    with backends("math", "tiled"):
        assert explain(q, k, v).backend == "tiled"


def test_backends_in_an_order_of_ones_own():
    q, k, v = qkv(grad=False)
    with backends("math", "tiled", in_order=True):
        choice = explain(q, k, v)
        assert choice.backend == "math"
        assert choice.order[:2] == ("math", "tiled")
        assert "limelight.backends" in choice.order_source
        assert attention(q, k, v).shape == q.shape
    assert explain(q, k, v).order_source is None


def test_the_innermost_backends_counts():
    q, k, v = qkv(grad=False)
    with backends("math"):
        with backends("tiled"):
            assert explain(q, k, v).backend == "tiled"
        assert explain(q, k, v).backend == "math"


def test_backends_gives_back_after_an_error():
    q, k, v = qkv(grad=False)
    free = explain(q, k, v).backend
    with pytest.raises(KeyError), backends("math"):
        raise KeyError
    assert explain(q, k, v).backend == free


@pytest.mark.parametrize(
    "names", [("flash3",), ("math", "nope"), ("Math",), ("",), (None,), (("math",),)]
)
def test_an_unknown_backend_is_refused_with_the_known_ones(names):
    with (
        pytest.raises((TypeError, ValueError), match="backends: found.*needed.*math"),
        backends(*names),
    ):
        pass


def test_no_name_is_refused():
    with pytest.raises(ValueError, match="backends: found no name"), backends():
        pass


def test_a_restriction_reaches_calls_that_ran_before():
    """What remembers choices has to remember the restriction too."""
    q, k, v = qkv(grad=False)
    with record() as calls:
        attention(q, k, v)
        with backends("math"):
            attention(q, k, v)
        attention(q, k, v)
    assert [call.backend for call in calls] == [calls[0].backend, "math", calls[0].backend]
    assert calls[0].backend != "math"


def test_no_backend_error_carries_and_prints_every_reason():
    q, k, v = (t.numpy() for t in qkv(grad=False))
    with backends("tiled"), pytest.raises(NoBackendError) as raised:
        attention(q, k, v)
    choice = raised.value.choice
    assert choice.backend is None
    assert choice.config is None
    assert set(choice.reasons) == set(NAMES)
    text = str(raised.value)
    for name, reasons in choice.reasons.items():
        assert reasons, name
        for reason in reasons:
            assert reason.rule[:40] in " ".join(text.split()) or reason.rule in text
    assert isinstance(raised.value, RuntimeError)
    assert json.dumps(choice.to_dict())


def test_a_choice_without_a_backend_is_explained_not_raised():
    q, k, v = (t.numpy() for t in qkv(grad=False))
    with backends("tiled"):
        choice = explain(q, k, v)
    assert choice.backend is None
    assert "tiled" in str(choice)
    assert choice.to_dict()["backend"] is None


# Records.


def test_record_of_forward_backward_and_double_backward():
    q, k, v = qkv()
    with backends("tiled"), record() as calls:
        out = attention(q, k, v)
        first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
        first.sum().backward()
    stages = [(call.stage, call.backend) for call in calls]
    assert stages[:3] == [("forward", "tiled"), ("backward", "tiled"), ("double backward", "math")]
    assert calls.backends["math"] == 1
    assert len(calls) == len(stages)
    assert "double backward" in str(calls)


def test_record_is_empty_outside_and_nests():
    q, k, v = qkv(grad=False)
    with record() as outer:
        attention(q, k, v)
        with record() as inner:
            attention(q, k, v)
        attention(q, k, v)
    attention(q, k, v)
    assert (len(outer), len(inner)) == (3, 1)


def test_two_records_that_overlap():
    q, k, v = qkv(grad=False)
    first, second = record(), record()
    one = first.__enter__()
    two = second.__enter__()
    attention(q, k, v)
    first.__exit__(None, None, None)
    attention(q, k, v)
    second.__exit__(None, None, None)
    assert (len(one), len(two)) == (1, 2)


def test_record_ends_with_an_error():
    q, k, v = qkv(grad=False)
    with pytest.raises(KeyError), record() as calls:
        attention(q, k, v)
        raise KeyError
    attention(q, k, v)
    assert len(calls) == 1


def test_record_as_text_counts():
    q, k, v = qkv(grad=False)
    with record() as calls:
        for _ in range(12):
            attention(q, k, v, mask=Causal())
        attention(q, k, v)
    text = str(calls)
    assert "12" in text
    assert "Causal()" in text
    assert str(type(calls)(calls=[]))


def in_a_thread(run):
    errors = []

    def guarded():
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_record_of_a_backward_in_another_thread():
    q, k, v = qkv()
    with record() as calls:
        out = attention(q, k, v)
        in_a_thread(out.sum().backward)
    assert [call.stage for call in calls] == ["forward", "backward"]
    assert q.grad is not None


def test_the_backward_runs_on_the_backend_of_its_forward():
    """Outside of the `with`, inside another one, and in another thread."""
    q, k, v = qkv()
    with backends("math"):
        outs = [attention(q, k, v).sum() for _ in range(3)]
    with record() as calls:
        outs[0].backward()
        with backends("tiled"):
            outs[1].backward()
        in_a_thread(outs[2].backward)
    assert [(call.stage, call.backend) for call in calls] == [("backward", "math")] * 3


def test_the_second_derivative_is_not_subject_to_restrictions():
    q, k, v = qkv()
    with backends("tiled"):
        first = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)[0]
        first.sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": Causal()},
        {"bias": ALiBi()},
        {"mask": KeyLengths([4, 9]), "softcap": 2.0},
        {"dropout_p": 0.5},
        {"scale": 0.5, "query_start": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("grad", [False, True])
def test_explain_and_attention_agree(name, dtype, options, grad):
    q, k, v = qkv(dtype=dtype, grad=grad, kv_heads=2)
    for restriction in (NAMES, (name,), (name, "math")):
        with backends(*restriction):
            choice = explain(q, k, v, **options)
            if choice.backend is None:
                with pytest.raises(NoBackendError):
                    attention(q, k, v, **options)
                continue
            with record() as calls:
                attention(q, k, v, **options)
        assert calls[0].backend == choice.backend
        assert calls[0].choice == choice


def test_a_call_is_planned_anew_where_anything_differs():
    """One after the other on the same memory: each has to see its own problem."""
    q, k, v = qkv(grad=False)
    seen = []
    variants = [
        {}, {"scale": 0.5}, {"softcap": 1.0}, {"sinks": torch.zeros(4)}, {"dropout_p": 0.5},
        {"return_lse": True}, {"deterministic": True}, {"query_start": 0}, {"query_start": "end"},
        {"query_start": [0, 1]}, {"mask": Causal()}, {"mask": SlidingWindow(1)}, {"mask": SlidingWindow(2)},
        {"bias": ALiBi()}, {"bias": ALiBi(torch.ones(2, 4))}, {"bias": DenseBias(torch.zeros(9, 9))},
        {"bias": DenseBias(torch.zeros(9, 9).half())}, {"bias": DenseBias(torch.zeros(1, 9))},
    ]  # fmt: skip
    for options in variants:
        with record() as calls:
            attention(q, k, v, **options)
        seen.append(calls[0].choice.problem)
    assert len(set(map(str, seen))) == len(variants)


def test_positions_beyond_32_bits_stay_off_the_kernels_that_count_in_them():
    near, far = (Problem.of(mask=Causal(), query_start=start) for start in (2**30, 2**31))
    assert explain(near, device="A100").backend == "flash"
    choice = explain(far, device="A100")
    assert choice.backend == "tiled"
    assert "counts positions in 32 bits" in [reason.rule for reason in choice.reasons["flash"]]
