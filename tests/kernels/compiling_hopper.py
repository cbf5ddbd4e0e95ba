"""Compiles a Hopper kernel without a GPU and prints what ptxas made of it, as JSON.

python -m compiling_hopper forward 128
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compiling import array, problem
from triton import knobs

from limelight.call import Gradients
from limelight.kernels.hopper import backward_plan, plan
from limelight.kernels.launch import Launch
from limelight.kernels.program import recipe
from limelight.launcher import compile_kernel


def launch_of(kernel: str, dim: int) -> Launch:
    call = problem("bfloat16", dim)
    out, lse = array(call.query.shape, "bfloat16"), array(call.query.shape[:3], "float32")
    if kernel == "forward":
        (launch,) = plan.forward(call, out, lse, {}, capability=90, programs=132)
        return launch
    wanted = Gradients(call.query, call.key, call.value, None, ())
    needed = backward_plan.scratch(call, wanted, capability=90)
    memory = {name: array(*shape) for name, shape in needed.items()}
    _, launch, _ = backward_plan.backward(
        call, out, lse, out, None, wanted, memory, capability=90, programs=132
    )
    return launch


def complaints(ptx: str) -> list[str]:
    """What ptxas says of products that it makes wait for one another."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in said.splitlines() if "serialized" in line]


def main(kernel: str, dim: int) -> None:
    binary = compile_kernel(recipe(launch_of(kernel, dim), (9, 0)))
    found = {name: getattr(binary, name) for name in ("registers", "stack", "shared", "threads")}
    wgmma = binary.ptx.count("wgmma.mma_async")
    print(json.dumps(found | {"wgmma": wgmma, "complaints": complaints(binary.ptx)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
