"""Runs the tests that need a GPU, group by group, and writes what came of them as JSON.

    python -m benchmarks.gpu_tests --out benchmarks/results/gpu-tests.json --seconds 400

The file is written after every group, so that a run which is cut short leaves what it saw. What
needs no GPU, or a model from the network, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.gpu import commit

# The most telling first. What pytest selects by -k, backends' names among them.
GROUPS = {
    "hopper's backward": "test_hopper_backward",
    "flash": "flash and not torch_flash",
    "operators of PyTorch": "torch_cudnn or torch_flash or torch_efficient",
    "predictions of PyTorch's choice": "test_real",
    "code for other GPUs": "test_other_targets",
    "precompile": "test_precompile",
    "exports": "export",
    "JAX and CuPy": "on_jax or test_cupy",
    "hopper": "hopper and not test_hopper_backward",
}
LEFT_OUT = ("kernels", "launcher", "test_transformers.py", "test_demo.py", "test_cli.py")
LINE = re.compile(
    r"(PASSED|FAILED|SKIPPED|ERROR) (tests/\S+)|(tests/\S+) (PASSED|FAILED|SKIPPED|ERROR)"
)


def run(selected: str, workers: int, seconds: float) -> dict[str, object]:
    """One group: how many tests ended how, and why each failed."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "gpu", "-k", selected]
    command += ["-n", str(workers), "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [f"--ignore=tests/{each}" for each in LEFT_OUT]
    start = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            log, _ = process.communicate(timeout=seconds)
            ended = "ran to its end"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            log, _ = process.communicate()
            ended = f"stopped after {seconds:.0f} s"
    found = [(each[1] or each[4], each[2] or each[3]) for each in LINE.finditer(log)]
    counts = Counter(outcome.lower() for outcome, _ in dict.fromkeys(found))
    return {
        "selected": selected,
        **{name: counts[name] for name in ("passed", "failed", "error", "skipped")},
        "failures": sorted({name for outcome, name in found if outcome in ("FAILED", "ERROR")}),
        "why": re.findall(r"^E   +(.{1,300})", log, re.MULTILINE)[:20],
        "ended": ended if found else log[-2000:],
        "seconds": round(time.monotonic() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="for all groups together")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--only", default="", help="the groups whose name contains this")
    parser.add_argument("--commit", default=None, help="the commit that is tested")
    asked = parser.parse_args()
    about = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": asked.commit or commit(),
        "left out": [f"tests/{each}" for each in LEFT_OUT],
    }
    groups: dict[str, object] = {}
    stop = time.monotonic() + asked.seconds
    for name, selected in GROUPS.items():
        left = stop - time.monotonic()
        if asked.only in name:
            not_begun = {"selected": selected, "ended": "not begun: no time was left"}
            groups[name] = run(selected, asked.workers, left) if left > 5 else not_begun
            print(name, json.dumps(groups[name]), flush=True)
            asked.out.write_text(json.dumps(about | {"groups": groups}, indent=1) + "\n")


if __name__ == "__main__":
    main()
