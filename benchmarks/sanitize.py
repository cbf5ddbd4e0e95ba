"""Runs NVIDIA's compute-sanitizer over a small forward and backward, and writes JSON.

    python -m benchmarks.sanitize --out benchmarks/results/sanitizer.json

memcheck looks for reads and writes out of bounds, racecheck for hazards in shared memory. Lengths
are no multiples of a tile, one batch element is empty, and every kernel that flash has runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

import limelight as ll
from limelight.testing import compiled_for

TOOLS = ("memcheck", "racecheck")
PLACES = ("", "/usr/local/cuda/bin/", "/usr/local/cuda/compute-sanitizer/")


def run(dtype: torch.dtype, head_dim: int) -> None:
    """Causal, padded, with a learned ALiBi and a learned dense bias."""
    q = torch.randn(2, 4, 70, head_dim, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(2, 2, 90, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    dense = torch.randn(4, 70, 90, device="cuda", requires_grad=True)
    out = ll.attention(
        q,
        k,
        v,
        mask=ll.Causal() & ll.KeyLengths(torch.tensor([0, 77], device="cuda")),
        bias=ll.ALiBi(slopes) + ll.DenseBias(dense),
        query_start="end",
    )
    torch.autograd.grad(out, (q, k, v, slopes, dense), torch.ones_like(out))
    torch.cuda.synchronize()


def every_kind() -> None:
    """The kernels of this GPU, and those of Turing."""
    with ll.backends("flash"):
        for dtype, head_dim in ((torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64)):
            run(dtype, head_dim)
        with compiled_for((7, 5)):
            run(torch.float16, 64)


def sanitized(tool: str) -> dict[str, object]:
    """What the sanitizer says at the end."""
    found = filter(None, (shutil.which(f"{place}compute-sanitizer") for place in PLACES))
    path = next(found, None)
    if path is None:
        raise SystemExit("compute-sanitizer, of the CUDA toolkit, is not installed")
    command = [path, "--tool", tool, sys.executable, "-m", "benchmarks.sanitize", "--run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    summary = re.findall(r"========= (.*SUMMARY.*)", done.stdout)
    assert summary, done.stdout[-2000:] + done.stderr[-2000:]
    return {"ended with": done.returncode, "summary": summary[-1].strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="the small run alone")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    every_kind()  # compiles, so that the sanitizer need not watch that
    if asked.run:
        return
    found = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "what": "forward and backward, batch 2, 4 heads over 2, lengths 70 and 90, causal, padding "
        "to 0 and 77, learned ALiBi and dense bias; bfloat16 64, float16 128, float32 64, and "
        "float16 64 in sm_75's code",
        **{tool: sanitized(tool) for tool in TOOLS},
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
