"""Measures limelight and PyTorch on the same problems, interleaved, and writes JSON.

    python -m benchmarks.run --out benchmarks/results/cpu.json

A time is written only after the outputs and gradients of both agreed. Each case runs in a process
of its own, so that its peak memory is its own too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import limelight as ll
from benchmarks.problems import Case, Inputs, cpu_cases, make

REPEATS = 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="run the cases whose name contains this")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = {case.name: case for case in cpu_cases()}
    if options.case:
        print(json.dumps(measure(cases[options.case])))
        return
    rows = []
    for name in cases:
        if options.only and options.only not in name:
            continue
        command = [sys.executable, "-m", "benchmarks.run", "--out", "-", "--case", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    options.out.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")


def about() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    return {
        "date": date.today().isoformat(),
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "limelight": ll.__version__,
        "commit": commit.strip(),
        "repeats": REPEATS,
        "unit": "ms, median; peak MB beyond the inputs",
    }


def measure(case: Case) -> dict[str, Any]:
    inputs = make(case, "cpu")
    row: dict[str, Any] = {"case": case.name, "backend": backend_of(case, inputs)}
    ways = {"limelight": case.call, "torch": case.peer}
    if "dropout" not in case.name:  # each drops other weights
        row["difference"] = difference(case, inputs)
        if not row["difference"] <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{case.name}: results differ by {row['difference']:.1e}")
    times: dict[str, list[float]] = {}
    for way in ways.values():
        run(way, inputs, case)
    for _ in range(REPEATS):
        for name, way in ways.items():
            forward, backward = run(way, inputs, case)
            times.setdefault(f"{name} forward", []).append(forward)
            times.setdefault(f"{name} backward", []).append(backward)
    row |= {name: round(statistics.median(each), 2) for name, each in times.items()}
    for name, way in ways.items():
        row[f"{name} peak MB"] = round(peak_mb(lambda way=way: run(way, inputs, case)))
    return row


def run(way: Callable[[Inputs], Tensor], inputs: Inputs, case: Case) -> tuple[float, float]:
    """Milliseconds of forward and backward."""
    start = time.perf_counter()
    out = way(inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs.gradients(case.parameters), torch.ones_like(out))
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def backend_of(case: Case, inputs: Inputs) -> str:
    with ll.record() as calls:
        case.call(inputs)
    return calls[0].backend


def difference(case: Case, inputs: Inputs) -> float:
    """The largest relative difference of outputs and gradients between the two ways."""
    results = []
    for way in (case.call, case.peer):
        out = way(inputs)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        gradients = torch.autograd.grad(out, inputs.gradients(case.parameters), d_out)
        results.append([t.detach().double() for t in (out, *gradients)])
    return max(
        float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(*results, strict=True)
    )


def peak_mb(work: Callable[[], object]) -> float:
    """Resident memory at its highest while `work` runs, beyond what was there before."""
    done, highest = threading.Event(), [0]
    before = _resident()

    def watch() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (highest[0] - before) / 2**20


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
