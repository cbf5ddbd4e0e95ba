"""`explain_torch`: every kind of verdict, what is called out, and how a call is described."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import call, masked, operand

from limelight import (
    ALiBi,
    Causal,
    DenseBias,
    DenseMask,
    Device,
    KeyLengths,
    Problem,
    SlidingWindow,
    explain_torch,
)
from limelight.problem import Layout
from limelight.pytorch import SDPA, Build, Switches, Verdict, predict
from limelight.pytorch.builds import WHEELS, cudnn_spelled, parsed
from limelight.pytorch.cards import GENERATIONS, last_wheel, notes

A100, H100, GTX1080 = (Device.named(name) for name in ("A100", "H100", "GTX 1080"))
NEWEST = Build.released()


def verdicts(sdpa, device=A100, build=NEWEST, **switches):
    found = predict(sdpa, device, build, Switches(**switches))
    return {name: candidate.verdict for name, candidate in found.candidates.items()}


# The five kinds of verdict.


def test_chosen_and_lower():
    assert verdicts(call()) == {
        "flash": Verdict.CHOSEN,
        "efficient": Verdict.LOWER,
        "math": Verdict.LOWER,
        "cudnn": Verdict.LOWER,
    }


def test_illegal_with_every_reason_and_its_place():
    found = predict(call((2, 8, 1, 100), (2, 3, 1, 100), dtype="float32"), A100, NEWEST)
    cudnn = found.candidates["cudnn"]
    assert cudnn.verdict is Verdict.ILLEGAL
    assert [reason.check for reason in cudnn.reasons] == [
        "check_tensor_dtype",
        "check_batch_size_and_num_heads_dense",
        "check_cudnn_tensor_shapes",
        "check_cudnn_tensor_shapes",
    ]
    for reason in cudnn.reasons:
        file, _, line = reason.place.rpartition(":")
        assert file.startswith("aten/src/ATen/native/transformers/")
        assert int(line) > 0
        assert reason.rule
        assert reason.found


@pytest.mark.parametrize("name", ["flash", "efficient", "math", "cudnn"])
def test_switched_off(name):
    found = verdicts(call(), **{name: False})
    assert found[name] is Verdict.OFF
    assert list(found.values()).count(Verdict.OFF) == 1


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("flash", Build((2, 13, 0), (13, 0), 92000, ("sm_80",), flash=False)),
        ("efficient", Build((2, 13, 0), (13, 0), 92000, ("sm_80",), efficient=False)),
        ("cudnn", Build.released("2.3.0")),
    ],
)
def test_not_built(name, build):
    assert verdicts(call(), build=build)[name] is Verdict.NOT_BUILT


def test_chosen_without_machine_code():
    found = predict(call(), GTX1080, Build.released("2.13.0"))
    assert found.candidates["efficient"].verdict is Verdict.NO_CODE
    assert not found.has_code
    assert any("no kernel image" in note for note in found.notes)
    assert predict(call(), GTX1080, Build.released("2.7.1")).has_code


def test_an_order_that_the_process_set():
    found = predict(call(), A100, NEWEST, Switches(order=("math", "flash", "efficient", "cudnn")))
    assert found.backend == "math"
    assert "this process" in found.order_source
    assert predict(call(), H100, NEWEST, Switches(cudnn_deprioritized=True)).backend == "flash"


def test_a_shadowing_cudnn_turns_the_order():
    """huggingface/transformers#48163: the cuDNN that is loaded counts, not the one built with."""
    build = Build.released("2.11.0")
    assert predict(call(), H100, build).backend == "cudnn"
    assert predict(call(), H100, build.with_cudnn(91_002)).backend == "flash"


# What goes wrong, and what nobody checks.


def test_everything_off_is_an_error():
    found = predict(call(), A100, NEWEST, Switches(False, False, False, False))
    assert found.backend is None
    assert "switched off" in found.raises


@pytest.mark.parametrize(
    ("sdpa", "version", "word"),
    [
        (SDPA(operand((2, 8, 9, 8)), operand((2, 8, 9, 8), "float32"), operand((2, 8, 9, 8))), "2.13", "dtype"),
        (masked((128, 128), "int32"), "2.13", "attn_mask"),
        (masked((128, 128), is_causal=True), "2.14", "is_causal"),
        (masked((128, 128), is_causal=True, dtype="float64"), "2.13", "attn_mask"),
    ],
)  # fmt: skip
def test_errors(sdpa, version, word):
    found = predict(sdpa, A100, Build.released(version))
    assert word in found.raises
    assert found.raises in str(found).replace("\n", " ")


@pytest.mark.parametrize(
    ("sdpa", "word"),
    [
        (call((2, 8, 9, 64), (2, 8, 9, 64), (2, 8, 7, 64)), "no backend checks this"),
        (call(dropout_p=-1.0), "nobody checks"),
        (call((2, 8, 0, 64), (2, 8, 9, 64)), "zeros"),
        (masked((64, 128)), "does not broadcast"),
        (call(dtype="float64"), "O(L^2)"),
        (masked((128, 128), "float32"), "-1e9"),
        (call(scale=0.0), "NaN"),
    ],
)
def test_called_out(sdpa, word):
    assert any(word in note for note in predict(sdpa, A100, NEWEST).notes)


def test_a_known_fault_of_the_chosen_backend():
    sdpa = call((2, 8, 192, 64), requires_grad=True)
    assert any("196678" in note for note in predict(sdpa, H100, Build.released("2.13.0")).notes)
    assert not predict(sdpa, H100, Build.released("2.15.0")).notes  # cuDNN 9.26
    assert not predict(call((2, 8, 256, 64), requires_grad=True), H100, NEWEST).notes


@pytest.mark.parametrize("version", ["2.0", "2.1.2", "2.4.1", "2.5.0", "2.6", "2.7.1", "2.8"])
def test_releases_whose_rules_were_only_read_are_marked(version):
    for device in ("A100", "GTX 1080", "CPU"):
        found = explain_torch(Problem.of(dtype="float16"), device=device, version=version)
        assert not found.verified
        assert any("unverified" in note for note in found.notes)
        assert found.backend


def test_nested_tensors_are_marked():
    sdpa = call(nested=True)
    found = predict(sdpa, A100, NEWEST)
    assert found.backend == "flash"
    assert not found.verified
    assert found.candidates["cudnn"].verdict is Verdict.ILLEGAL


def test_a_release_to_come():
    found = explain_torch(Problem.of(), device="A100", version="2.99.0")
    assert not found.verified
    assert "newer" in found.to_dict()["build"]


# How a problem is put into PyTorch's words.


@pytest.mark.parametrize(
    ("options", "causal", "shape", "dtype"),
    [
        ({}, False, None, None),
        ({"mask": Causal()}, True, None, None),
        ({"mask": Causal(), "kv_len": 128, "query_start": 0}, True, None, None),
        ({"mask": Causal(), "kv_len": 128, "query_start": "end"}, False, (1, 1, 64, 128), "bool"),
        ({"mask": Causal(), "q_len": 1, "kv_len": 128, "query_start": "end"}, False, None, None),
        ({"mask": Causal() & SlidingWindow(3)}, False, (1, 1, 64, 64), "bool"),
        ({"mask": KeyLengths(Layout.contiguous((2,), "int64"))}, False, (2, 1, 1, 64), "bool"),
        ({"mask": DenseMask(Layout.contiguous((64, 64), "bool"))}, False, (64, 64), "bool"),
        ({"bias": ALiBi(), "mask": Causal()}, False, (1, 8, 64, 64), "float16"),
        ({"bias": DenseBias(Layout.contiguous((8, 64, 64), "float32"))}, False, (8, 64, 64), "float32"),
    ],
)  # fmt: skip
def test_a_problem_in_the_words_of_pytorch(options, causal, shape, dtype):
    problem = Problem.of(**{"batch": 2, "q_len": 64, "dtype": "float16", **options})
    sdpa = SDPA.from_problem(problem)
    assert sdpa.is_causal == causal
    assert (sdpa.attn_mask and sdpa.attn_mask.shape) == shape
    assert (sdpa.attn_mask and sdpa.attn_mask.dtype) == dtype


@pytest.mark.parametrize(
    "option", [{"softcap": 2.0}, {"sinks": Layout.contiguous((8,), "float32")}]
)
def test_what_pytorch_has_no_word_for(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))}: found.*PyTorch"):
        explain_torch(Problem.of(**option), device="A100")


def test_tensors_are_described_as_they_are():
    query = torch.zeros(2, 4, 16, 24, dtype=torch.float16)[..., 4:20].requires_grad_()
    found = explain_torch(query, query, query, torch.ones(16, 16, dtype=torch.bool))
    sdpa = found.situation.sdpa
    assert sdpa.query.storage_offset == 4
    assert sdpa.training
    assert sdpa.attn_mask.dtype == "bool"
    assert found.situation.device.kind == "cpu"
    assert found.situation.build.source == "in this process"
    with torch.no_grad():
        assert not explain_torch(query, query, query).situation.sdpa.training
    there = explain_torch(query, query, query, device="RTX 4090", version="2.13.0")
    assert there.backend == "flash"
    assert any("16 bytes" in note for note in there.notes)


def test_switches_of_the_process_count():
    query = torch.zeros(1, 2, 8, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = explain_torch(query, query, query)
    assert found.backend == "math"
    assert found.candidates["flash"].verdict is Verdict.OFF


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        ((np.zeros((1, 1, 2, 2)),) * 3, {}, "query"),
        ((Problem.of(), 1), {}, "query"),
        ((Problem.of(),), {"is_causal": True}, "query"),
        ((Problem.of(),), {"dropout_p": 0.5}, "query"),
        ((SDPA.of((1, 2, 3, 4)),), {"scale": 2.0}, "query"),
        ((torch.zeros(1, 1, 2, 2), 3, 4), {}, "key"),
        ((Problem.of(),), {"version": "new"}, "version"),
        ((Problem.of(),), {"version": "1.13"}, "version"),
        ((Problem.of(),), {"version": 2.13}, "version"),
        ((Problem.of(),), {"device": "GTX 999"}, "device"),
        ((Problem.of(),), {"device": torch.device("cpu")}, "device"),
        ((torch.zeros(2, 2).to_sparse(),) * 3, {}, "query"),
    ],
)
def test_bad_questions_are_refused_by_name(arguments, options, word):
    with pytest.raises((TypeError, ValueError), match=f"{word}: found"):
        explain_torch(*arguments, **options)


# As text and as data.


def test_text_and_json_say_the_same():
    found = explain_torch(Problem.of(dtype="float32"), device="H100", version="2.13.0")
    shown = json.loads(json.dumps(found.to_dict()))
    assert shown == found.to_dict()
    text = " ".join(str(found).split())
    assert "PyTorch runs efficient on H100" in text
    assert "sdp_utils_cpp.h:91" in text
    assert shown["candidates"]["flash"]["verdict"] == "illegal"
    assert shown["candidates"]["flash"]["reasons"][0]["place"].endswith("sdp_utils_cpp.h:91")
    assert all(len(line) <= 200 for line in str(found).splitlines())


def test_no_torch_is_needed():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import limelight as ll\n"
        "print(ll.explain_torch(ll.Problem.of(), device='H100', version='2.11.0').backend)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cudnn"


# Builds and cards.


def test_builds_are_in_order_and_machine_code_serves_later_minor_versions():
    versions = [build.version for build in WHEELS]
    assert versions == sorted(versions)
    build = Build((2, 13, 0), (13, 0), 92000, ("sm_80", "sm_100", "compute_120"))
    able = {(8, 0): True, (8, 9): True, (9, 0): False, (10, 3): True, (12, 1): True, (7, 5): False}
    assert {capability: build.can_run(capability) for capability in able} == able


def test_versions():
    assert parsed("2.14.0a0+git123") == (2, 14, 0)
    assert cudnn_spelled(8902) == "8.9.2"


@pytest.mark.parametrize(
    ("device", "wheel"), [("GTX 1080", "2.7"), ("P100", "2.7"), ("V100", "2.10"), ("T4", "2.15")]
)
def test_the_last_wheel_for_an_old_card(device, wheel):
    assert last_wheel(Device.named(device)) == wheel
    assert wheel in " ".join(notes(Device.named(device)))


def test_only_old_cards_have_notes():
    assert not notes(A100)
    assert not notes(Device.named("CPU"))
    for card in GENERATIONS:
        assert card.sources
