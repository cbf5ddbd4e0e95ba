"""Measures the `hopper` forward beside PyTorch's kernels on an H100 or H200, and writes JSON.

    python -m benchmarks.hopper --out benchmarks/results/hopper.json

16,384 tokens of 2,048 numbers each (heads times head_dim), bfloat16. Ways are interleaved; times
are medians from CUDA events, behind a kernel that hides the CPU's part. TFLOP/s count 4 B H L² D,
half of it under a causal mask. Outputs are compared with cuDNN's before anything is timed.
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


def milliseconds(way: Way) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    way()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def measure(head_dim: int, length: int, causal: bool) -> dict[str, Any]:
    shape = (TOKENS // length, WIDTH // head_dim, length, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    running = ways(q, k, v, causal)
    right = running["cudnn"]().float()
    for name, way in running.items():
        difference = float((way().float() - right).norm() / right.norm())
        if difference > 1e-2:
            raise SystemExit(f"{name} differs from cuDNN by {difference:.1e}")
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(WARMUP + REPEATS):
        for name, way in running.items():
            time = milliseconds(way)
            if turn >= WARMUP:
                times[name].append(time)
    operations = 4 * TOKENS * length * WIDTH / (2 if causal else 1)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "head_dim": head_dim,
        "length": length,
        "causal": causal,
        "ms": {name: round(time, 4) for name, time in medians.items()},
        "TFLOP/s": {name: round(operations / time / 1e9) for name, time in medians.items()},
        "against cudnn": round(medians["cudnn"] / medians["hopper"], 3),
    }


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
