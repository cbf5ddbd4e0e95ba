"""limelight's choice against PyTorch's default on one NVIDIA GPU: GPU time and CPU cost, as JSON.

    python -m benchmarks.never_slower --out benchmarks/results/never-slower.json

Both sides are called through the signature of `torch.nn.functional.scaled_dot_product_attention`,
interleaved. GPU time comes from CUDA events around calls that wait behind a kernel that sleeps, so
the CPU's part hides; CPU cost is the time in which calls return. Results are compared before they
are timed. `--alone NAME` times one of limelight's backends instead of its choice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import limelight as ll

WARMUP, REPEATS = 2, 9
SLEEP = 2_000_000  # cycles, about a millisecond
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 2e-4}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Way = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """mask: None, "padding" (bool, a length per batch element), "dense" (bool) or "bias"."""

    name: str
    q_len: int
    dim: int = 64
    kv_len: int | None = None
    batch: int = 2
    heads: int = 16
    kv_heads: int | None = None
    dtype: torch.dtype = BF16
    causal: bool = False
    mask: str | None = None
    training: bool = True

    def tensors(self) -> tuple[list[Tensor], dict[str, Any]]:
        kv_len = self.q_len if self.kv_len is None else self.kv_len
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.dim)
            drawn = torch.randn(shape, device="cuda", dtype=self.dtype)
            return drawn.requires_grad_(self.training)

        inputs = [
            normal(self.heads, self.q_len),
            normal(kv_heads, kv_len),
            normal(kv_heads, kv_len),
        ]
        options: dict[str, Any] = {}
        if self.causal:
            options["is_causal"] = True
        if kv_heads != self.heads:
            options["enable_gqa"] = True
        if self.mask == "padding":
            lengths = torch.linspace(kv_len // 4, kv_len, self.batch, device="cuda").long()
            keys = torch.arange(kv_len, device="cuda")
            options["attn_mask"] = (keys < lengths[:, None])[:, None, None]
        elif self.mask == "dense":
            drawn = torch.rand(self.q_len, kv_len, device="cuda") < 0.7
            drawn[:, 0] = True  # no empty row: PyTorch's kernels differ on those
            options["attn_mask"] = drawn
        elif self.mask == "bias":
            shape = (1, self.heads, self.q_len, kv_len)
            options["attn_mask"] = torch.randn(shape, device="cuda", dtype=self.dtype)
        return inputs, options


def cases() -> list[Case]:
    found = []
    for dim, heads in ((64, 16), (128, 8)):
        for length in (128, 256, 512, 1024, 2048, 4096):
            batch = max(1, 8192 // length)
            found.append(Case(f"plain {length} x {dim}", length, dim, batch=batch, heads=heads))
        for length in (128, 512, 1024, 4096):
            batch = max(1, 8192 // length)
            name = f"causal {length} x {dim}"
            found.append(Case(name, length, dim, batch=batch, heads=heads, causal=True))
    found += [
        Case("short batch of one, 64 x 64", 64, 64, batch=1, heads=8),
        Case("short batch of one, 128 x 64", 128, 64, batch=1, heads=8),
        Case("long 16384 x 128", 16384, 128, batch=1, heads=8),
        Case("long causal 16384 x 64", 16384, 64, batch=1, heads=8, causal=True),
        Case("head_dim 256", 2048, 256, heads=8),
        Case("head_dim 96 causal", 2048, 96, causal=True),
        Case("head_dim 72", 1024, 72),
        Case("head_dim 80 causal", 1024, 80, causal=True),
        Case("head_dim 40", 4096, 40, heads=8),
        Case("head_dim 100", 1024, 100),
        Case("head_dim 36 causal", 1024, 36, causal=True),
        Case("cross attention to 77 keys", 4096, 40, kv_len=77, heads=8),
        Case("cross attention 512 to 1500", 512, 64, kv_len=1500),
        Case("causal from the top left, 512 to 1024", 512, 64, kv_len=1024, causal=True),
        Case("grouped heads 32 / 8, causal", 2048, 128, heads=32, kv_heads=8, causal=True),
        Case("grouped heads 32 / 8", 2048, 128, heads=32, kv_heads=8),
        Case("float16 1024 x 64", 1024, 64, dtype=F16, batch=8),
        Case("float16 causal 2048 x 128", 2048, 128, dtype=F16, causal=True),
        Case("float32 1024 x 64", 1024, 64, dtype=F32),
        Case("float32 causal 2048 x 64", 2048, 64, dtype=F32, causal=True),
        Case("float32 1024 x 128", 1024, 128, dtype=F32, heads=8),
        Case("padding, 8 x 1024", 1024, 64, batch=8, mask="padding"),
        Case("padding, 8 x 512, head_dim 128", 512, 128, batch=8, heads=8, mask="padding"),
        Case("dense mask 1024", 1024, 64, mask="dense"),
        Case("dense bias 1024", 1024, 64, mask="bias"),
        Case("dense bias 2048, head_dim 128", 2048, 128, heads=8, mask="bias"),
        Case("dense bias float32 1024", 1024, 64, dtype=F32, mask="bias"),
    ]
    for kv_len in (256, 1024, 8192, 65536):
        sizes: dict[str, Any] = {"kv_len": kv_len, "batch": 1, "heads": 32, "training": False}
        found.append(Case(f"decode {kv_len} keys", 1, 128, **sizes))
        found.append(Case(f"decode {kv_len} keys, grouped 32 / 8", 1, 128, kv_heads=8, **sizes))
    return found


def measure(case: Case, alone: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs, options = case.tensors()
    ours, theirs = ll.scaled_dot_product_attention, F.scaled_dot_product_attention
    row: dict[str, Any] = {
        "case": case.name,
        "query": tuple(inputs[0].shape),
        "key": tuple(inputs[1].shape),
        "dtype": str(case.dtype).removeprefix("torch."),
        "torch": ll.explain_torch(*inputs, **options).backend,
    }
    allowed = ll.backends(alone) if alone else contextlib.nullcontext()
    with allowed, ll.record() as calls:
        outs = [way(*inputs, **options) for way in (ours, theirs)]
        d_out = torch.randn_like(outs[0])
        gradients = [
            torch.autograd.grad(out, inputs, d_out, retain_graph=True) if case.training else ()
            for out in outs
        ]
        row["limelight"] = calls[0].backend
    pairs = zip((outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True)
    row["difference"] = max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)
    assert row["difference"] <= TOLERANCE[case.dtype], row
    with ll.backends(alone) if alone else contextlib.nullcontext():
        forward = [lambda way=way: way(*inputs, **options) for way in (ours, theirs)]
        with torch.no_grad():
            row["forward ms"] = gpu_ms(forward)
            row["forward cpu us"] = cpu_us(forward)
        if case.training:
            backward = [
                lambda out=out: torch.autograd.grad(out, inputs, d_out, retain_graph=True)
                for out in outs
            ]
            both = [
                lambda way=way: torch.autograd.grad(way(*inputs, **options), inputs, d_out)
                for way in (ours, theirs)
            ]
            row["backward ms"] = gpu_ms(backward)
            row["training cpu us"] = cpu_us(both)
    for name in ("forward ms", "backward ms", "forward cpu us", "training cpu us"):
        if name in row:
            row[f"{name} ratio"] = round(row[name][0] / row[name][1], 3)
    return row


def gpu_ms(ways: list[Callable[[], object]]) -> list[float]:
    """Median milliseconds a call, of each way."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(WARMUP + REPEATS):
        for n, way in enumerate(ways):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP)
            start.record()
            for _ in range(4):
                way()
            stop.record()
            torch.cuda.synchronize()
            if turn >= WARMUP:
                times[n].append(start.elapsed_time(stop) / 4)
    return [round(statistics.median(each), 5) for each in times]


def cpu_us(ways: list[Callable[[], object]], calls: int = 20) -> list[float]:
    """Least microseconds in which a call returns, of each way, among several rounds."""
    best = [float("inf")] * len(ways)
    for _ in range(6):
        for n, way in enumerate(ways):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                way()
            best[n] = min(best[n], (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return [round(each, 1) for each in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--alone", default=None, help="one backend, instead of the choice")
    parser.add_argument("--part", default="0/1", help="n/m: every m-th case from the n-th")
    options = parser.parse_args()
    n, m = map(int, options.part.split("/"))
    rows = []
    for case in [case for case in cases() if options.only in case.name][n::m]:
        try:
            rows.append(measure(case, options.alone))
        except ll.NoBackendError:
            continue
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "limelight": ll.__version__,
        "alone": options.alone,
        "repeats": REPEATS,
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{{"about": {json.dumps(about)},\n "rows": [\n{lines}\n]}}\n'
    options.out.write_text(text)


if __name__ == "__main__":
    main()
