"""The programs of examples/ run, and what they define holds to the contract."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from inputs import normal, qkv

from limelight import Causal, KeyLengths
from limelight.testing import check

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_every_example_runs():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for path in EXAMPLES.glob("*.py"):
        subprocess.run(
            [sys.executable, str(path)], check=True, env=environment, capture_output=True
        )


def test_biases_from_outside(backend, device, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    own = importlib.import_module("own_bias")
    rates = normal(4, device=device)
    bias = own.PeriodicBias(normal(1, 5, device=device)) + own.LogDistance(rates)
    mask = Causal() & KeyLengths(torch.tensor([9, 17], device=device))
    q, k, v = qkv(device=device, kv_heads=2, q_len=19)
    options = {"bias": bias, "mask": mask, "query_start": 3}
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)
