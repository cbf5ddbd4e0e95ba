"""Times code for Turing, on tensor cores and without, on the GPU that is here, and writes JSON.

    python -m benchmarks.old_targets --out benchmarks/results/turing-on-h200.json

No Turing is at hand: the driver of a newer GPU assembles the PTX for sm_75. That says that the code
is right and how much the tensor cores save on that GPU; a Turing's own times it does not say.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import limelight as ll
from limelight.kernels import fused
from limelight.launcher import compile as compiling
from limelight.testing import compiled_for, error, oracle

REPEATS = 9
TURING = (7, 5)


def on_tensor_cores() -> AbstractContextManager[Any]:
    return compiled_for(TURING)


def on_fma() -> AbstractContextManager[Any]:
    """As before Turing: the tiles of sm_70, and no tensor cores."""
    stack = ExitStack()
    stack.enter_context(compiled_for(TURING))
    stack.enter_context(mock.patch.object(compiling, "compile_for_tensor_cores", return_value=None))
    stack.enter_context(mock.patch.object(fused, "capability", return_value=70))
    return stack


WAYS = {"tensor cores": on_tensor_cores, "fma": on_fma}
CASES = [(head_dim, causal) for head_dim in (64, 128) for causal in (False, True)]


def compile_ahead(way: str, head_dim: int, causal: bool) -> None:
    """Fills Triton's cache on disk with what a measurement will need."""
    problem = ll.Problem.of(
        batch=2,
        heads=16,
        q_len=2048,
        head_dim=head_dim,
        dtype="float16",
        mask=ll.Causal() if causal else None,
        training=True,
        device=ll.Device.cuda("the one here", torch.cuda.get_device_capability(), sms=0),
    )
    with WAYS[way](), ll.backends("flash"):
        ll.precompile(problem)


def milliseconds(run: Callable[[], Any]) -> float:
    """The median of several, by CUDA events; the wait hides what a launch costs the CPU."""
    run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(head_dim: int, causal: bool) -> dict[str, Any]:
    """Forward and backward, batch 2, 16 heads, length 2048, float16, each way checked first."""
    shape, length = (2, 16, 2048, head_dim), 2048
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    d_out = torch.randn_like(q)
    mask = ll.Causal() if causal else None
    one = [tensor[:1, :1] for tensor in (q, k, v)]
    expected = oracle(*one, mask=mask, d_out=d_out[:1, :1])
    products = 2 * 2 * 16 * length**2 * head_dim / (2 if causal else 1)  # operations of one product
    row: dict[str, Any] = {"head_dim": head_dim, "causal": causal}
    for name, way in WAYS.items():
        with way(), ll.backends("flash"):
            out = ll.attention(q, k, v, mask=mask)
            gradients = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
            assert expected.gradients is not None
            pairs = zip((out, *gradients), (expected.out, *expected.gradients[:3]), strict=True)
            worst = max(error(got[:1, :1], want) for got, want in pairs)
            assert worst < 2e-3, worst
            with torch.no_grad():
                forward = milliseconds(lambda: ll.attention(q, k, v, mask=mask))
            backward = milliseconds(partial(torch.autograd.grad, out, (q, k, v), d_out, True))
        row[name] = {
            "forward_ms": round(forward, 3),
            "backward_ms": round(backward, 3),
            "forward_tflops": round(2 * products / forward / 1e9, 1),
            "backward_tflops": round(5 * products / backward / 1e9, 1),
            "error": float(f"{worst:.2g}"),
        }
    for stage in ("forward", "backward"):
        ratio = row["fma"][f"{stage}_ms"] / row["tensor cores"][f"{stage}_ms"]
        row[f"{stage}_times_faster"] = round(ratio, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    path = parser.parse_args().out
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ahead, way, *case) for way in WAYS for case in CASES]
        for job in jobs:
            job.result()
    rows = [measure(*case) for case in CASES]
    found = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "what": "float16 code for sm_75, assembled by this GPU's driver from PTX; "
        "batch 2, 16 heads, length 2048",
        "torch": torch.__version__,
        "triton": version("triton"),
        "rows": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
