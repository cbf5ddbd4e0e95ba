"""The rules against PyTorch's own answers: verdict, first reason and its line, for every backend.

`answers.json.xz` holds what the CUDA builds of seven releases answered, each on up to ten
architectures: for `cases.py`, and for some of them also for the calls that `generated.py` draws from
the seed 2. A CUDA build answers without a GPU: a preloaded library takes the place of the CUDA
runtime and claims to be a card, and fake tensors stand in for data. An answer is empty where the
backend could run the call, "silent" where it refused without a word, else `function@file:line`.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest
from cases import cases
from generated import calls

from limelight import Device
from limelight.pytorch import Build, Situation, Switches, Verdict, predict
from limelight.pytorch.order import order
from limelight.pytorch.prediction import rules
from limelight.pytorch.rule import reasons

ANSWERS = json.loads(lzma.decompress((Path(__file__).parent / "answers.json.xz").read_bytes()))
CASES = cases()
FUSED = ("flash", "efficient", "cudnn")
# PyTorch warns of these once in a process, from a lambda.
ONCE = ("one key", "one query")


def on(architecture):
    return Device.cuda("a card", divmod(int(architecture), 10), sms=1)


def disagreement(answer, name, situation):
    """What the rules say instead of PyTorch's answer; None where they agree."""
    broken = [rule for rule in rules(name, situation.device) if rule.against(situation)]
    found = reasons(rules(name, situation.device), situation)
    assert len(found) == len(broken)
    if not found:
        said = ""
    elif found[0].silent or (answer == "silent" and broken[0].message in ONCE):
        said = "silent"
    else:
        lambdas = answer.startswith("operator()") and broken[0].message in ONCE
        check = "operator()" if lambdas else found[0].check
        said = f"{check}@{found[0].place.rpartition('/')[2]}"
    return None if said == answer else f"{name}: PyTorch {answer!r}, predicted {said!r}"


@pytest.mark.parametrize("version", ANSWERS)
def test_named_calls(version):
    build = Build.released(version)
    assert build.cudnn == ANSWERS[version]["cudnn"]
    assert build.verified
    compared, wrong = 0, []
    for architecture, answers in ANSWERS[version]["named"].items():
        for name, per_backend in answers["cases"].items():
            switches = Switches(deterministic=name.startswith("deterministic_"))
            call = CASES[name.removeprefix("deterministic_")]
            situation = Situation(call, on(architecture), build, switches)
            assert order(situation)[0] == tuple(answers["order"][:4]), architecture
            for backend, answer in zip(FUSED, per_backend, strict=True):
                compared += 1
                found = disagreement(answer, backend, situation)
                wrong += [f"{architecture} {name} {found}"] if found else []
    assert compared >= 9 * 83 * 3
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("version", [v for v in ANSWERS if ANSWERS[v]["generated"]])
def test_generated_calls(version):
    build = Build.released(version)
    wrong, seen = [], Counter()
    for architecture, answers in ANSWERS[version]["generated"].items():
        for call, per_backend in zip(calls(2, len(answers)), answers, strict=True):
            situation = Situation(call, on(architecture), build, Switches())
            for backend, answer in zip(FUSED, per_backend, strict=True):
                seen[backend, answer.partition("@")[0]] += 1
                found = disagreement(answer, backend, situation)
                wrong += [f"{architecture} {found}: {call}"] if found else []
    assert not wrong, "\n".join(wrong[:20])
    assert len(seen) > 25, "the generator meets too few rules"
    assert all(seen[backend, ""] > 50 for backend in FUSED)


def test_there_are_answers_of_seven_releases():
    assert set(ANSWERS) == {"2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"}


@pytest.mark.parametrize("version", ANSWERS)
def test_the_comparison_can_fail(version):
    """A wrong answer is noticed, whichever way it is wrong."""
    situation = Situation(CASES["base_f32"], on("80"), Build.released(version), Switches())
    right = ANSWERS[version]["named"]["80"]["cases"]["base_f32"]
    for backend, answer in zip(FUSED, right, strict=True):
        assert disagreement(answer, backend, situation) is None
        for other in {"", "silent", "check_tensor_dtype@sdp_utils_cpp.h:1"} - {answer}:
            assert disagreement(other, backend, situation) is not None


@pytest.mark.parametrize(
    ("architecture", "version", "name", "backend"),
    [
        # Told of in public: by hand, and by whom, beside the answers above.
        ("90", "2.9.1", "base_f16", "flash"),  # PyTorch's own announcement said cuDNN
        ("90", "2.11.0", "base_f16", "cudnn"),
        ("75", "2.13.0", "base_bf16", "math"),
        ("80", "2.13.0", "gqa_flag", "flash"),
        ("80", "2.13.0", "mask_2d_bool", "efficient"),
        ("80", "2.13.0", "mask_laststride2", "math"),
        ("90", "2.13.0", "3d", "math"),
        ("90", "2.14.1", "3d", "cudnn"),  # gets a batch of one first
        ("100", "2.14.1", "q1", "flash"),
        ("100", "2.15.0", "q1", "cudnn"),
        ("80", "2.15.0", "batch70000", "efficient"),
    ],
)
def test_what_runs(architecture, version, name, backend):
    found = predict(CASES[name], on(architecture), Build.released(version))
    assert found.backend == backend
    assert found.candidates[backend].verdict is Verdict.CHOSEN
