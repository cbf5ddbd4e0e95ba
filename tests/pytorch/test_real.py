"""Predictions against the PyTorch of this machine: what it selects, and which operator then runs."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from generated import calls, tensors

from limelight.adapters.torch.prediction import build_here, switches_here
from limelight.devices import CPU
from limelight.pytorch import Situation, faults, predict
from limelight.pytorch.prediction import selected

NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
}


def place(device):
    if device == "cpu":
        return CPU
    from limelight.adapters.torch.adapter import ADAPTER

    return ADAPTER.device(torch.empty(0, device=device))


def run(call, device):
    query, key, value, mask = tensors(call, device)
    with torch.set_grad_enabled(call.grad_mode):
        return F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout_p, call.is_causal, enable_gqa=call.enable_gqa
        )


def differing_choices(problems, device):
    """Where `torch._fused_sdp_choice` selects something else."""
    here, build, switches = place(device), build_here(), switches_here(place(device))
    wrong = []
    for n, call in enumerate(problems):
        query, key, value, mask = tensors(call, device)
        with torch.set_grad_enabled(call.grad_mode):
            number = torch._fused_sdp_choice(
                query, key, value, mask, call.dropout_p, call.is_causal, enable_gqa=call.enable_gqa
            )
        predicted = selected(Situation(call, here, build, switches))
        if NUMBERS[number] != predicted:
            wrong.append(f"{n}: PyTorch {NUMBERS[number]}, predicted {predicted}: {call}")
    return wrong


def differing_operators(problems, device):
    """How many calls ran, and where the profiler saw another operator than was predicted."""
    here, build, switches = place(device), build_here(), switches_here(place(device))
    predicted, ran = {}, {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for n, call in enumerate(problems):
            found = predict(call, here, build, switches)
            situation = Situation(call, here, build, switches)
            if found.raises or call.empty or faults.of(found.backend, situation):
                continue
            with torch.profiler.record_function(f"call {n}"):
                try:
                    run(call, device)
                except (RuntimeError, IndexError):  # shapes that it finds not to fit once chosen
                    continue
            predicted[n] = found.backend
    number = None
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        label = re.fullmatch(r"call (\d+)", event.name)
        number = int(label[1]) if label else number
        if event.name in OPERATORS:
            ran.setdefault(number, OPERATORS[event.name])
    wrong = [
        f"{n}: ran {ran.get(n)}, predicted {predicted[n]}: {problems[n]}"
        for n in predicted
        if ran.get(n) != predicted[n]
    ]
    return len(predicted), wrong


def test_choices_on_the_cpu():
    wrong = differing_choices(calls(3, 5000), "cpu")
    assert not wrong, "\n".join(wrong[:10])


def test_operators_on_the_cpu():
    count, wrong = differing_operators(calls(4, 300), "cpu")
    assert count > 150
    assert not wrong, "\n".join(wrong[:10])


def test_named_calls_on_the_cpu():
    small = {name: call for name, call in cases().items() if "70000" not in name}
    wrong = differing_choices(list(small.values()), "cpu")
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.gpu
def test_choices_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    wrong = differing_choices([*calls(5, 5000), *cases().values()], "cuda")
    assert not wrong, "\n".join(wrong[:10])


@pytest.mark.gpu
def test_operators_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    count, wrong = differing_operators(calls(5, 5000), "cuda")
    assert count > 2500
    assert not wrong, "\n".join(wrong[:10])
