"""Memory grows with the length, not with its square: measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import torch, limelight
from pathlib import Path

def status(field):  # kB
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])

def run(length):
    q, k, v = (torch.randn(1, 2, length, 64, requires_grad=True) for _ in range(3))
    slopes = torch.tensor(limelight.ALiBi.paper_slopes(2)).requires_grad_()
    d_out = torch.ones_like(q)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    out = limelight.attention(q, k, v, mask=limelight.Causal(), bias=limelight.ALiBi(slopes))
    out.backward(d_out)
    assert slopes.grad.isfinite().all()
    return (status("VmHWM") - before) / 1024

run(64)  # what is loaded and allocated once
print(run({length}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_alibi_forward_and_backward_of_4096_tokens_take_little_memory():
    """Two heads' scores alone would be 128 MB. Outputs and gradients are 8 MB."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("{length}", "4096")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = float(done.stdout)
    assert 7 < peak < 60, f"{peak:.0f} MB"
