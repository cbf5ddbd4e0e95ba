"""How long a first call waits for its kernels: compiled into empty caches, and read from disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec

# Run in a process of its own, as one that has compiled before is warm. Importing torch is not
# counted: whoever calls attention has done that.
_PROGRAM = """
import sys, time
import torch
import limelight

major, minor = map(int, sys.argv[1:])
problem = limelight.Problem.of(
    dtype="float16", mask=limelight.Causal(), training=True,
    device=limelight.Device.cuda("the target", (major, minor), sms=0),
)
with limelight.backends("flash"):
    begin = time.perf_counter()
    limelight.precompile(problem)
    print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class ColdStart:
    """Seconds until forward and backward of a causal float16 problem, head_dim 64, are ready.

    empty: nothing was compiled before. from_disk: all of it was, by another process.
    """

    empty: float
    from_disk: float


def cold_start(target: tuple[int, int]) -> ColdStart | str:
    """Measured for a compute capability, on a GPU or without one; or why it is not.

    Raises RuntimeError with the process's last words where compiling fails.
    """
    for package, why in (("triton", "which compiles"), ("torch", "whose tensors flash runs on")):
        if find_spec(package) is None:
            return f"{package}, {why}, is not installed"
    with tempfile.TemporaryDirectory() as folder:
        return ColdStart(_ready(target, folder), _ready(target, folder))


def _ready(target: tuple[int, int], folder: str) -> float:
    """Seconds until everything is ready, with the caches in a folder."""
    own = {"LIMELIGHT_CACHE_DIR": f"{folder}/limelight", "TRITON_CACHE_DIR": f"{folder}/triton"}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, target)],
        capture_output=True,
        text=True,
        env=os.environ | own | paths,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"compiling the kernels failed:\n{done.stderr.strip()[-2000:]}")
    return float(done.stdout.split()[-1])
