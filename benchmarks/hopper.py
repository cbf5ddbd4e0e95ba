"""Measures the `hopper` kernels beside PyTorch's on an H100 or H200, and writes JSON.

    python -m benchmarks.hopper --out benchmarks/results/hopper.json

16,384 tokens of 2,048 numbers each (heads times head_dim), bfloat16. Ways are interleaved; times
are medians from CUDA events, behind a kernel that hides the CPU's part. TFLOP/s count 4 B H L² D
forward and 10 B H L² D backward, half of it under a causal mask. Outputs and gradients are compared
with cuDNN's before anything is timed. At head_dim 256 the backward is `flash`'s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import limelight as ll

TOKENS, WIDTH = 16384, 2048
WARMUP, REPEATS = 3, 15
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
Way = Callable[[], Tensor]


def ways(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Way]:
    mask = ll.Causal() if causal else None

    def own(backend: str) -> Way:
        def run() -> Tensor:
            with ll.backends(backend):
                return ll.attention(q, k, v, mask=mask)

        return run

    def peer(backend: SDPBackend) -> Way:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    found = {name: own(name) for name in ("hopper", "flash")}
    return found | {name: peer(backend) for name, backend in PEERS.items()}


def milliseconds(way: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    way()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def measure(head_dim: int, length: int, causal: bool) -> dict[str, Any]:
    shape = (TOKENS // length, WIDTH // head_dim, length, head_dim)
    q, k, v, d_out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    running = ways(q, k, v, causal)
    outs = {name: way() for name, way in running.items()}

    def backward(name: str) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(outs[name], inputs, d_out, retain_graph=True)

    right = [outs["cudnn"], *backward("cudnn")()]
    for name, out in outs.items():
        for found, expected in zip([out, *backward(name)()], right, strict=True):
            difference = float((found - expected).float().norm() / expected.float().norm())
            if not difference < 1e-2:
                raise SystemExit(f"{name} differs from cuDNN by {difference:.1e}")
    steps = {(name, "forward"): way for name, way in running.items()}
    steps |= {(name, "backward"): backward(name) for name in running}
    times: dict[tuple[str, str], list[float]] = {step: [] for step in steps}
    for turn in range(WARMUP + REPEATS):
        for step, run in steps.items():
            time = milliseconds(run)
            if turn >= WARMUP:
                times[step].append(time)
    medians = {step: statistics.median(each) for step, each in times.items()}
    row: dict[str, Any] = {"head_dim": head_dim, "length": length, "causal": causal}
    for direction, products in (("forward", 2), ("backward", 5)):
        operations = 2 * products * TOKENS * length * WIDTH / (2 if causal else 1)
        own = {name: time for (name, which), time in medians.items() if which == direction}
        row[direction] = {
            "ms": {name: round(time, 4) for name, time in own.items()},
            "TFLOP/s": {name: round(operations / time / 1e9) for name, time in own.items()},
            "against cudnn": round(own["cudnn"] / own["hopper"], 3),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    rows = []
    for head_dim in (64, 128, 256):
        for length in (1024, 4096, 16384):
            for causal in (False, True):
                rows.append(measure(head_dim, length, causal))
                print(json.dumps(rows[-1]), flush=True)
    facts = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "limelight": ll.__version__,
    }
    out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
