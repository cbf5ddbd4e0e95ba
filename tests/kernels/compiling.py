"""Compiles the plan's launches for any GPU, without one, and reads what ptxas made of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import Array, Launch
from limelight.masks import Causal

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Resources:
    """registers per thread; stack (spills) and shared memory in bytes."""

    registers: int
    stack: int
    shared: int


def source(launch: Launch) -> ASTSource:
    return ASTSource(launch.kernel, launch.signature(), launch.compiled_in(), launch.hints())


def compiled(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "maxnreg": launch.max_registers,
    }
    return triton.compile(source(launch), GPUTarget("cuda", capability, 32), options)


def resources(launch: Launch, capability: int) -> Resources:
    kernel = compiled(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", text)}
    return Resources(found["REG"], found["STACK"], kernel.metadata.shared)


def array(shape: tuple[int, ...], dtype: str) -> Array:
    """A contiguous tensor that is nowhere."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return Array(16, shape, tuple(reversed(strides)), dtype, alignment=16)


def problem(dtype: str, dim: int) -> Call:
    """Causal, grouped heads, a length that is no multiple of a tile."""
    query = array((2, 16, 1000, dim), dtype)
    key = array((2, 4, 1000, dim), dtype)
    return Call(None, query, key, key, Causal(), None, None, 0, dim**-0.5, None, 0.0, None)


def launches(call: Call, capability: int) -> list[Launch]:
    """Every launch of a forward and a backward."""
    batch, heads, q_len, _ = call.size
    out = array(call.query.shape, call.query.dtype)
    lse = array((batch, heads, q_len), "float32")
    bias = call.bias.tensors() if call.bias is not None else []
    wanted = Gradients(call.query, call.key, call.value, call.sinks, tuple(bias))
    memory, more = (
        {name: array(shape, dtype) for name, (shape, dtype) in needed.items()}
        for needed in (
            plan.forward_scratch(call, capability),
            plan.scratch(call, wanted, capability),
        )
    )
    return plan.forward(call, out, lse, memory, capability=capability) + plan.backward(
        call, out, lse, out, None, wanted, more, capability=capability
    )


def main(capability: int, dtype: str, dim: int) -> None:
    """Prints the resources of every kernel as JSON: a test reads them from another process.

    A process that interprets cannot compile, and a compiler that fails may abort its process.
    """
    found = {
        _name(launch): asdict(resources(launch, capability))
        for launch in launches(problem(dtype, dim), capability)
    }
    print(json.dumps(found))


def _name(launch: Launch) -> str:
    options = launch.arguments.get("options")
    halves = options is not None and options.precision == "fp16x3"
    return launch.kernel.__name__ + " in halves" * halves


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
